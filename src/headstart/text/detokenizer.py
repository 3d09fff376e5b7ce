"""Ids to text as they come. What has been handed out never changes, and never ends inside a character.

    (new) ─► push* ─► finish

The pieces add up to what decoding the prompt and all ids at once adds to the prompt's own text. Bytes that are no UTF-8
become U+FFFD as soon as that is certain, and the text goes on behind them. Each id costs the same, however many came
before it: what is held back is at most the beginning of one character, or MAX_HELD ids.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from headstart.text.tokenizer import DECODE_CONTEXT, TextTokenizer

REPLACEMENT = "\ufffd"
ESCAPED = re.compile("[\udc80-\udcff]")
MAX_HELD = 4
"""Ids without text that are held back: a character has at most four bytes."""


class Detokenizer(Protocol):
    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` complete; possibly empty."""
        ...

    def finish(self) -> str:
        """What is left; incomplete characters become U+FFFD."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are runs of bytes."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        if tokenizer.rule is None:
            raise ValueError("a token's text depends on its neighbours in this vocabulary")
        self._tokenizer = tokenizer
        self._bytes_of = tokenizer.output_bytes(skip_special_tokens).__getitem__
        self._errors = tokenizer.rule.decode_errors
        self._escapes = self._errors == "surrogateescape"
        self._pending = b""  # the beginning of a character
        self._drops_space = tokenizer.rule.drops_first_space and not any(map(self._bytes_of, prompt))

    def push(self, ids: Iterable[int]) -> str:
        data = self._start(ids) if self._drops_space else self._pending + b"".join(map(self._bytes_of, ids))
        text, num_used = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[num_used:]
        return ESCAPED.sub(REPLACEMENT, text) if self._escapes and not text.isascii() else text

    def finish(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return ESCAPED.sub(REPLACEMENT, text)

    def _start(self, ids: Iterable[int]) -> bytes:
        """Bytes of the first ids of a text, whose first token may lose spaces."""
        parts = []
        for token_id in ids:
            data = self._bytes_of(token_id)
            if data and self._drops_space:
                self._drops_space = False
                if b" " in data:
                    data = self._tokenizer.decode((token_id,), skip_special_tokens=False).encode()
            parts.append(data)
        return b"".join(parts)


class WindowDetokenizer:
    """For every other vocabulary: decode a few ids with and without the new ones, and hand out the difference."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        shown = (token_id for token_id in reversed(prompt) if token_id not in self._skipped)
        self._given = list(islice(shown, DECODE_CONTEXT))[::-1]
        self._held: list[int] = []  # ids after `_given` whose text has not been handed out

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in ids if token_id not in self._skipped])

    def finish(self) -> str:
        return self._take(self._new_text())

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if len(self._held) <= MAX_HELD and (not text or text.endswith(REPLACEMENT)):
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        self._given = [*self._given, *self._held][-DECODE_CONTEXT:]
        self._held = []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._given)
        return self._decode(self._given + self._held)[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def make_detokenizer(
    tokenizer: TextTokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
) -> Detokenizer:
    """A detokenizer for what follows `prompt`."""
    kind = WindowDetokenizer if tokenizer.rule is None else ByteDetokenizer
    return kind(tokenizer, skip_special_tokens, prompt)
