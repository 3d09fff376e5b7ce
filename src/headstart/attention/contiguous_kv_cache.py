"""Contiguous copies of KV that several steps read, so that pages are gathered once instead of at every step.

A copy is found by its page ids and by the tokens whose KV the pages hold. KV is a function of the model and the tokens
up to it, so a page that was freed and written anew cannot be mistaken for what it held before: other tokens, another
key. Writers outside this process need no notice of it.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from headstart.core.arrays import Int32Array


@dataclass(eq=False, slots=True)
class ContiguousKV:
    """One range of pages of one prefix; layers are filled as they are first read."""

    tokens: Int32Array  # [end of the range] from the sequence's first token on
    num_bytes: int
    layers: dict[int, torch.Tensor] = field(default_factory=dict)  # [2, kv_heads, tokens, head_dim]
    last_step: int = 0


class ContiguousKVCache:
    """Least recently used copies within `budget_bytes`; what the present step reads is never dropped."""

    def __init__(self, token_bytes: int, budget_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._budget_bytes = budget_bytes
        self._copies: dict[bytes, ContiguousKV] = {}  # by page ids, least recently used first
        self._used_bytes = 0
        self._step = 0

    def begin_step(self) -> None:
        self._step += 1

    def find(self, pages: Int32Array, num_tokens: int, tokens: Int32Array) -> ContiguousKV | None:
        """The copy, perhaps still empty, of `pages`, which hold the last `num_tokens` of `tokens`; None: no room."""
        key = pages.tobytes()
        copy = self._copies.pop(key, None)
        if copy is not None and not np.array_equal(copy.tokens, tokens):
            self._used_bytes -= copy.num_bytes
            copy = None
        if copy is None:
            num_bytes = num_tokens * self._token_bytes
            if not self._make_room(num_bytes):
                return None
            copy = ContiguousKV(tokens.copy(), num_bytes)
            self._used_bytes += num_bytes
        copy.last_step = self._step
        self._copies[key] = copy
        return copy

    def _make_room(self, num_bytes: int) -> bool:
        while self._used_bytes + num_bytes > self._budget_bytes:
            oldest = next(iter(self._copies), None)
            if oldest is None or self._copies[oldest].last_step == self._step:
                return False
            self._used_bytes -= self._copies.pop(oldest).num_bytes
        return True
