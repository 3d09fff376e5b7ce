"""Which rows share which leading pages: a tree of segments, from page tables alone.

Rows whose page tables begin with the same page ids share that prefix. Sorting the tables puts such rows side by side;
the common length of neighbours then gives the whole tree, to any depth (its nodes are the intervals over which the
common length stays above a bound).
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Ranges of tokens and the rows that read them. A row reads the segments on its path, then its private one."""

    order: Int64Array  # [rows] permutation that puts rows with a common prefix next to each other
    lo: Int64Array  # [segments] read by rows order[lo:hi]
    hi: Int64Array  # [segments]
    tok0: Int64Array  # [segments] tokens [tok0, tok1) of any of these rows' page tables
    tok1: Int64Array  # [segments]
    parent: Int64Array  # [segments] the segment that ends at tok0, or -1; parents come first
    last: Int64Array  # [rows] the last segment that row order[i] shares, or -1

    @property
    def private0(self) -> Int64Array:
        """[rows] by row: where its private segment begins."""
        begins = np.zeros(len(self.order), np.int64)
        begins[self.order] = self.end_of(self.last)
        return begins

    def end_of(self, segments: Int64Array) -> Int64Array:
        """Where each of `segments` ends; 0 for -1."""
        return np.concatenate((self.tok1, [0]))[segments]


class PrefixOrder:
    """Page tables in the order of their page ids, and what neighbours have in common; kept up between batches.

    A table must be a fresh array after every change, never edited in place: it is recognised by identity.
    """

    def __init__(self) -> None:
        # In order, four of each:
        self._tables: list[Int32Array] = []  # holding a table keeps its id its own
        self._ids = array("q")
        self._keys: list[bytes] = []  # bytes of the tables
        self._common = array("q")  # leading pages each has in common with the one before it

    def sort(self, tables: Sequence[Int32Array]) -> tuple[Int64Array, Int64Array]:
        """Rows in order, and the leading pages each has in common with the row before it; 0 for the first."""
        ids = np.fromiter(map(id, tables), np.int64, len(tables))
        by_id = ids.argsort()
        ids = ids[by_id]
        new, gone = self._changes(ids)
        if len(new) and np.count_nonzero(ids[1:] == ids[:-1]):  # rows with one table between them
            row_of = dict(zip(ids.tolist(), by_id.tolist(), strict=True))
            return self.sort([table if row_of[id(table)] == row else table.copy() for row, table in enumerate(tables)])
        if 4 * len(new) > len(tables):
            self._start(tables)
        else:
            for row in by_id[new].tolist():
                self._insert(tables[row], gone)
            for table_id in gone:
                self._remove(table_id)
        return by_id[ids.searchsorted(np.array(self._ids))], np.array(self._common)

    def _changes(self, ids: Int64Array) -> tuple[Int64Array, set[int]]:
        """Places in sorted `ids` of what is not held yet, and the ids that are held and not in `ids`."""
        held = np.array(self._ids)
        if not len(ids):
            return ids, set(held.tolist())
        at = np.minimum(ids.searchsorted(held), len(ids) - 1)
        stays = ids[at] == held
        known = np.zeros(len(ids), np.bool_)
        known[at[stays]] = True
        return (~known).nonzero()[0], set(held[~stays].tolist())

    def _start(self, tables: Sequence[Int32Array]) -> None:
        keyed = sorted(zip([table.tobytes() for table in tables], tables, strict=True), key=itemgetter(0))
        self._keys = [key for key, _ in keyed]
        self._tables = [table for _, table in keyed]
        self._ids = array("q", map(id, self._tables))
        self._common = array("q", _common_of_each(self._keys))

    def _insert(self, table: Int32Array, gone: set[int]) -> None:
        """Put a new table in place. If it is one of `gone` with pages added, it takes that one's place."""
        key = table.tobytes()
        at = bisect_left(self._keys, key)
        after = self._common[at] if at < len(self._keys) else 0
        if at and self._ids[at - 1] in gone and key.startswith(self._keys[at - 1]):
            num_pages = len(self._keys[at - 1]) // 4
            if self._common[at - 1] < num_pages > after:  # its neighbours differ before the pages added
                gone.remove(self._ids[at - 1])
                self._tables[at - 1], self._ids[at - 1], self._keys[at - 1] = table, id(table), key
                return
        if at < len(self._keys):
            self._common[at] = _common_pages(key, self._keys[at])
        self._common.insert(at, _common_pages(self._keys[at - 1], key) if at else 0)
        self._tables.insert(at, table)
        self._ids.insert(at, id(table))
        self._keys.insert(at, key)

    def _remove(self, table_id: int) -> None:
        at = self._ids.index(table_id)
        common = self._common.pop(at)
        if at < len(self._common):
            self._common[at] = min(self._common[at], common)
        del self._tables[at], self._ids[at], self._keys[at]


