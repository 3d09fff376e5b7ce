"""Whose pages are whose, and who has more than its quota of the pool.

An owner (a tenant: `core.identity.cache_owner`) is within its quota while its pages, those of its requests and those
that the tree keeps of it, are no more than `max_pages`. Beyond it, its cached pages go before anybody else's, however
recently they were used, until it is within its quota again.

A quota is no limit: an owner may fill a pool that nobody else needs, and running requests are never evicted.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from headstart.core.errors import InvariantError
from headstart.core.identity import cache_owner
from headstart.kv.lru_heap import LruHeap
from headstart.kv.tree import Node


class TenantQuota:
    """Pages of each owner: leased by it alone, or in the tree under a namespace of its. `max_pages` None: no quotas, and
    nothing is counted."""

    def __init__(self, max_pages: int | None, stamps: NDArray[np.int64]) -> None:
        self._max_pages = max_pages
        self._stamps = stamps
        self._counts: Counter[bytes] = Counter()
        self._leaves: dict[bytes, LruHeap] = {}
        self._above: set[bytes] = set()

    def add(self, namespace: bytes, num_pages: int) -> None:
        """`num_pages` more of this namespace's owner; fewer where negative."""
        if self._max_pages is None:
            return
        owner = cache_owner(namespace)
        self._counts[owner] += num_pages
        if not self._counts[owner]:
            del self._counts[owner]
            self._leaves.pop(owner, None)
        if self._counts[owner] > self._max_pages:
            self._above.add(owner)
        else:
            self._above.discard(owner)

    def push(self, node: Node) -> None:
        """Let `node` be evicted for its owner's sake if it is an unpinned leaf."""
        if self._max_pages is not None:
            owner = cache_owner(node.namespace)
            if owner not in self._leaves:
                self._leaves[owner] = LruHeap(self._stamps)
            self._leaves[owner].push(node)

    def above(self) -> list[tuple[LruHeap, int]]:
        """The leaves of each owner beyond its quota, and how many pages beyond; the farthest first."""
        if self._max_pages is None:
            return []
        found = [(self._counts[owner] - self._max_pages, owner) for owner in self._above if owner in self._leaves]
        return [(self._leaves[owner], excess) for excess, owner in sorted(found, reverse=True)]

    def check(self, counts: Counter[bytes], leaves: Iterable[Node]) -> None:
        """Raise InvariantError unless these are every owner's pages and every unpinned leaf."""
        if self._max_pages is None:
            return
        if +counts != self._counts:
            raise InvariantError("the pages of an owner are not those of its leases and of the tree")
        if self._above != {owner for owner, num_pages in counts.items() if num_pages > self._max_pages}:
            raise InvariantError("not exactly the owners beyond their quota are known as such")
        if set(leaves) != {node for heap in self._leaves.values() for node in heap.nodes()}:
            raise InvariantError("an owner's leaf would not be evicted for its sake")
