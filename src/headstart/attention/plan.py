"""The attention plan: which query tokens read which KV, each shared page once.

Every row's keys are cut into segments: those it shares with other rows, to any depth of the tree, then its private
one. Segments are cut into items: a range of key tokens that is read once for a tile of query tokens. Each (query
token, item) pair leaves one partial result in a slot; a merge combines the slots of a token.

    rows (sorted)     0 [ A A A A | B B | x     ]        A: one read for rows 0, 1, 2
                      1 [ A A A A | B B | y y   ]        B: one read for rows 0, 1
                      2 [ A A A A | z z z       ]        x, y, z: private, one row each

All rows of a segment have the same segments before it, so an item has one `ordinal` for all its query tokens: token
t's slot is `slot_ptr[t] + ordinal`, and its slots lie next to each other in key order. No list of slots is needed.

The last item of a row with one query token is open: it ends at the row's KV length, which the kernel reads on the
device. A plan therefore holds for later steps until a row comes, goes, or outgrows its last item (see `Planner`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headstart.attention.segments import Int64Array, PrefixOrder, Segments, find_segments
from headstart.core.arrays import Int32Array
from headstart.core.layout import pages_for

# Columns of Plan.items.
SRC_ROW = 0  # row whose page table is read
TOK0 = 1  # first key token
N_TOK = 2  # key tokens; an open item may have more by now
Q_OFF = 3  # query tokens q_list[Q_OFF : Q_OFF + N_Q]
N_Q = 4
ORDINAL = 5  # the slot of query token t is slot_ptr[t] + ORDINAL
FLAGS = 6
ITEM_WIDTH = 8
_END = 7  # the end of what an item is cut from

OPEN = 1  # ends at the KV length of SRC_ROW
CAUSAL = 2  # a key is seen by query tokens at its position and later


@dataclass(frozen=True, slots=True)
class Tiling:
    """How segments become items. Lengths are in tokens."""

    page_size: int
    q_tile: int  # query tokens an item holds: rows of the kernel's tile / query heads per KV head
    min_chunk: int = 256  # multiple of page_size
    max_chunk: int = 4096
    wave_items: int = 32  # items that run at once: programs of the kernel / KV heads
    short_wave_items: int = 0  # the same if that many items of `short_chunk` hold all: fewer programs do better then
    short_chunk: int = 1024
    item_cost: int = 50  # what starting and ending an item takes, as key tokens read in that time
    max_items: int = 1 << 16
    max_slots: int = 8192  # the chunk doubles until the partial results fit
    min_share: int = 256  # a shared segment shorter than this is read by each row itself
    deterministic: bool = False  # cut at multiples of `exact_chunk`; share whole chunks only
    exact_chunk: int = 1024  # multiple of page_size


@dataclass(frozen=True, slots=True)
class Plan:
    """Work of one attention step. Query tokens are numbered row by row, in position order."""

    items: Int32Array  # [items, ITEM_WIDTH], longest first
    q_list: Int32Array  # [query tokens] a permutation: the tokens of each segment's rows are neighbours
    slot_ptr: Int32Array  # [query tokens + 1]
    row_of: Int32Array  # [query tokens]
    pos_of: Int32Array  # [query tokens] position in the sequence when the plan was made
    tail_limit: Int32Array  # [rows] KV length up to which a row's open item serves
    segments: Segments
    chunk: int

    @property
    def num_slots(self) -> int:
        return int(self.slot_ptr[-1])


class _Ranges(NamedTuple):
    """What items are cut from: the shared segments, then each row's private one, rows in `segments.order`."""

    segments: Segments
    parent: Int64Array  # [ranges] the segment that ends where this begins, or -1
    tok0: Int64Array  # [ranges]
    length: Int64Array  # [ranges] tokens
    q_lo: Int64Array  # [ranges] query tokens q_list[q_lo : q_lo + num_q]
    num_q: Int64Array  # [ranges]
    tiles: Int64Array  # [ranges] tiles of query tokens
    num_shared: int
    one_each: bool  # every row has one query token


