"""Pieces add up to the whole, and no character is ever cut."""

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headstart.text.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer
from headstart.text.stop_strings import StopMatcher, StopStrings
from headstart.text.tokenizer import TextTokenizer

from .small import byte_level, metaspace, piece_level, sentence_piece, vocab_size, word_piece

BYTE_IDS = st.lists(st.integers(0, 379), max_size=40)
UNICODE = st.text(max_size=60)
SENTENCES = st.text(alphabet="the fox.es äö你🙂 é", max_size=40)
PIECES = st.lists(st.sampled_from([*range(259, 269), 1, 2]), max_size=60)


@cache
def llama():
    return TextTokenizer(sentence_piece(), {})


def stream(detokenizer, ids):
    return [detokenizer.push((token_id,)) for token_id in ids] + [detokenizer.finish()]


def test_the_byte_path_serves_vocabularies_whose_tokens_are_runs_of_bytes():
    for tokenizer in (byte_level(), piece_level(), llama()):
        assert isinstance(make_detokenizer(tokenizer), ByteDetokenizer)
    assert isinstance(make_detokenizer(word_piece()), WindowDetokenizer)
    with pytest.raises(ValueError, match="neighbours"):
        ByteDetokenizer(word_piece())
    assert vocab_size(byte_level()) == 380


@given(BYTE_IDS, st.booleans())
@example([260, 3, 2, 260], True)
def test_random_ids_add_up_to_what_decoding_all_of_them_gives(ids, skip):
    assert "".join(stream(make_detokenizer(byte_level(), skip), ids)) == byte_level().decode(ids, skip)


