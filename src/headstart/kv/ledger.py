"""PageLedger: who owns each page of the pool.

A page has an owner set: leases, the tree, readers (launched steps and open transfer handles), and at most one writer
(a peer with a ticket). Its state is the first of these that holds:

    inflight   a ticket covers it, or no lease holds it and a launched step or transfer may still touch it
    private    one lease
    pinned     in the tree, k >= 1 leases
    cached     in the tree, no lease
    free       no owner

Invariant: a page is free exactly when its owner set is empty, so it becomes free in the call that takes its last owner
away, whichever that is, and time never frees it. The states add up to the pool. A written page is never in the tree.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array
from headstart.core.errors import InvariantError

INFLIGHT, PRIVATE, PINNED, CACHED, FREE = range(5)

_ONE = np.int32(1)  # of the readers' own type: ufunc.at is 40 times slower where it must cast

_WRITER, _LEASED, _IN_TREE, _READ = 1, 2, 4, 8


def _state_of(owners: int) -> int:
    if owners & _WRITER or (owners & _READ and not owners & _LEASED):
        return INFLIGHT
    if owners & _IN_TREE:
        return PINNED if owners & _LEASED else CACHED
    return PRIVATE if owners & _LEASED else FREE


_STATES: NDArray[np.int8] = np.array([_state_of(owners) for owners in range(16)], dtype=np.int8)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; they add up to the pool."""

    inflight: int
    private: int
    pinned: int
    cached: int
    free: int


