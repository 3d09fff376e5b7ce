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
        slots, seed = self._slots, xxh32_intdigest(namespace)
        raw = tokens[first * self._page_size : last * self._page_size].tobytes()
        page_bytes = self._page_size * tokens.itemsize
        for page, at in enumerate(range(0, len(raw), page_bytes), first):
            key = _key(seed, page, raw[at : at + page_bytes])
            slots[key % _NUM_SLOTS] = key

    def holds(self, namespace: bytes, tokens: Int32Array, page: int) -> bool:
        """Whether that page was noted, as far as remembered."""
        raw = tokens[page * self._page_size : (page + 1) * self._page_size].tobytes()
        key = _key(xxh32_intdigest(namespace), page, raw)
        return len(raw) > 0 and self._slots[key % _NUM_SLOTS] == key


def _key(seed: int, page: int, raw: bytes) -> int:
    return xxh32_intdigest(raw, seed + page)  # it takes seeds modulo 2**32
