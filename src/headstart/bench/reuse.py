"""How much of a prompt earlier requests already held: the most any prefix cache could have reused."""

from collections.abc import Sequence

import numpy as np

BLOCK_SIZE = 16

Chain = tuple[int, ...]
"""Of a context's prefixes of 1, 2, ... whole blocks of 16 tokens, a hash each."""


class ReuseIndex:
    """Every prefix, in whole blocks, of every context that was sent or answered."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def longest(self, chain: Chain, num_tokens: int) -> int:
        """Tokens of the longest known prefix of a prompt. At least one of its `num_tokens` is always left to compute."""
        length = 0
        for prefix in chain[: (num_tokens - 1) // BLOCK_SIZE]:
            if prefix not in self._known:
                break
            length += BLOCK_SIZE
        return length

    def add(self, chain: Chain) -> None:
        self._known.update(chain)


def chain_of(tokens: Sequence[int], before: Chain = ()) -> Chain:
    """The chain of a context. `before` is that of its beginning, where it is known."""
    start = len(before) * BLOCK_SIZE
    data = np.asarray(tokens[start:], np.int32).tobytes()
    step = BLOCK_SIZE * 4
    prefix, chain = before[-1] if before else 0, list(before)
    for begin in range(0, len(data) - step + 1, step):
        prefix = hash((prefix, data[begin : begin + step]))
        chain.append(prefix)
    return tuple(chain)