class _Cut(NamedTuple):
    """How each range is cut."""

    size: Int64Array  # [ranges] tokens of a chunk
    num_chunks: Int64Array  # [ranges]
    ordinal: Int64Array  # [ranges] ordinal of the first


def build_plan(
    tables: Sequence[Int32Array],
    starts: Int64Array,
    q_lens: Int64Array,
    tiling: Tiling,
    prefixes: PrefixOrder | None = None,
) -> Plan:
    """Plan for rows of `q_lens[r]` >= 1 query tokens at positions `starts[r]` on, whose own KV is in the pool already.

    Decode rows have one query token: starts = kv_len - 1. With `prefixes` of earlier calls only rows with a new page
    table are compared. Raises ValueError if items or slots exceed the tiling's bounds even at one chunk a segment.
    """
    prefixes = prefixes or PrefixOrder()
    chunk = tiling.exact_chunk
    unit = chunk if tiling.deterministic else 1
    segments = find_segments(tables, starts, tiling.page_size, tiling.min_share, unit, prefixes)
    ranges = _ranges(segments, starts, q_lens, tiling)
    if not tiling.deterministic:
        chunk = _choose_chunk(ranges, tiling)
    while (plan := _try_plan(ranges, starts, q_lens, tiling, chunk)) is None:
        if chunk >= int((starts + q_lens).max()):
            raise ValueError(f"bounds of {tiling.max_items} items and {tiling.max_slots} slots are too small")
        chunk *= 2
        if tiling.deterministic:
            segments = find_segments(tables, starts, tiling.page_size, tiling.min_share, chunk, prefixes)
            ranges = _ranges(segments, starts, q_lens, tiling)
    return plan


def _ranges(segments: Segments, starts: Int64Array, q_lens: Int64Array, tiling: Tiling) -> _Ranges:
    order = segments.order
    parent = np.concatenate((segments.parent, segments.last))
    tok0 = segments.end_of(parent)
    q_ptr = np.arange(len(order) + 1)
    one_each = not np.count_nonzero(q_lens > 1)
    if not one_each:
        q_lens[order].cumsum(out=q_ptr[1:])
    q_lo = np.concatenate((q_ptr[segments.lo], q_ptr[:-1]))
    num_q = np.concatenate((q_ptr[segments.hi], q_ptr[1:])) - q_lo
    return _Ranges(
        segments,
        parent,
        tok0,
        length=np.concatenate((segments.tok1, (starts + q_lens)[order])) - tok0,
        q_lo=q_lo,
        num_q=num_q,
        tiles=(num_q + (tiling.q_tile - 1)) // tiling.q_tile,
        num_shared=len(segments.lo),
        one_each=one_each,
    )


