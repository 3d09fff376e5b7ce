"""Whatever a tokenizer's decoder does, a stream of its tokens says what decoding all of them says."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models

from headstart.text.detokenizer import make_detokenizer
from headstart.text.tokenizer import TextTokenizer

from .small import byte_level, word_piece

WORDS = ["the", "▁fox", "▁", "##s", "x</w>", "ö", "你▁▁", "<0x41>", ".", "<pad>", "|", " a "]
REPLACE, FUSE, BYTES, STRIP = (
    decoders.Replace("▁", " "),
    decoders.Fuse(),
    decoders.ByteFallback(),
    decoders.Strip(" ", 1, 0),
)
OF_BYTES = {
    "replacement": REPLACE,
    "replacement, join": decoders.Sequence([REPLACE, FUSE]),
    "two replacements": decoders.Sequence([REPLACE, decoders.Replace("##", "")]),
    "bytes": decoders.Sequence([BYTES, FUSE]),
    "bytes alone": BYTES,
    "replacement, bytes, join": decoders.Sequence([REPLACE, BYTES, FUSE]),
    "replacement, bytes, join, strip": decoders.Sequence([REPLACE, BYTES, FUSE, STRIP]),
    "sequences inside each other": decoders.Sequence([decoders.Sequence([REPLACE]), decoders.Sequence([BYTES, FUSE])]),
    "metaspace": decoders.Metaspace(),
    "metaspace, never before the first": decoders.Metaspace(prepend_scheme="never"),
    "metaspace, bytes": decoders.Sequence([decoders.Metaspace(prepend_scheme="first"), BYTES, FUSE]),
}
OF_NEIGHBOURS = {
    "none": None,
    "word pieces": decoders.WordPiece(),
    "word pieces, not cleaned": decoders.WordPiece(cleanup=False),
    "ends of words": decoders.BPEDecoder(),
    "a strip of every token": decoders.Sequence([REPLACE, STRIP]),
    "a strip at both ends": decoders.Sequence([REPLACE, FUSE, decoders.Strip(" ", 1, 1)]),
    "a replacement by pattern": decoders.Replace(Regex("▁+"), " "),
    "a replacement over tokens": decoders.Sequence([FUSE, decoders.Replace("▁f", "F")]),
}


def make(decoder):
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="the"))
    if decoder is not None:
        backend.decoder = decoder
    return TextTokenizer(backend, {})


def streamed(tokenizer, ids):
    detokenizer = make_detokenizer(tokenizer)
    return "".join([detokenizer.push((token_id,)) for token_id in ids] + [detokenizer.finish()])


@pytest.mark.parametrize("name", OF_BYTES)
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=30))
def test_tokens_that_are_runs_of_bytes_add_up(name, ids):
    tokenizer = make(OF_BYTES[name])
    assert tokenizer.rule is not None
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["none", "word pieces", "word pieces, not cleaned"])
@given(ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=30))
def test_tokens_whose_text_depends_on_what_is_before_them_add_up(name, ids):
    tokenizer = make(OF_NEIGHBOURS[name])
    assert tokenizer.rule is None
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", OF_NEIGHBOURS)
def test_a_decoder_that_looks_at_neighbours_is_not_taken_for_one_of_bytes(name):
    assert make(OF_NEIGHBOURS[name]).rule is None


def test_a_single_token_is_shown_as_it_stands_inside_a_text():
    shown = {text: word_piece().token_bytes(word_piece()._backend.token_to_id(text)) for text in ("wor", "##ld", ".")}
    assert shown == {"wor": b" wor", "##ld": b"ld", ".": b"."}


def test_an_added_token_of_a_byte_level_vocabulary_is_its_own_text():
    backend = tokenizers.Tokenizer.from_str(byte_level()._backend.to_str())
    backend.add_tokens(["a ▁b", "日本"])
    tokenizer = TextTokenizer(backend, {})
    ids = [backend.token_to_id(text) for text in ("a ▁b", "日本")]
    assert [tokenizer.token_bytes(i).decode() for i in ids] == ["a ▁b", "日本"]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids) == "a ▁b日本"


@pytest.mark.parametrize("token_id", [-1, 380, 1 << 31, 1 << 40])
def test_an_id_that_no_token_has_is_empty(token_id):
    assert byte_level().token_bytes(token_id) == b""
