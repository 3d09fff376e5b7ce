"""Which rows share which leading pages: a tree of segments, from page tables alone.

Rows whose page tables begin with the same page ids share that prefix. Sorting the tables puts such rows side by side;
the common length of neighbours then gives the whole tree, to any depth (its nodes are the intervals over which the
common length stays above a bound).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Ranges of tokens and the rows that read them. A row reads the segments on its path, then its private one."""

    order: Int32Array  # [rows] permutation that puts rows with a common prefix next to each other
    lo: Int32Array  # [segments] read by rows order[lo:hi]
    hi: Int32Array  # [segments]
    tok0: Int32Array  # [segments] tokens [tok0, tok1) of any of these rows' page tables
    tok1: Int32Array  # [segments]
    parent: Int32Array  # [segments] the segment that ends at tok0, or -1; parents come first
    row_parent: Int32Array  # [rows] by row: the last shared segment on its path, or -1
    private0: Int32Array  # [rows] by row: where its private segment begins


class PrefixOrder:
    """Page tables in the order of their page ids, and what neighbours have in common; kept up between batches.

    A table must be a fresh array after every change, never edited in place: it is recognised by identity.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []  # of the tables, in order
        self._keys: list[bytes] = []  # their bytes
        self._common: list[int] = []  # leading pages each has in common with the one before it
        self._held: dict[int, Int32Array] = {}  # holding a table keeps its id its own

    def sort(self, tables: Sequence[Int32Array]) -> tuple[list[int], list[int]]:
        """Rows in order, and the leading pages each has in common with the row before it; 0 for the first."""
        row_of = dict(zip(map(id, tables), range(len(tables)), strict=True))
        if len(row_of) < len(tables):  # rows with one table between them
            return self.sort([table if row_of[id(table)] == row else table.copy() for row, table in enumerate(tables)])
        gone = self._held.keys() - row_of.keys()
        new = [tables[row_of[i]] for i in row_of.keys() - self._held.keys()]
        if 4 * len(new) > len(tables):
            self._start(tables)
        else:
            for table in new:
                self._insert(table, gone)
            for table_id in gone:
                self._remove(table_id)
        return [row_of[i] for i in self._ids], self._common

    def _start(self, tables: Sequence[Int32Array]) -> None:
        keyed = sorted(((table.tobytes(), id(table)) for table in tables), key=itemgetter(0))
        self._keys = [key for key, _ in keyed]
        self._ids = [i for _, i in keyed]
        self._common = _common_pages(self._keys)
        self._held = {id(table): table for table in tables}

    def _insert(self, table: Int32Array, gone: set[int]) -> None:
        """Put a new table in place. If it is one of `gone` with pages added, it takes that one's place."""
        key = table.tobytes()
        at = bisect_left(self._keys, key)
        after = self._common[at] if at < len(self._keys) else 0
        self._held[id(table)] = table
        if at and self._ids[at - 1] in gone and key.startswith(self._keys[at - 1]):
            num_pages = len(self._keys[at - 1]) // 4
            if self._common[at - 1] < num_pages > after:  # its neighbours differ before the pages added
                gone.remove(self._ids[at - 1])
                del self._held[self._ids[at - 1]]
                self._ids[at - 1], self._keys[at - 1] = id(table), key
                return
        self._ids.insert(at, id(table))
        self._keys.insert(at, key)
        first = max(at - 1, 0)
        self._common[at : at + 1] = _common_pages(self._keys[first : at + 2])[at - first :]

    def _remove(self, table_id: int) -> None:
        at = self._ids.index(table_id)
        common = self._common.pop(at)
        if at < len(self._common):
            self._common[at] = min(self._common[at], common)
        del self._ids[at], self._keys[at], self._held[table_id]


def _common_pages(keys: list[bytes]) -> list[int]:
    """Leading page ids (4 bytes each) that each key has in common with the one before it; 0 for the first."""
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
    order_array = np.array(order, np.int32)
    limit = shareable[order_array]
    ends = np.array(common, np.int64) * page_size
    ends[1:] = np.minimum(np.minimum(ends[1:], limit[1:]), limit[:-1])
    unit = max(unit, page_size)
    shared, last = _shared_ranges((ends // unit * unit).tolist(), max(min_share, 1))
    lo, hi, tok0, tok1, parent = np.array(shared, np.int32).reshape(-1, 5).T
    row_parent = np.empty(len(order), np.int32)
    row_parent[order_array] = last
    ends_of = np.zeros(len(shared) + 1, np.int32)  # the last entry is for rows that share nothing
    ends_of[:-1] = tok1
    private0 = ends_of[row_parent]
    return Segments(order_array, lo, hi, tok0, tok1, parent, row_parent, private0)


def _shared_ranges(ends: list[int], min_share: int) -> tuple[list[tuple[int, int, int, int, int]], list[int]]:
    """Tree of shared ranges over sorted rows, of which i - 1 and i have `ends[i]` tokens in common.

    Returns (lo, hi, tok0, tok1, parent) of the ranges kept, parents first, and the last range of each sorted row.
    """
    kept: list[tuple[int, int, int, int, int]] = []
    last = [-1] * len(ends)
    path: list[int] = []
    for lo, neg_hi, end in _intervals(ends):
        while path and kept[path[-1]][1] <= lo:
            path.pop()
        parent, tok0 = (path[-1], kept[path[-1]][3]) if path else (-1, 0)
        if end - tok0 < min_share:
            continue
        path.append(len(kept))
        last[lo:-neg_hi] = [len(kept)] * (-neg_hi - lo)
        kept.append((lo, -neg_hi, tok0, end, parent))
    return kept, last


def _intervals(ends: list[int]) -> list[tuple[int, int, int]]:
    """(lo, -hi, end) of every maximal run of rows [lo, hi) that have `end` > 0 tokens in common, outer runs first."""
    found: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = [(0, 0)]  # (end, lo) of the runs still open, ends ascending
    for i, end in enumerate([*ends[1:], 0], start=1):
        lo = i - 1
        while stack[-1][0] > end:
            run_end, lo = stack.pop()
            found.append((lo, -i, run_end))
        if stack[-1][0] < end:
            stack.append((end, lo))
    return sorted(found)
