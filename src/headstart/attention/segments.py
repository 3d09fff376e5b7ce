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


def find_segments(
    tables: Sequence[Int32Array], shareable: Int64Array, page_size: int, min_share: int, unit: int = 1
) -> Segments:
    """Segments of rows. Row r offers the whole pages of its first `shareable[r]` tokens for sharing.

    Shared segments end at multiples of `unit` tokens. One shorter than `min_share` is read by each row itself.
    """
    num_pages = (shareable // page_size).tolist()
    keys = [table[:n].tobytes() for table, n in zip(tables, num_pages, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    common = _common_pages([keys[row] for row in order])
    ends = (common * page_size // unit * unit).tolist()
    shared, last = _shared_ranges(ends, max(min_share, 1))
    columns = np.array(shared, np.int32).reshape(-1, 5).T
    order_array = np.array(order, np.int32)
    row_parent = np.empty(len(order), np.int32)
    row_parent[order_array] = last
    private0 = np.append(columns[3], np.int32(0))[row_parent]
    return Segments(order_array, *columns, row_parent=row_parent, private0=private0)


def _common_pages(keys: list[bytes]) -> Int64Array:
    """[rows] page ids (4 bytes each) that key i has in common with key i - 1; 0 for the first."""
    common = np.zeros(len(keys), np.int64)
    lens = np.array([len(key) // 4 for key in keys], np.int64)
    width = int(lens.max(initial=0))
    if width == 0:
        return common
    table = np.frombuffer(b"".join([key.ljust(4 * width, b"\xff") for key in keys]), np.int32).reshape(-1, width)
    differs = table[1:] != table[:-1]
    first = differs.argmax(axis=1)
    first[~differs[np.arange(len(first)), first]] = width
    common[1:] = np.minimum(first, np.minimum(lens[1:], lens[:-1]))
    return common


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