def _common_pages(key: bytes, other: bytes) -> int:
    """Leading page ids (4 bytes each) that two keys have in common."""
    num_pages = min(len(key), len(other)) // 4
    if num_pages == 0:
        return 0
    differs = np.frombuffer(key, np.int32, num_pages) != np.frombuffer(other, np.int32, num_pages)
    first = int(differs.argmax())
    return first if differs[first] else num_pages


def _common_of_each(keys: list[bytes]) -> list[int]:
    """Leading page ids that each key has in common with the one before it; 0 for the first."""
    lens = np.array([len(key) for key in keys]) // 4
    width = int(lens.max(initial=0))
    if width == 0:
        return [0] * len(keys)
    table = np.frombuffer(b"".join([key.ljust(4 * width, b"\xff") for key in keys]), np.int32).reshape(-1, width)
    differs = table[1:] != table[:-1]
    first = differs.argmax(axis=1)
    same = ~differs[np.arange(len(first)), first]
    common = np.zeros(len(keys), np.int64)
    common[1:] = np.minimum(np.where(same, width, first), np.minimum(lens[1:], lens[:-1]))
    counts: list[int] = common.tolist()
    return counts


def find_segments(
    tables: Sequence[Int32Array],
    shareable: Int64Array,
    page_size: int,
    min_share: int,
    unit: int = 1,
    prefixes: PrefixOrder | None = None,
) -> Segments:
    """Segments of rows. A row's pages past its first `shareable[r]` tokens must be its own: it may write them.

    Shared segments end at multiples of `unit` tokens, itself a multiple of the page. One shorter than `min_share` is
    read by each row itself. With the `prefixes` of earlier calls only rows whose page table is new are compared.
    """
    order, common = (prefixes or PrefixOrder()).sort(tables)
    limit = shareable[order]
    ends = common * page_size
    np.minimum(ends[1:], np.minimum(limit[1:], limit[:-1]), out=ends[1:])
    ends -= ends % max(unit, page_size)
    shared = _shared_ranges(ends, max(min_share, 1))
    lo, hi, tok0, tok1, parent = map(np.array, zip(*shared, strict=True)) if shared else [np.zeros(0, np.int64)] * 5
    last = np.empty(len(order), np.int64)
    last.fill(-1)
    for i, (row0, row1, _, _, _) in enumerate(shared):
        last[row0:row1].fill(i)
    return Segments(order, lo, hi, tok0, tok1, parent, last)


def _shared_ranges(ends: Int64Array, min_share: int) -> list[tuple[int, int, int, int, int]]:
    """Tree of shared ranges over sorted rows, of which i - 1 and i have `ends[i]` tokens in common.

    Returns (lo, hi, tok0, tok1, parent) of the ranges kept, parents first.
    """
    kept: list[tuple[int, int, int, int, int]] = []
    path: list[int] = []
    for lo, neg_hi, end in _intervals(ends):
        while path and kept[path[-1]][1] <= lo:
            path.pop()
        parent, tok0 = (path[-1], kept[path[-1]][3]) if path else (-1, 0)
        if end - tok0 >= min_share:
            path.append(len(kept))
            kept.append((lo, -neg_hi, tok0, end, parent))
    return kept


def _intervals(ends: Int64Array) -> list[tuple[int, int, int]]:
    """(lo, -hi, end) of every maximal run of rows [lo, hi) that have `end` > 0 tokens in common, outer runs first."""
    found: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = [(0, 0)]  # (end, lo) of the runs still open, ends ascending
    edges = (ends[1:] != ends[:-1]).nonzero()[0] + 1
    for i, end in chain(zip(edges.tolist(), ends[edges].tolist(), strict=True), [(len(ends), 0)]):
        lo = i - 1
        while stack[-1][0] > end:
            run_end, lo = stack.pop()
            found.append((lo, -i, run_end))
        if stack[-1][0] < end:
            stack.append((end, lo))
    return sorted(found)
