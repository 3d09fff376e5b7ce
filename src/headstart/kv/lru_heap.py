"""Leaves of the tree that may be evicted, the least recently used first.

Leaves wait in a heap by the stamp of their last page. An entry is current while its node is still an unpinned leaf with
that stamp; others are dropped when they surface, or when they outnumber the rest.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from headstart.kv.tree import Node

_MIN_COMPACTION = 64


class LruHeap:
    """`stamps` [num_pages] int64: when each page was last released. Read here, written by whoever gave it."""

    def __init__(self, stamps: NDArray[np.int64]) -> None:
        self._stamps = stamps
        self._heap: list[tuple[int, int, Node]] = []
        self._num_pushed = 0
        self._compact_at = _MIN_COMPACTION

    def push(self, node: Node) -> None:
        """Let `node` be evicted if it is an unpinned leaf."""
        if node.parent is None or node.pins or node.children:
            return
        self._num_pushed += 1
        heapq.heappush(self._heap, (self._stamp(node), self._num_pushed, node))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def pop_oldest(self) -> Node | None:
        """The unpinned leaf whose last page is the oldest, taken out of the order until pushed again."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                return entry[2]
        return None

    def num_before_next(self, leaf: Node) -> int:
        """Pages at the tail of `leaf`, at least one, that are no younger than the next leaf's last page."""
        if not self._heap:
            return len(leaf.pages)
        from_tail = self._stamps[leaf.pages][::-1]
        return max(1, int(np.searchsorted(from_tail, self._heap[0][0], side="right")))

    def nodes(self) -> set[Node]:
        """Every leaf that `pop_oldest` would come to."""
        return {entry[2] for entry in self._heap if self._is_current(entry)}

    def _stamp(self, node: Node) -> int:
        return int(self._stamps[node.pages[-1]])

    def _is_current(self, entry: tuple[int, int, Node]) -> bool:
        stamp, _, node = entry
        return node.parent is not None and not node.pins and not node.children and self._stamp(node) == stamp

    def _compact(self) -> None:
        newest = {entry[2]: entry for entry in self._heap if self._is_current(entry)}
        self._heap = list(newest.values())
        heapq.heapify(self._heap)
        self._compact_at = _MIN_COMPACTION + 2 * len(self._heap)
