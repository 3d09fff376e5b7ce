"""The bytes behind a vocabulary's tokens, for vocabularies whose text is the plain concatenation of its tokens' bytes.

Two families are of that kind. Byte-level vocabularies write each byte as one printable character. Piece vocabularies
(SentencePiece) write a space as U+2581 and a byte that no piece covers as `<0x..>`. In every other vocabulary a token's
text depends on its neighbours (WordPiece, end-of-word suffixes), and `token_rule` returns None.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How a token's written form becomes bytes."""

    to_bytes: Callable[[str], bytes]
    decode_errors: str
    """Error handler for bytes that are no UTF-8, which yields as many U+FFFD as the library's decoder does: "replace"
    is one for each broken character, "surrogateescape" one for each byte once surrogates are replaced."""
    drops_first_space: bool
    """Whether a text's first token loses spaces that it has elsewhere."""


def token_rule(decoder: Mapping[str, Any] | None) -> TokenRule | None:
    """The rule that `decoder`, a tokenizer.json's entry, follows. None if tokens have no text of their own."""
    steps = _flatten(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_rule()
    return _piece_rule(steps, kinds)


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", ()) for step in _flatten(inner)]


def _byte_level_rule() -> TokenRule:
    table = _byte_of_char()

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([table[char] for char in token])
        except KeyError:  # an added token, which is written as it is
            return token.encode()

    return TokenRule(to_bytes, "replace", drops_first_space=False)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def _piece_rule(steps: Sequence[Mapping[str, Any]], kinds: Sequence[Any]) -> TokenRule | None:
    """Replacements within a token, then bytes, then a join, then the removal of leading spaces; each may be missing."""
    order = "".join({"Replace": "r", "Metaspace": "r", "ByteFallback": "b", "Fuse": "f"}.get(k, "s") for k in kinds)
    if not re.fullmatch(r"r+b?(fs?)?|bf?", order) or not all(map(_is_plain, steps)):
        return None
    replacements = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
    has_bytes = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if has_bytes and BYTE_PIECE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.encode()

    drops = "Strip" in kinds or "Metaspace" in kinds
    return TokenRule(to_bytes, "surrogateescape" if has_bytes else "replace", drops)


def _is_plain(step: Mapping[str, Any]) -> bool:
    """Whether a step does the same to a token wherever it stands, the start of the text apart."""
    match step["type"]:
        case "Replace":
            return isinstance(step["pattern"].get("String"), str)
        case "Strip":
            return bool(step["stop"] == 0)
        case kind:
            return kind in ("Metaspace", "ByteFallback", "Fuse")


def _replacement(step: Mapping[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    return step["pattern"]["String"], step["content"]
