"""Sequence: the tokens of one choice, and how many of them have KV. Owns no pages."""

import numpy as np

from headstart.core.arrays import Int32Array

_SPARE = 256


class Sequence:
    """The client's prompt, of one token at least, then every output accepted so far.

    Invariant: `num_computed < len(sequence)`. The last token never has KV when nothing is launched: it is the input of
    the next decode row.
    """

    __slots__ = ("_buffer", "_len", "_view", "last_token", "num_computed", "num_outputs", "prompt_len")

    def __init__(self, prompt: Int32Array, outputs: Int32Array) -> None:
        self.prompt_len = len(prompt)
        self.num_outputs = len(outputs)
        self.num_computed = 0
        self._len = len(prompt) + len(outputs)
        self._buffer = np.empty(self._len + _SPARE, dtype=np.int32)
        self._buffer[: len(prompt)] = prompt
        self._buffer[len(prompt) : self._len] = outputs
        self._view = _read_only(self._buffer)
        self.last_token = int(self._buffer[self._len - 1])

    def __len__(self) -> int:
        return self._len

    @property
    def num_missing(self) -> int:
        """Tokens without KV, the last one included."""
        return self._len - self.num_computed

    @property
    def tokens(self) -> Int32Array:
        """All tokens, shape [len]. Read-only; later appends do not change it."""
        return self._view[: self._len]

    def span(self, start: int, stop: int) -> Int32Array:
        """Tokens at positions [start, stop)."""
        return self._view[start:stop]

    def outputs(self, first: int, stop: int) -> tuple[int, ...]:
        """Outputs [first, stop)."""
        return tuple(self._view[self.prompt_len + first : self.prompt_len + stop].tolist())

    def append(self, token_id: int) -> None:
        if self._len == len(self._buffer):
            self._grow(1)
        self._buffer[self._len] = token_id
        self._len += 1
        self.num_outputs += 1
        self.last_token = token_id

    def extend(self, token_ids: Int32Array) -> None:
        """Append several, at least one."""
        num_new = len(token_ids)
        stop = self._len + num_new
        if stop > len(self._buffer):
            self._grow(num_new)
        self._buffer[self._len : stop] = token_ids
        self._len = stop
        self.num_outputs += num_new
        self.last_token = int(token_ids[-1])

    def _grow(self, num_new: int) -> None:
        grown = np.empty(2 * self._len + num_new, dtype=np.int32)
        grown[: self._len] = self._buffer[: self._len]
        self._buffer = grown
        self._view = _read_only(grown)


def _read_only(buffer: Int32Array) -> Int32Array:
    view = buffer.view()
    view.setflags(write=False)
    return view
