"""Why a prompt hit less than it could: whether the cache ever held the first page that it lacked."""

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array

_NUM_SLOTS = 1 << 16
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class CommittedPages:
    """A bounded, approximate memory of pages that were committed: by namespace, place and tokens.

    It explains misses in statistics and decides nothing: a page at the same place with the same tokens behind another
    prefix is taken for the same, and old entries are overwritten.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        weights = np.random.default_rng(page_size).integers(1 << 63, size=page_size, dtype=np.uint64)
        self._weights = weights | np.uint64(1)
        self._slots = np.zeros(_NUM_SLOTS, dtype=np.uint64)

    def note(self, namespace: bytes, tokens: Int32Array, first: int, last: int) -> None:
        """Pages [first, last) of `tokens` are in the cache now."""
        keys = self._keys(namespace, tokens, first, last)
        self._slots[keys % _NUM_SLOTS] = keys

    def holds(self, namespace: bytes, tokens: Int32Array, page: int) -> bool:
        """Whether that page was noted, as far as remembered."""
        keys = self._keys(namespace, tokens, page, page + 1)
        return bool((self._slots[keys % _NUM_SLOTS] == keys).all())

    def _keys(self, namespace: bytes, tokens: Int32Array, first: int, last: int) -> NDArray[np.uint64]:
        size = self._page_size
        pages = tokens[first * size : last * size].astype(np.uint64).reshape(-1, size)
        keys: NDArray[np.uint64] = pages @ self._weights + np.arange(first, last, dtype=np.uint64) * _MULTIPLIER
        keys ^= np.uint64(int.from_bytes(namespace[:8].ljust(8, b"\0"), "little"))
        keys ^= keys >> np.uint64(31)
        return keys
