"""Which pages of the tree go first: exact least-recently-used order, a page at a time, in one batched pass.

Every release stamps the pages of its lease's path with the next tick, so stamps of unpinned pages never grow with depth
and the oldest of them all is the last page of some leaf. A leaf goes from its tail: as many pages as are older than any
other leaf's, and no more than were asked for. A conversation's output lies deeper than its prompt and goes before it.

Leaves wait in a heap by the stamp of their last page. An entry is current while its node is still an unpinned leaf with
that stamp; others are dropped when they surface, or when they outnumber the rest.
"""

import heapq

import numpy as np

from headstart.core.arrays import EMPTY, Int32Array
from headstart.kv.ledger import PageLedger
from headstart.kv.tree import Node, RadixTree

_MIN_COMPACTION = 64


class LruOrder:
    """Stamps of all pages, and the leaves that may be evicted."""

    def __init__(self, num_pages: int) -> None:
        self.stamps = np.zeros(num_pages, dtype=np.int64)
        self._tick = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._num_offered = 0
        self._compact_at = _MIN_COMPACTION

    def touch(self, pages: Int32Array) -> None:
        """These pages, a path from a root, are the most recently released now."""
        self._tick += 1
        self.stamps[pages] = self._tick

    def offer(self, node: Node) -> None:
        """Let `node` be evicted if it is an unpinned leaf."""
        if node.parent is None or node.pins or node.children:
            return
        self._num_offered += 1
        heapq.heappush(self._heap, (self._stamp(node), self._num_offered, node))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def pop_oldest(self) -> Node | None:
        """The unpinned leaf whose last page is the oldest, taken out of the order until offered again."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                return entry[2]
        return None

    def num_before_next(self, leaf: Node) -> int:
        """Pages at the tail of `leaf`, at least one, that are no younger than the next leaf's last page."""
        if not self._heap:
            return len(leaf.pages)
        from_tail = self.stamps[leaf.pages][::-1]
        return max(1, int(np.searchsorted(from_tail, self._heap[0][0], side="right")))

    def offered(self) -> set[Node]:
        """Every leaf that `pop_oldest` would come to."""
        return {entry[2] for entry in self._heap if self._is_current(entry)}

    def _stamp(self, node: Node) -> int:
        return int(self.stamps[node.pages[-1]])

    def _is_current(self, entry: tuple[int, int, Node]) -> bool:
        stamp, _, node = entry
        return node.parent is not None and not node.pins and not node.children and self._stamp(node) == stamp

    def _compact(self) -> None:
        newest = {entry[2]: entry for entry in self._heap if self._is_current(entry)}
        self._heap = list(newest.values())
        heapq.heapify(self._heap)
        self._compact_at = _MIN_COMPACTION + 2 * len(self._heap)


def evict(tree: RadixTree, ledger: PageLedger, order: LruOrder, num_pages: int) -> None:
    """Take pages out of the tree, oldest first, until `num_pages` more are free or nothing unpinned is left.

    A page that a reader still holds leaves the tree too, but becomes free only when the reader lets go.
    """
    dropped: list[Int32Array] = [EMPTY]
    missing = num_pages
    while missing > 0 and (leaf := order.pop_oldest()) is not None:
        count = min(order.num_before_next(leaf), missing)
        if count < len(leaf.pages):
            pages = tree.trim(leaf, count)
            order.offer(leaf)
        else:
            pages = leaf.pages
            tree.remove(leaf)
        dropped.append(pages)
        missing -= int(np.count_nonzero(ledger.readers[pages] == 0))
    ledger.leave_tree(np.concatenate(dropped))