def _choose_chunk(ranges: _Ranges, tiling: Tiling) -> int:
    """The chunk that should end soonest: few waves of items, the last one full, and little overhead an item.

    Candidates are powers of two, and what would make exactly one or two waves.
    """
    page = tiling.page_size
    total = int(ranges.length.dot(ranges.tiles))
    short = tiling.short_wave_items and total <= tiling.short_wave_items * tiling.short_chunk
    wave = tiling.short_wave_items if short else tiling.wave_items
    sizes = [1 << i for i in range(tiling.min_chunk.bit_length() - 1, tiling.max_chunk.bit_length())]
    sizes += [-(-total // (wave * waves * page)) * page for waves in (1, 2)]
    chunks = list(dict.fromkeys(min(max(size, tiling.min_chunk), tiling.max_chunk) for size in sizes))
    num_items = np.ceil(ranges.length / np.array(chunks, np.float64)[:, None]) @ ranges.tiles

    def cost(choice: tuple[int, float]) -> float:
        items = max(choice[1], 1)
        waves, mean = items / wave, total / items
        return max(waves, 1.0) * (mean + tiling.item_cost) + (math.ceil(waves) - waves) * mean

    return min(zip(chunks, num_items.tolist(), strict=True), key=cost)[0]


def _try_plan(ranges: _Ranges, starts: Int64Array, q_lens: Int64Array, tiling: Tiling, chunk: int) -> Plan | None:
    """Plan with items of at most `chunk` tokens, or None where it exceeds the bounds."""
    cut = _cut(ranges, tiling, chunk)
    if int(cut.num_chunks.dot(ranges.tiles)) > tiling.max_items:
        return None
    order = ranges.segments.order
    private = slice(ranges.num_shared, None)
    if ranges.one_each:
        q_list, row_of, pos_of = order, np.arange(len(order)), starts
        slots = cut.ordinal[private] + cut.num_chunks[private]
    else:
        q_list, row_of, pos_of, slots = _query_tokens(ranges, starts, q_lens, cut, tiling.q_tile)
    slot_ptr = np.zeros(len(q_list) + 1, np.int32)
    slot_ptr[1:][q_list] = slots
    np.add.accumulate(slot_ptr, out=slot_ptr)
    if slot_ptr[-1] > tiling.max_slots:
        return None
    tail_limit = np.empty(len(order), np.int32)
    tail_limit[order] = ranges.tok0[private] + (cut.num_chunks[private] - 1) * cut.size[private] + chunk
    return Plan(
        items=_items(ranges, cut, tiling.q_tile),
        q_list=q_list.astype(np.int32),
        slot_ptr=slot_ptr,
        row_of=row_of.astype(np.int32),
        pos_of=pos_of.astype(np.int32),
        tail_limit=tail_limit,
        segments=ranges.segments,
        chunk=chunk,
    )


def _query_tokens(
    ranges: _Ranges, starts: Int64Array, q_lens: Int64Array, cut: _Cut, q_tile: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """`q_list`, `row_of`, `pos_of`, and by place in q_list the slots of a token.

    A token has a slot for each chunk on its path and for those of its own that its tile reads.
    """
    order = ranges.segments.order
    num_q = q_lens[order]
    place = np.arange(len(order)).repeat(num_q)  # of each token's row in the order
    private = ranges.num_shared + place
    index = np.arange(len(place)) - ranges.q_lo[private]
    first = q_lens.cumsum() - q_lens
    q_list = first[order[place]] + index
    tile_end = np.minimum((index // q_tile + 1) * q_tile, num_q[place])
    seen = ranges.length[private] - num_q[place] + tile_end
    slots = cut.ordinal[private] - seen // -cut.size[private]
    row_of = np.arange(len(order)).repeat(q_lens)
    pos_of = np.arange(len(place)) + (starts - first)[row_of]
    return q_list, row_of, pos_of, slots


def _cut(ranges: _Ranges, tiling: Tiling, chunk: int) -> _Cut:
    count = (ranges.length + (chunk - 1)) // chunk
    if tiling.deterministic:
        size = np.full(len(count), chunk)
    else:  # equal parts of whole pages
        pages = count * tiling.page_size
        size = (ranges.length + (pages - 1)) // pages * tiling.page_size
        count = (ranges.length + (size - 1)) // size
    path_len = [0] * (ranges.num_shared + 1)  # chunks up to each segment's end; the last entry stands for "no parent"
    parents = ranges.segments.parent.tolist()
    for i, (parent, chunks) in enumerate(zip(parents, count[: len(parents)].tolist(), strict=True)):
        path_len[i] = path_len[parent] + chunks
    return _Cut(size, count, ordinal=np.array(path_len)[ranges.parent])


def _items(ranges: _Ranges, cut: _Cut, q_tile: int) -> Int32Array:
    """[items, ITEM_WIDTH] of ranges with the longest chunks first.

    Tiles of the same keys are neighbours, so all but the first find them in the cache.
    """
    segments, num_shared = ranges.segments, ranges.num_shared
    by_range = np.zeros((len(cut.num_chunks), ITEM_WIDTH), np.int32)
    by_range[:num_shared, SRC_ROW] = segments.order[segments.lo]
    by_range[num_shared:, SRC_ROW] = segments.order
    by_range[:, TOK0] = ranges.tok0
    by_range[:, N_TOK] = cut.size
    by_range[:, Q_OFF] = ranges.q_lo
    by_range[:, N_Q] = ranges.num_q
    by_range[:, ORDINAL] = cut.ordinal
    if not ranges.one_each:
        by_range[num_shared:, FLAGS] = (ranges.num_q[num_shared:] > 1) * CAUSAL
    by_range[:, _END] = ranges.tok0 + ranges.length
    longest_first = (-cut.size).argsort(kind="stable")
    total = (cut.num_chunks * ranges.tiles)[longest_first]
    ends = total.cumsum()
    items = by_range.take(longest_first.repeat(total), axis=0)
    chunk_index = np.arange(len(items), dtype=np.int32) - (ends - total).astype(np.int32).repeat(total)
    if tiled := np.count_nonzero(ranges.tiles > 1):
        chunk_index, tile_index = np.divmod(chunk_index, ranges.tiles[longest_first].astype(np.int32).repeat(total))
        _narrow_to_tiles(items, tile_index, q_tile)
    items[:, TOK0] += chunk_index * items[:, N_TOK]
    items[:, ORDINAL] += chunk_index
    np.minimum(items[:, N_TOK], items[:, _END] - items[:, TOK0], out=items[:, N_TOK])
    opens = (ranges.num_q == 1)[longest_first]
    items[ends[opens] - 1, FLAGS] = OPEN
    return items[items[:, N_TOK] > 0] if tiled else items


def _narrow_to_tiles(items: Int32Array, tile_index: Int32Array, q_tile: int) -> None:
    """Leave each item the query tokens of one tile. A causal tile reads no further than its last one."""
    first = tile_index * q_tile
    num_q = np.minimum(items[:, N_Q] - first, q_tile)
    unseen = items[:, N_Q] - (first + num_q)
    items[:, _END] -= np.where(items[:, FLAGS] == CAUSAL, unseen, 0)
    items[:, Q_OFF] += first
    items[:, N_Q] = num_q


class Planner:
    """Plans decode steps and keeps the last plan for as long as it holds."""

    def __init__(self, tiling: Tiling) -> None:
        self._tiling = tiling
        self._prefixes = PrefixOrder()
        self._tables: tuple[Int32Array, ...] = ()
        self._kv_lens = np.zeros(0, np.int64)
        self._plan: Plan | None = None

    def plan(self, tables: Sequence[Int32Array], kv_lens: Int64Array) -> Plan:
        """Plan for one query token a row, at position `kv_lens[r]` - 1. The same object while it still holds.

        Page tables must be fresh arrays after every change, never edited in place.
        """
        if self._plan is None or not self._holds(self._plan, tables, kv_lens):
            ones = np.empty(len(tables), np.int64)
            ones.fill(1)
            self._plan = build_plan(tables, kv_lens - 1, ones, self._tiling, self._prefixes)
            self._kv_lens = kv_lens.copy()
            self._tables = tuple(tables)
        return self._plan

    def _holds(self, plan: Plan, tables: Sequence[Int32Array], kv_lens: Int64Array) -> bool:
        if len(tables) != len(self._tables):
            return False
        if np.count_nonzero(kv_lens > plan.tail_limit) or np.count_nonzero(kv_lens < self._kv_lens):
            return False
        for row, (table, planned) in enumerate(zip(tables, self._tables, strict=True)):
            if table is not planned:
                num_pages = pages_for(int(self._kv_lens[row]), self._tiling.page_size)
                if not np.array_equal(table[:num_pages], planned[:num_pages]):
                    return False
        self._tables = tuple(tables)  # as good as those planned for, and found equal by identity next time
        return True
