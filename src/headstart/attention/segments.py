"""Which rows share which leading pages: a tree of segments, from page tables alone.

Rows whose page tables begin with the same page ids share that prefix. Sorting the tables puts such rows side by side;
the common length of neighbours then gives the whole tree, to any depth (its nodes are the intervals over which the
common length stays above a bound).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    """Sorts page tables and finds what neighbours have in common; remembers both between batches.

    A table must be a fresh array after every change, never edited in place: it is recognised by identity.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tuple[bytes, Int32Array]] = {}  # by id, in order; holding a table keeps its id its own
        self._before: dict[int, tuple[int, int]] = {}  # id -> (id of the table before it, pages in common)

    def sort(self, tables: Sequence[Int32Array]) -> tuple[list[int], list[int]]:
        """Rows in the order of their page ids, and the leading pages each has in common with the row before it."""
        row_of = {id(table): row for row, table in enumerate(tables)}
        if len(row_of) < len(tables):  # rows with one table between them
            tables = [table if row_of[id(table)] == row else table.copy() for row, table in enumerate(tables)]
            return self.sort(tables)
        keys = {i: key for i, key in self._keys.items() if i in row_of}
        if len(keys) < len(tables):
            keys |= {id(table): (table.tobytes(), table) for table in tables if id(table) not in keys}
        ids = sorted(keys, key=lambda i: keys[i][0])  # quick: all but the new ones are in order
        before = self._before
        self._before = {after: before.get(after, (0, 0)) for after in ids}
        stale = [pair for pair in pairwise(ids) if self._before[pair[1]][0] != pair[0]]
        fresh = _common_pages([(keys[a][0], keys[b][0]) for a, b in stale])
        self._before |= {b: (a, pages) for (a, b), pages in zip(stale, fresh, strict=True)}
        self._keys = keys if not stale else {i: keys[i] for i in ids}
        common = [self._before[i][1] for i in ids]
        common[:1] = [0] * len(common[:1])
        return [row_of[i] for i in ids], common


def _common_pages(pairs: list[tuple[bytes, bytes]]) -> list[int]:
    """Leading page ids (4 bytes each) that are equal in each pair of page tables."""
    width = max((min(len(a), len(b)) for a, b in pairs), default=0)
    if width == 0:
        return [0] * len(pairs)
    first, second = (
        np.frombuffer(b"".join([side[:width].ljust(width, fill) for side in sides]), np.int32).reshape(len(pairs), -1)
        for sides, fill in zip(zip(*pairs, strict=True), (b"\xff", b"\xfe"), strict=True)
    )
    differs = first != second
    common = differs.argmax(axis=1)
    common[~differs[np.arange(len(pairs)), common]] = width // 4
    return common.tolist()


def find_segments(
    tables: Sequence[Int32Array],
    shareable: Int64Array,
    page_size: int,
    min_share: int,
    unit: int = 1,
    prefixes: PrefixOrder | None = None,
) -> Segments:
    """Segments of rows. A row's pages past its first `shareable[r]` tokens must be its own: it may write them.

    Shared segments end at multiples of `unit` tokens, itself a multiple of the page. One shorter than `min_share` is read by each row itself. With
    the `prefixes` of earlier calls only rows whose page table is new are compared.
    """
    order, common = (prefixes or PrefixOrder()).sort(tables)
    order_array = np.array(order, np.int32)
    limit = shareable[order_array]
    ends = np.array(common, np.int64) * page_size
    ends[1:] = np.minimum(np.minimum(ends[1:], limit[1:]), limit[:-1])
    unit = max(unit, page_size)
    shared, last = _shared_ranges((ends // unit * unit).tolist(), max(min_share, 1))
    columns = np.array(shared, np.int32).reshape(-1, 5).T
    row_parent = np.empty(len(order), np.int32)
    row_parent[order_array] = last
    private0 = np.append(columns[3], np.int32(0))[row_parent]
    return Segments(order_array, *columns, row_parent=row_parent, private0=private0)


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
