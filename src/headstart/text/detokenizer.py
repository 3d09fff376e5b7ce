"""Ids to text as they come. What has been handed out never changes, and never ends inside a character.

    (new) ─► push* ─► finish

The pieces add up to exactly what decoding all ids at once gives. Byte-level vocabularies are assembled byte by byte;
for others a short window of ids is decoded again with each push, because their decoders look at neighbours.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol

from headstart.text.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; possibly empty."""
        ...

    def finish(self) -> str:
        """What is left; incomplete characters become U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        data = b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._skipped)
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other vocabulary: decode from a few ids back, hand out what is new once it is whole."""

    CONTEXT = 4  # ids before the window that decoders may look at

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # of the window
        self._given = ""  # window text already handed out

    def push(self, ids: Iterable[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in ids)

    def finish(self) -> str:
        text = self._decode(self._start)
        return text[len(self._given) :]

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._start)
        if text.endswith(REPLACEMENT) or not text.startswith(self._given):
            return ""
        piece = text[len(self._given) :]
        self._given = text
        self._shrink(text)
        return piece

    def _shrink(self, text: str) -> None:
        """Move the window forward where decoding from there gives the same end."""
        start = len(self._ids) - self.CONTEXT
        if start - self._start < self.CONTEXT:
            return
        tail = self._decode(start)
        if tail and REPLACEMENT not in tail and text.endswith(tail):
            self._start, self._given = start, tail

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], self._skip_special_tokens)


def make_detokenizer(tokenizer: TextTokenizer, skip_special_tokens: bool = True) -> Detokenizer:
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, skip_special_tokens)
