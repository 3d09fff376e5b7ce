"""How much of a prompt earlier requests already held: the most any prefix cache could have reused."""

import numpy as np

BLOCK_SIZE = 16


class ReuseIndex:
    """Every prefix, in whole blocks of 16 tokens, of every context that was sent or answered."""

    def __init__(self) -> None:
        self._chains: set[int] = set()

    def longest(self, tokens: list[int]) -> int:
        """Tokens of the longest known prefix. At least one token is always left to compute."""
        length = 0
        for chain in _chains(tokens[: len(tokens) - 1]):
            if chain not in self._chains:
                break
            length += BLOCK_SIZE
        return length

    def add(self, tokens: list[int]) -> None:
        self._chains.update(_chains(tokens))


def _chains(tokens: list[int]) -> list[int]:
    data = np.asarray(tokens, np.int32).tobytes()
    step = BLOCK_SIZE * 4
    chain, chains = 0, []
    for start in range(0, len(data) - step + 1, step):
        chain = hash((chain, data[start : start + step]))
        chains.append(chain)
    return chains
