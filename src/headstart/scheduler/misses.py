"""Why a prompt hit less than it could: whether the cache ever held the first page that it lacked."""

from array import array

from xxhash import xxh32_intdigest

from headstart.core.arrays import Int32Array

_NUM_SLOTS = 1 << 16


class CommittedPages:
    """A bounded, approximate memory of pages that were committed: by namespace, place and tokens.

    It explains misses in statistics and decides nothing: a page at the same place with the same tokens behind another
    prefix is taken for the same, and old entries are overwritten. Checksums are the same in every process, so that a
    replay says the same.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._slots = array("I", bytes(4 * _NUM_SLOTS))

    def note(self, namespace: bytes, tokens: Int32Array, first: int, last: int) -> None:
        """Pages [first, last) of `tokens` are in the cache now."""
        slots = self._slots
        for key in self._keys(namespace, tokens, first, last):
            slots[key % _NUM_SLOTS] = key

    def holds(self, namespace: bytes, tokens: Int32Array, page: int) -> bool:
        """Whether that page was noted, as far as remembered."""
        keys = self._keys(namespace, tokens, page, page + 1)
        return bool(keys) and self._slots[keys[0] % _NUM_SLOTS] == keys[0]

    def _keys(self, namespace: bytes, tokens: Int32Array, first: int, last: int) -> list[int]:
        raw = tokens[first * self._page_size : last * self._page_size].tobytes()
        step = self._page_size * tokens.itemsize
        seed = xxh32_intdigest(namespace) + first  # taken modulo 2**32
        return [xxh32_intdigest(raw[at : at + step], seed + at // step) for at in range(0, len(raw), step)]