@given(UNICODE)
def test_any_text_comes_back_token_by_token_without_a_replacement_character(text):
    ids = byte_level().encode(text)
    pieces = stream(make_detokenizer(byte_level(), skip_special_tokens=False), ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(UNICODE)
def test_the_window_path_agrees_with_the_byte_path_on_any_text(text):
    ids = byte_level().encode(text)
    assert "".join(stream(WindowDetokenizer(byte_level(), False), ids)) == byte_level().decode(ids, False)


@given(SENTENCES)
def test_pieces_with_byte_fallback_add_up_and_never_end_inside_a_character(text):
    ids = [3 + byte for byte in text.encode()] + [260, 262, 263, 2]
    pieces = stream(make_detokenizer(piece_level()), ids)
    assert "".join(pieces) == piece_level().decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("make", [piece_level, metaspace, llama])
@given(ids=PIECES)
def test_pieces_add_up_whatever_their_order(make, ids):
    assert "".join(stream(make_detokenizer(make()), ids)) == make().decode(ids)


@pytest.mark.parametrize("make", [piece_level, metaspace, llama, word_piece, byte_level])
@given(
    prompt=st.lists(st.integers(0, 10), max_size=20), ids=st.lists(st.integers(0, 10), max_size=30), skip=st.booleans()
)
def test_an_answer_adds_to_a_prompt_what_decoding_both_adds_to_it(make, prompt, ids, skip):
    """Over words, whose bytes are whole characters."""
    first_word = {piece_level: 259, metaspace: 0, llama: 259, word_piece: 0, byte_level: 259}[make]
    prompt, ids = ([first_word + i for i in part] for part in (prompt, ids))
    expected = make().decode(prompt + ids, skip)[len(make().decode(prompt, skip)) :]
    assert "".join(stream(make_detokenizer(make(), skip, prompt), ids)) == expected
    assert make().decode_after(prompt, ids, skip) == expected


@given(SENTENCES, SENTENCES)
def test_a_text_that_goes_on_after_a_prompt_keeps_every_space(prompt, text):
    whole = llama().encode(prompt + text)
    num_prompt = len(prompt) // 2
    detokenizer = make_detokenizer(llama(), True, whole[:num_prompt])
    added = "".join(stream(detokenizer, whole[num_prompt:]))
    assert llama().decode(whole).endswith(added) or "\ufffd" in added
    if "\ufffd" not in added:
        assert added == llama().decode(whole)[len(llama().decode(whole[:num_prompt]).rstrip("\ufffd")) :]


def test_the_first_word_after_a_prompt_keeps_its_space_and_stop_strings_see_it():
    hello, world = (piece_level()._backend.token_to_id(piece) for piece in ("▁the", "▁fox"))
    detokenizer, matcher = make_detokenizer(piece_level(), True, [1, hello]), StopMatcher(StopStrings((" fox",)))
    text = detokenizer.push([world])
    assert text == " fox"
    assert (matcher.push(text), matcher.matched) == ("", " fox")
    assert make_detokenizer(piece_level(), True, [1]).push([world]) == "fox"  # nothing but a special token before it
    assert make_detokenizer(piece_level(), False, [1]).push([world]) == " fox"  # which is text here


@pytest.mark.parametrize(
    "bad", [[0xFF], [0xFF] * 7, [0xC3, 0x28], [0xE2, 0x82], [0xF0, 0x9F, 0x98, 0xF0], [0xED, 0xA0, 0x80]]
)
def test_bytes_that_are_no_text_become_replacement_characters_and_the_text_goes_on(bad):
    ids = [3 + byte for byte in bad] + [260, 262]
    pieces = stream(make_detokenizer(piece_level(), True, [259]), ids)
    whole = piece_level().decode([259, *ids])
    if 0x28 in bad:  # a run of bytes is spoilt as a whole for the library, which a stream cannot know in time
        whole = whole.replace("\ufffd\ufffd", "\ufffd(")
    assert "the" + "".join(pieces) == whole
    assert make_detokenizer(piece_level()).push([3 + 0xFF]) == "\ufffd"


def test_a_stop_string_after_an_invalid_byte_is_found():
    matcher = StopMatcher(StopStrings(("fox.",)))
    detokenizer = make_detokenizer(piece_level(), True, [259])
    fox, dot = (piece_level()._backend.token_to_id(piece) for piece in ("fox", "."))
    texts = [matcher.push(detokenizer.push([token_id])) for token_id in (3 + 0xFF, 3 + 0xE2, fox, dot)]
    assert (texts, matcher.matched) == (["\ufffd", "", "\ufffd", ""], "fox.")


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_hand_out_all_but_the_beginning_of_one_character(data):
    detokenizer = make_detokenizer(piece_level(), True, [259])
    given = ""
    for num_pushed, byte in enumerate(data, start=1):
        given += detokenizer.push((3 + byte,))
        assert len(given.encode("utf-8", "replace").replace("\ufffd".encode(), b"?")) >= num_pushed - 3
    assert (given + detokenizer.finish()).replace("\ufffd", "") == bytes(data).decode(errors="ignore").replace(
        "\ufffd", ""
    )


class CountingTokenizer(TextTokenizer):
    """Counts the ids that are given to the library to decode."""

    num_decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("ids", [[2, 3, 4, 7] * 500, [10] * 2000, [1] * 2000, [0, 1] * 1000])
def test_a_long_text_costs_as_much_for_each_token_as_a_short_one(ids):
    tokenizer = CountingTokenizer(word_piece()._backend, {})
    stream(make_detokenizer(tokenizer, True, [2] * 5000), ids)
    assert tokenizer.num_decoded <= len(ids) * 2 * (8 + 5)


def test_a_text_of_byte_pieces_is_never_decoded_again():
    tokenizer = CountingTokenizer(piece_level()._backend, {})
    pieces = stream(make_detokenizer(tokenizer, True, [259]), [3 + 0xFF] * 6000)
    assert pieces == ["\ufffd"] * 6000 + [""]
    assert tokenizer.num_decoded == 0


def test_logprobs_show_a_piece_with_its_space_and_a_byte_as_itself():
    token_id = piece_level()._backend.token_to_id
    assert piece_level().token_bytes(token_id("▁fox")) == b" fox"
    assert list(piece_level().token_bytes(token_id("<0xF0>"))) == [240]
    assert piece_level().token_bytes(token_id("▁")) == b" "
    assert metaspace().token_bytes(metaspace()._backend.token_to_id("▁fox")) == b" fox"


def test_an_emoji_split_over_four_tokens_arrives_whole_with_its_last_byte():
    ids = [next(i for i in range(380) if byte_level().token_bytes(i) == bytes([byte])) for byte in "🦊".encode()]
    assert stream(make_detokenizer(byte_level()), ids) == ["", "", "", "🦊", ""]


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character_only_at_finish():
    first = next(i for i in range(380) if byte_level().token_bytes(i) == b"\xf0")
    assert stream(make_detokenizer(byte_level()), [first]) == ["", "\ufffd"]


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_left_out_on_request(skip):
    text = "".join(stream(make_detokenizer(byte_level(), skip), [*byte_level().encode("fox"), 2]))
    assert text == ("fox" if skip else "fox<|im_end|>")
