"""Which pages of the tree go first: those of owners beyond their quota, then exact least-recently-used order, a page at a
time, in batched passes.

Every release stamps the pages of its lease's path with the next tick, so stamps of unpinned pages never grow with depth
and the oldest of them all is the last page of some leaf. A leaf goes from its tail: as many pages as are older than any
other leaf's, and no more than were asked for. A conversation's output lies deeper than its prompt and goes before it.
"""

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import EMPTY, Int32Array
from headstart.kv.ledger import PageLedger
from headstart.kv.lru_heap import LruHeap
from headstart.kv.tenant_quota import TenantQuota
from headstart.kv.tree import Node, RadixTree


class LruOrder:
    """Stamps of all pages, and the leaves that may be evicted: all of them, and each owner's."""

    def __init__(self, num_pages: int, owner_pages: int | None) -> None:
        self.stamps = np.zeros(num_pages, dtype=np.int64)
        self.heap = LruHeap(self.stamps)
        self.quota = TenantQuota(owner_pages, self.stamps)
        self._tick = 0

    def touch(self, pages: NDArray[np.intp]) -> None:
        """These pages, a path from a root, are the most recently released now."""
        self._tick += 1
        self.stamps[pages] = self._tick

    def push(self, node: Node) -> None:
        """Let `node` be evicted if it is an unpinned leaf."""
        self.heap.push(node)
        self.quota.push(node)


def evict(tree: RadixTree, ledger: PageLedger, order: LruOrder, num_pages: int) -> int:
    """Take pages out of the tree until `num_pages` more are free or nothing unpinned is left. Returns pages now free.

    A page that a reader still holds leaves the tree too, but becomes free only when its last reader is dropped.
    """
    wanted = ledger.num_free + num_pages
    for leaves, excess in order.quota.above():
        _evict_from(leaves, tree, ledger, order, (wanted - ledger.num_free, excess))
    _evict_from(order.heap, tree, ledger, order, (wanted - ledger.num_free, ledger.num_pages))
    return ledger.num_free


def _evict_from(leaves: LruHeap, tree: RadixTree, ledger: PageLedger, order: LruOrder, enough: tuple[int, int]) -> None:
    """Take the oldest pages of `leaves`. `enough`: pages to be freed, and the most to be taken for that."""
    dropped: list[Int32Array] = [EMPTY]
    missing, most = enough
    while missing > 0 and most > 0 and (leaf := leaves.pop_oldest()) is not None:
        count = min(leaves.num_before_next(leaf), missing, most)
        order.quota.add(leaf.namespace, -count)
        if count < len(leaf.pages):
            pages = tree.trim(leaf, count)
            order.push(leaf)
        else:
            pages = leaf.pages
            tree.remove(leaf)
        dropped.append(pages)
        missing -= ledger.num_unread_of(pages)
        most -= count
    ledger.leave_tree(np.concatenate(dropped))