class PageLedger:
    """Owner sets of pages [0, num_pages) and the free list. Every call takes page ids in one batch."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.leases = np.zeros(num_pages, dtype=np.int32)
        self.readers = np.zeros(num_pages, dtype=np.int32)
        self.in_tree = np.zeros(num_pages, dtype=bool)
        self.writer = np.zeros(num_pages, dtype=bool)
        self.state = np.full(num_pages, FREE, dtype=np.int8)
        self._totals = [0, 0, 0, 0, num_pages]
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack: [0, num_free) are free

    @property
    def num_free(self) -> int:
        return self._totals[FREE]

    @property
    def num_cached(self) -> int:
        """Pages that eviction turns into free ones."""
        return self._totals[CACHED]

    def counts(self) -> PageCounts:
        return PageCounts(*self._totals)

    def allocate(self, num_pages: int) -> Int32Array:
        """Take `num_pages` free pages for one lease."""
        rest = self.num_free - num_pages
        if num_pages < 0 or rest < 0:
            raise InvariantError(f"{num_pages} pages asked of {self.num_free} free ones")
        pages = self._free[rest : rest + num_pages][::-1].copy()
        self.leases[pages] = 1
        self._become(pages, PRIVATE)
        return pages

    def lease(self, pages: Int32Array) -> None:
        """One more lease on pages of the tree."""
        if not len(pages):
            return
        self._expect(pages, self.in_tree[pages], "leased but not in the tree")
        self.leases[pages] += 1
        self._become(pages, PINNED)

    def unlease(self, pages: Int32Array) -> None:
        """One lease less; pages without another owner become free."""
        if not len(pages):
            return
        left = self.leases[pages] - _ONE
        self._expect(pages, left >= 0, "released but not leased")
        self.leases[pages] = left
        is_last = left == 0
        num_last = np.count_nonzero(is_last)
        if num_last:
            self._settle_unleased(pages if num_last == len(pages) else pages[is_last])

    def enter_tree(self, pages: Int32Array) -> None:
        """The tree owns these pages besides the lease that filled them."""
        self._expect(pages, self.state[pages] == PRIVATE, "committed but not private")
        self.in_tree[pages] = True
        self._become(pages, PINNED)

    def leave_tree(self, pages: Int32Array) -> None:
        self._expect(pages, self.in_tree[pages] & (self.leases[pages] == 0), "evicted but pinned or not in the tree")
        self.in_tree[pages] = False
        self._settle_unleased(pages)

    def open_write(self, pages: Int32Array) -> None:
        """A peer may write these pages: private ones that nothing else touches."""
        clear = (self.state[pages] == PRIVATE) & (self.readers[pages] == 0)
        self._expect(pages, clear, "opened for a writer but not private and untouched")
        self.writer[pages] = True
        self._become(pages, INFLIGHT)

    def close_write(self, pages: Int32Array) -> None:
        self._expect(pages, self.writer[pages], "closed for a writer but not open")
        self.writer[pages] = False
        is_leased = self.leases[pages] > 0
        if np.count_nonzero(is_leased) == len(pages):
            self._become(pages, PRIVATE)
            return
        self._become(pages[is_leased], PRIVATE)
        self._settle_unleased(pages[~is_leased])

    def hold(self, pages: Int32Array) -> None:
        """One reader more per occurrence in `pages`."""
        unleased = self._unleased(pages)
        self._expect(unleased, self.state[unleased] != FREE, "held but free")
        np.add.at(self.readers, pages, _ONE)
        if len(unleased):
            self._settle_unleased(np.unique(unleased))

    def unhold(self, pages: Int32Array) -> None:
        np.subtract.at(self.readers, pages, _ONE)
        self._expect(pages, self.readers[pages] >= 0, "let go but not held")
        unleased = self._unleased(pages)
        if len(unleased):
            self._settle_unleased(np.unique(unleased))

    def check(self) -> None:
        """Raise InvariantError unless states, totals and the free list follow from the owner sets."""
        if not np.array_equal(self.state, self._classify(np.arange(self.num_pages, dtype=np.int32))):
            raise InvariantError("a page's state does not follow from its owners")
        if np.bincount(self.state, minlength=5).tolist() != self._totals or sum(self._totals) != self.num_pages:
            raise InvariantError(f"totals {self._totals} do not follow from the states of {self.num_pages} pages")
        free = np.zeros(self.num_pages, dtype=bool)
        free[self._free[: self.num_free]] = True
        if not np.array_equal(free, self.state == FREE):
            raise InvariantError("the free list repeats a page, misses one or holds one that is owned")
        if self.leases.min(initial=0) < 0 or self.readers.min(initial=0) < 0:
            raise InvariantError("a page has a negative number of owners")
        if (self.writer & self.in_tree).any():
            raise InvariantError("a page in the tree may be written")
        if (self.leases[~self.in_tree] > 1).any():
            raise InvariantError("a page outside the tree has two leases")

    def _unleased(self, pages: Int32Array) -> Int32Array:
        """Those of `pages` whose state depends on their readers."""
        unleased: Int32Array = pages[self.leases[pages] == 0]
        return unleased

    def _classify(self, pages: Int32Array) -> NDArray[np.int8]:
        owners = self.writer[pages] * np.int8(_WRITER)
        owners += (self.leases[pages] > 0) * np.int8(_LEASED)
        owners += self.in_tree[pages] * np.int8(_IN_TREE)
        owners += (self.readers[pages] > 0) * np.int8(_READ)
        states: NDArray[np.int8] = _STATES[owners]
        return states

    def _settle_unleased(self, pages: Int32Array) -> None:
        """Bring the state of `pages`, each named once and without a lease, in line with their owners."""
        if not len(pages):
            return
        is_touched = self.writer[pages] | (self.readers[pages] > 0)
        if np.count_nonzero(is_touched):
            self._become(pages[is_touched], INFLIGHT)
            pages = pages[~is_touched]
        in_tree = self.in_tree[pages]
        num_in_tree = np.count_nonzero(in_tree)
        if 0 < num_in_tree < len(pages):
            self._become(pages[in_tree], CACHED)
            self._become(pages[~in_tree], FREE)
        else:
            self._become(pages, CACHED if num_in_tree else FREE)

    def _become(self, pages: Int32Array, state: int) -> None:
        """Give `pages`, each named once, this state. Those that become free join the free list."""
        if not len(pages):
            return
        before = self.state[pages]
        if state == FREE:
            freed = pages[before != FREE]
            self._free[self.num_free : self.num_free + len(freed)] = np.sort(freed)
        for former, count in enumerate(np.bincount(before).tolist()):
            self._totals[former] -= count
        self._totals[state] += len(pages)
        self.state[pages] = state

    @staticmethod
    def _expect(pages: Int32Array, claim: NDArray[np.bool_], otherwise: str) -> None:
        if np.count_nonzero(claim) < len(pages):
            raise InvariantError(f"pages {pages[~claim].tolist()} {otherwise}")
