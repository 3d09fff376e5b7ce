"""Digests of pages, for pools in host memory."""

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headstart.core.arrays import Int32Array
from headstart.transfer.contract import TransferError


class HostDigests:
    """Satisfies `transfer.contract.PageDigests`. `pool` [num_pages, page_bytes] is the memory itself, not a copy.

    XXH3 with 64 bits: as fast as memory is read. It has no key, since it answers faults and not forgers.
    """

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = pool

    def digest(self, pages: Int32Array) -> list[int]:
        return [xxh3_64_intdigest(self._pool[page].data) for page in pages.tolist()]


class NoDigests:
    """Satisfies `transfer.contract.PageDigests` for a pool that the host cannot read."""

    def digest(self, pages: Int32Array) -> list[int]:
        """Always raises TransferError, so that a caller who wants digests is told and computes for itself."""
        raise TransferError("pages in a GPU's memory have no digests; give the decode worker --verify-transfers off")
