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

An owner set is one number, WRITER + TREE + LEASE * leases + READER * readers, so that a call reads and writes each page
once. Calls know the usual change of state and count it; any other change, mostly because of readers, goes through
`_change_owners`. Readers of leased pages change no state: they are noted by the batch, and counted page by page only if
a lease ends before they do.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array
from headstart.core.errors import InvariantError

INFLIGHT, PRIVATE, PINNED, CACHED, FREE = range(5)

_Index = NDArray[np.intp]
_Owners = NDArray[np.int64]


def _constant(number: int) -> _Owners:
    """A read-only array of no dimension: with a number numpy takes half as long again for each operation."""
    constant = np.array(number, dtype=np.int64)
    constant.setflags(write=False)
    return constant


_NOBODY, _WRITER, _TREE, _LEASE, _READER = map(_constant, (0, 1, 2, 4, 1 << 32))
_LEASES = _constant(int(_READER) - int(_LEASE))  # the bits that count leases
_ALL_BUT_READERS = _constant(int(_READER) - 1)
_LEASE_TREE, _LEASE_WRITER = _constant(int(_LEASE) + int(_TREE)), _constant(int(_LEASE) + int(_WRITER))


def _state_of(is_written: int, in_tree: int, is_leased: int, is_read: int) -> int:
    if is_written or (is_read and not is_leased):
        return INFLIGHT
    if in_tree:
        return PINNED if is_leased else CACHED
    return PRIVATE if is_leased else FREE


_STATES: NDArray[np.int8] = np.array(
    [_state_of(bits & 1, bits & 2, bits & 4, bits & 8) for bits in range(16)], dtype=np.int8
)


def _states(owners: _Owners) -> NDArray[np.int8]:
    bits = (owners & (_WRITER | _TREE)) + 4 * ((owners & _LEASES) > 0) + 8 * (owners >= _READER)
    states: NDArray[np.int8] = _STATES[bits]
    return states


def _index(pages: Int32Array) -> _Index:
    """Numpy converts any other type of index at each use, which takes longer than the use itself."""
    return pages.astype(np.intp)


class PageCounts(NamedTuple):
    """Pages by state; they add up to the pool."""

    inflight: int
    private: int
    pinned: int
    cached: int
    free: int


