"""The decode plan on the card: which tile it is made for, when it is made anew, and its upload."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import Plan, Planner
from headstart.attention.segments import Segments
from headstart.attention.triton_attention import Partials, TileShape, decode_tile, decode_tiling, fitting_rows
from headstart.core.arrays import Int32Array
from headstart.executor.cuda.attention import CardAttention

MAX_ITEMS = 1 << 14
MAX_SLOTS = 8192


class DecodePlans:
    """One planner for each tile, one plan on the device. Rows that share long prefixes fill larger tiles."""

    def __init__(self, card: CardAttention, max_rows: int) -> None:
        self.device_plan = DevicePlan(max_rows, MAX_ITEMS, card.device)
        self.partials = Partials.empty(card.heads, MAX_SLOTS + max_rows, card.device)
        self._card = card
        self._planners: dict[int, Planner] = {}
        self._rows = self.tile_rows(1)[0]
        self._uploaded: Plan | None = None

    def tile_rows(self, num_rows: int) -> list[int]:
        """Rows of the tiles that a step of `num_rows` may be planned for, ascending."""
        heads, fp8 = self._card.heads, self._card.is_fp8
        sizes = (fitting_rows(heads, fp8, size) for size in range(1, num_rows + 1))
        return sorted({decode_tile(heads, fp8, rows).rows for rows in sizes})

    def tile(self, rows: int) -> TileShape:
        return decode_tile(self._card.heads, self._card.is_fp8, rows)

    def update(self, tables: Sequence[Int32Array], kv_lens: NDArray[np.int64]) -> int:
        """Have a plan that holds for the rows on the device. -> rows of the tile that it is made for."""
        if not len(tables):
            self._clear()
            return self._rows
        plan = self._planner(self._rows).plan(tables, kv_lens)
        if plan is not self._uploaded:
            group = mean_sharing(plan.segments, kv_lens)
            fitting = self.tile(fitting_rows(self._card.heads, self._card.is_fp8, group)).rows
            if fitting != self._rows:
                self._rows = fitting
                plan = self._planner(fitting).plan(tables, kv_lens)
            self.device_plan.upload(plan)
            self._uploaded = plan
        return self._rows

    def _clear(self) -> None:
        """No plan: every token comes out as zeros."""
        if self._uploaded is not None:
            self.device_plan.count.zero_()
            self.device_plan.slot_ptr.zero_()
            self._uploaded = None

    def _planner(self, rows: int) -> Planner:
        if rows not in self._planners:
            card = self._card
            tiling = decode_tiling(card.heads, self.tile(rows), card.page_size, card.num_sms, card.is_fp8)
            self._planners[rows] = Planner(replace(tiling, max_items=MAX_ITEMS, max_slots=MAX_SLOTS))
        return self._planners[rows]


def mean_sharing(segments: Segments, kv_lens: NDArray[np.int64]) -> float:
    """Rows that read a key, on average over the keys that are shared; 1 where less than half of what is read is."""
    if not len(segments.lo):
        return 1.0
    lengths, readers = segments.tok1 - segments.tok0, segments.hi - segments.lo
    read = int((lengths * readers).sum())
    if 2 * read < int(kv_lens.sum()):
        return 1.0
    return read / max(1, int(lengths.sum()))
