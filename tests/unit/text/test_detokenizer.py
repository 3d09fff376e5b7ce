"""Pieces add up to the whole, and no character is ever cut."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headstart.text.detokenizer import ByteDetokenizer, WindowDetokenizer, make_detokenizer

from .small import byte_level, piece_level, vocab_size

BYTE_IDS = st.lists(st.integers(0, 379), max_size=40)
UNICODE = st.text(max_size=60)


def stream(detokenizer, ids):
    return [detokenizer.push((token_id,)) for token_id in ids] + [detokenizer.finish()]


def test_the_byte_path_serves_byte_level_vocabularies_only():
    assert isinstance(make_detokenizer(byte_level()), ByteDetokenizer)
    assert isinstance(make_detokenizer(piece_level()), WindowDetokenizer)
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


@given(st.text(alphabet="the fox.es äö你🙂 é", max_size=40))
def test_pieces_with_byte_fallback_add_up_and_never_end_inside_a_character(text):
    ids = [3 + byte for byte in text.encode()] + [260, 262, 263, 2]
    pieces = stream(make_detokenizer(piece_level()), ids)
    assert "".join(pieces) == piece_level().decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.sampled_from([*range(259, 269), 1, 2]), max_size=60))
def test_pieces_add_up_whatever_their_order(ids):
    assert "".join(stream(make_detokenizer(piece_level()), ids)) == piece_level().decode(ids)


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