class PageLedger:
    """Owner sets of pages [0, num_pages) and the free list. Every call takes page ids in one batch, each named once but
    by `add_reader` and `drop_reader`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._owners: _Owners = np.zeros(num_pages, dtype=np.int64)
        self._totals = [0, 0, 0, 0, num_pages]
        self._num_written = 0
        self._uncounted: dict[int, Int32Array] = {}  # by id: leased pages with a reader that READER does not count
        self._free: _Index = np.arange(num_pages - 1, -1, -1, dtype=np.intp)  # a stack: [0, num_free) are free

    @property
    def num_free(self) -> int:
        return self._totals[FREE]

    @property
    def num_cached(self) -> int:
        """Pages that eviction turns into free ones."""
        return self._totals[CACHED]

    @property
    def num_available(self) -> int:
        """Pages that are free or would be after eviction."""
        return self._totals[FREE] + self._totals[CACHED]

    @property
    def num_lingering(self) -> int:
        """Pages that are inflight because of their readers alone."""
        return self._totals[INFLIGHT] - self._num_written

    def counts(self) -> PageCounts:
        return PageCounts(*self._totals)

    # ---- page by page ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> NDArray[np.int8]:
        return _states(self._owners)

    @property
    def in_tree(self) -> NDArray[np.bool_]:
        return (self._owners & _TREE) > 0

    @property
    def leases(self) -> NDArray[np.int64]:
        return (self._owners & _LEASES) // _LEASE

    @property
    def written(self) -> Int32Array:
        """Pages that a peer may write now, ascending."""
        return np.flatnonzero(self._owners & _WRITER).astype(np.int32)

    def num_cached_of(self, pages: Int32Array) -> int:
        return int(np.count_nonzero(self._owners[_index(pages)] == _TREE))

    def num_written_of(self, pages: Int32Array) -> int:
        return int(np.count_nonzero(self._owners[_index(pages)] & _WRITER))

    def num_unread_of(self, pages: Int32Array) -> int:
        return int(np.count_nonzero(self._owners[_index(pages)] < _READER))

    # ---- leases ------------------------------------------------------------------------------------------------------

    def allocate(self, num_pages: int) -> Int32Array:
        """Take `num_pages` free pages for one lease."""
        rest = self._totals[FREE] - num_pages
        if num_pages <= 0 or rest < 0:
            raise InvariantError(f"{num_pages} pages asked of {self.num_free} free ones")
        index = self._free[rest : rest + num_pages][::-1]
        self._owners[index] = _LEASE
        self._count(num_pages, FREE, PRIVATE)
        return index.astype(np.int32)

    def free_private(self, pages: Int32Array) -> None:
        """End the one lease of pages outside the tree; those without another owner become free."""
        if self._uncounted:
            self._count_readers()
        index = _index(pages)
        if self._swap(index, _LEASE, _NOBODY):
            self._stack(index)
            self._count(len(index), PRIVATE, FREE)
            return
        before = self._owners[index]
        self._expect(index, before & (_LEASES | _TREE) == _LEASE, "freed but not leased, or in the tree")
        self._change_owners(index, before, before - _LEASE)

    def lease(self, pages: Int32Array) -> None:
        """One more lease on pages of the tree."""
        index = _index(pages)
        before = self._owners[index]
        num_cached = int(np.count_nonzero(before == _TREE))
        if num_cached < len(index):
            self._expect(index, before & _TREE, "leased but not in the tree")
            self._count(len(index) - num_cached - int(np.count_nonzero(before & _LEASES)), INFLIGHT, PINNED)
        self._owners[index] = before + _LEASE
        self._count(num_cached, CACHED, PINNED)

    def unlease(self, pages: Int32Array) -> _Index:
        """One lease less on pages of the tree. Returns their index."""
        if self._uncounted:
            self._count_readers()
        index = _index(pages)
        before = self._owners[index]
        num_cached = int(np.count_nonzero(before == _LEASE_TREE))
        if num_cached < len(index):
            self._expect(index, before & _ALL_BUT_READERS >= _LEASE_TREE, "released but not pinned")
            num_pinned = int(np.count_nonzero((before - _LEASE) & _LEASES))
            self._count(len(index) - num_cached - num_pinned, PINNED, INFLIGHT)
        self._owners[index] = before - _LEASE
        self._count(num_cached, PINNED, CACHED)
        return index

    # ---- the tree ----------------------------------------------------------------------------------------------------

    def enter_tree(self, pages: Int32Array) -> None:
        """The tree owns these pages besides the lease that filled them."""
        index = _index(pages)
        if not self._swap(index, _LEASE, _LEASE_TREE):
            before = self._owners[index]
            is_private = before & _ALL_BUT_READERS == _LEASE
            self._expect(index, is_private, "committed but not private, or a peer may still write them")
            self._owners[index] = before + _TREE
        self._count(len(index), PRIVATE, PINNED)

    def leave_tree(self, pages: Int32Array) -> None:
        index = _index(pages)
        if self._swap(index, _TREE, _NOBODY):
            self._stack(index)
            self._count(len(index), CACHED, FREE)
            return
        before = self._owners[index]
        self._expect(index, before & _ALL_BUT_READERS == _TREE, "evicted but pinned or not in the tree")
        self._change_owners(index, before, before - _TREE)

    # ---- peers and steps ---------------------------------------------------------------------------------------------

    def open_write(self, pages: Int32Array) -> None:
        """A peer may write these pages: private ones that nothing else touches."""
        if self._uncounted:
            self._count_readers()
        index = _index(pages)
        if not self._swap(index, _LEASE, _LEASE_WRITER):
            self._expect(index, self._owners[index] == _LEASE, "opened for a writer but not private and untouched")
        self._num_written += len(index)
        self._count(len(index), PRIVATE, INFLIGHT)

    def close_write(self, pages: Int32Array) -> None:
        if not len(pages):
            return
        index = _index(pages)
        if self._swap(index, _LEASE_WRITER, _LEASE):
            self._count(len(index), INFLIGHT, PRIVATE)
        else:
            before = self._owners[index]
            self._expect(index, before & _WRITER, "closed for a writer but not open")
            self._change_owners(index, before, before - _WRITER)
        self._num_written -= len(index)

    def add_reader(self, pages: Int32Array) -> None:
        """One reader more per occurrence in `pages`."""
        index = _index(pages)
        are_leased = int(np.count_nonzero(self._owners[index] & _LEASES)) == len(index)
        if are_leased and id(pages) not in self._uncounted:
            self._uncounted[id(pages)] = pages
            return
        self._expect(index, self._owners[index], "read but free")
        self._read(index, _READER)

    def drop_reader(self, pages: Int32Array) -> None:
        if self._uncounted.pop(id(pages), None) is not None:
            return
        self._count_readers()
        index = _index(pages)
        self._read(index, -_READER)
        self._expect(index, self._owners[index] >= 0, "has more readers dropped than added")

    def _count_readers(self) -> None:
        for pages in self._uncounted.values():
            np.add.at(self._owners, _index(pages), _READER)
        self._uncounted.clear()

    def _read(self, index: _Index, change: _Owners) -> None:
        """Change the readers, once per occurrence. Those of leased pages change no state."""
        if np.count_nonzero(self._owners[index] & _LEASES) == len(index):
            np.add.at(self._owners, index, change)
        else:
            index, num_times = np.unique(index, return_counts=True)
            before = self._owners[index]
            self._change_owners(index, before, before + change * num_times)

    # ---- totals and the free list ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless totals and the free list follow from the owner sets."""
        owners = self._owners
        if np.bincount(self.state, minlength=5).tolist() != self._totals or sum(self._totals) != self.num_pages:
            raise InvariantError(f"totals {self._totals} do not follow from the states of {self.num_pages} pages")
        if self._num_written != len(self.written):
            raise InvariantError(f"{self._num_written} pages are counted as written, not {len(self.written)}")
        free = np.zeros(self.num_pages, dtype=bool)
        free[self._free[: self.num_free]] = True
        if not np.array_equal(free, owners == 0):
            raise InvariantError("the free list repeats a page, misses one or holds one that is owned")
        if owners.min(initial=0) < 0:
            raise InvariantError("a page has a negative number of owners")
        if any((self.leases[pages] == 0).any() for pages in self._uncounted.values()):
            raise InvariantError("a page without a lease has readers that are not counted")
        if ((owners & _WRITER > 0) & self.in_tree).any():
            raise InvariantError("a page in the tree may be written")
        if (self.leases[~self.in_tree] > 1).any():
            raise InvariantError("a page outside the tree has two leases")

    def _swap(self, index: _Index, former: _Owners, now: _Owners) -> bool:
        """Change the owner sets of these pages if all are the `former` one, which is the usual case; else nothing."""
        if np.count_nonzero(self._owners[index] == former) < len(index):
            return False
        self._owners[index] = now
        return True

    def _change_owners(self, index: _Index, before: _Owners, after: _Owners) -> None:
        """Change the owner sets of pages in any states to any others."""
        self._owners[index] = after
        self._stack(index[(after == 0) & (before != 0)])
        former, now = (np.bincount(_states(owners), minlength=5).tolist() for owners in (before, after))
        self._totals = [total - less + more for total, less, more in zip(self._totals, former, now, strict=True)]

    def _stack(self, freed: _Index) -> None:
        """Onto the free list with these, before they are counted as free. Sorts `freed`."""
        freed.sort()
        num_free = self._totals[FREE]
        self._free[num_free : num_free + len(freed)] = freed

    def _count(self, num_pages: int, former: int, now: int) -> None:
        self._totals[former] -= num_pages
        self._totals[now] += num_pages

    @staticmethod
    def _expect(index: _Index, claim: NDArray[np.bool_] | _Owners, otherwise: str) -> None:
        if np.count_nonzero(claim) < len(index):
            raise InvariantError(f"pages {index[claim == 0].tolist()} {otherwise}")
