"""Which rows share which leading pages: a tree of segments, from page tables alone.

Rows whose page tables begin with the same page ids share that prefix. Sorting the tables puts such rows side by side;
the common length of neighbours then gives the whole tree, to any depth (its nodes are the intervals over which the
common length stays above a bound).
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        self._keys: dict[int, tuple[Int32Array, bytes]] = {}  # the table is held, so its id stays its own
        self._before: dict[int, tuple[int, int]] = {}  # table after -> (table before, pages in common)

    def sort(self, tables: Sequence[Int32Array]) -> tuple[list[int], list[int]]:
        """Rows in the order of their page ids, and the leading pages each has in common with the row before it."""
        known = self._keys
        self._keys = {id(table): known.get(id(table)) or (table, table.tobytes()) for table in tables}
        keys = [self._keys[id(table)][1] for table in tables]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        ids = [id(tables[row]) for row in order]
        before = self._before
        stale = [i for i in range(1, len(ids)) if before.get(ids[i], (0, 0))[0] != ids[i - 1]]
        fresh = _common_pages([(keys[order[i - 1]], keys[order[i]]) for i in stale])
        common = [0] + [before.get(after, (0, 0))[1] for after in ids[1:]]
        for i, pages in zip(stale, fresh, strict=True):
            common[i] = pages
        self._before = dict(zip(ids[1:], zip(ids, common[1:], strict=False), strict=True))
        return order, common


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

    Shared segments end at multiples of `unit` tokens. One shorter than `min_share` is read by each row itself. With
    the `prefixes` of earlier calls only rows whose page table is new are compared.
    """
    order, common = (prefixes or PrefixOrder()).sort(tables)
    order_array = np.array(order, np.int32)
    limit = shareable[order_array]
    ends = np.array(common, np.int64) * page_size
    ends[1:] = np.minimum(ends[1:], np.minimum(limit[1:], limit[:-1])) // page_size * page_size // unit * unit
    shared, last = _shared_ranges(ends.tolist(), max(min_share, 1))
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
