"""Attention of a step on the card: KV first, then decode rows by plan and chunks of prompts beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from headstart.attention.device_plan import DevicePlan
from headstart.attention.packed import PackedHeads
from headstart.attention.plan import Plan, build_plan
from headstart.attention.torch_cpu import AttentionRow
from headstart.attention.triton_attention import (
    HeadShape,
    LayerKV,
    Partials,
    PlannedAttention,
    RowTables,
    TileShape,
    extend_tile,
    extend_tiling,
    one_launch_pays,
)
from headstart.attention.triton_extend import GatheredExtend
from headstart.attention.triton_write import norm_rope_write
from headstart.core.arrays import Int32Array
from headstart.executor.cuda.kernels import write_kv
from headstart.executor.cuda.upload import to_device

GATHER_TOKENS = 512
"""New tokens of a row from which its cached prefix is gathered for a dense kernel: below, the paged one is faster."""


@dataclass(frozen=True, slots=True)
class CardAttention:
    """What attention needs of the card and the model, whatever the step."""

    heads: HeadShape
    layers: tuple[LayerKV, ...]
    num_sms: int
    device: torch.device

    def with_scale(self, sm_scale: float) -> HeadShape:
        return replace(self.heads, sm_scale=sm_scale)

    @property
    def is_fp8(self) -> bool:
        return self.layers[0].is_fp8

    @property
    def page_size(self) -> int:
        return self.layers[0].page_size


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Decode rows of a step, one query token each. See `headstart.model.hook.StepAttention`."""

    card: CardAttention
    tile: TileShape
    partials: Partials
    plan: DevicePlan
    rows: RowTables
    slots: torch.Tensor  # int32 [rows]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        write_kv(self.card.layers[layer], key, value, self.slots)
        return self.read(layer, query, scale)

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> torch.Tensor:
        """See `headstart.attention.packed.PackedAttention`."""
        query = norm_rope_write(heads, self.card.heads, self.card.layers[layer], self.slots)
        return self.read(layer, query, scale)

    def read(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        attention = PlannedAttention(
            self.card.with_scale(scale), self.tile, self.partials, self.card.num_sms, causal=False,
            one_launch=one_launch_pays(query.shape[0]),
        )  # fmt: skip
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return attention(_rows_apart(query), self.card.layers[layer], self.rows, self.plan, out)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Chunk rows that are attended in one call: query tokens [first, first + num_tokens) of the step's chunks."""

    first: int
    num_tokens: int
    rows: RowTables
    plan: DevicePlan
    partials: Partials
    prefix: torch.Tensor | None  # int32 pages that come before every row's keys, and are gathered


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Decode rows, then chunk rows, packed one after another. See `headstart.model.hook.StepAttention`."""

    card: CardAttention
    slots: torch.Tensor  # int32 [tokens]
    num_decode: int
    decode: DecodeAttention | None
    chunks: tuple[ChunkPart, ...]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        write_kv(self.card.layers[layer], key, value, self.slots)
        return self._read(layer, query, scale)

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> torch.Tensor:
        """See `headstart.attention.packed.PackedAttention`."""
        query = norm_rope_write(heads, self.card.heads, self.card.layers[layer], self.slots)
        return self._read(layer, query, scale)

    def _read(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        kv, query = self.card.layers[layer], _rows_apart(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self.decode is not None:
            out[: self.num_decode] = self.decode.read(layer, query[: self.num_decode], scale)
        heads = self.card.with_scale(scale)
        for part in self.chunks:
            first = self.num_decode + part.first
            mine = slice(first, first + part.num_tokens)
            paged = PlannedAttention(heads, extend_tile(heads), part.partials, self.card.num_sms, causal=True)
            if part.prefix is None:
                paged(query[mine], kv, part.rows, part.plan, out[mine])
            else:
                GatheredExtend(heads, paged)(query[mine].contiguous(), kv, part.prefix, part.rows, part.plan, out[mine])
        return out


class ChunkPlanner:
    """Plans the chunk rows of a step. Owns the buffers, which grow with the longest chunk seen."""

    def __init__(self, card: CardAttention) -> None:
        self._card = card
        self._plans: list[DevicePlan] = []
        self._partials: Partials | None = None

    def plan(
        self, tables: Sequence[Int32Array], starts: NDArray[np.int64], num_new: NDArray[np.int64]
    ) -> tuple[ChunkPart, ...]:
        """Parts in row order: rows of many new tokens on a cached prefix each alone, those between them together."""
        page = self._card.page_size
        gathered = (num_new >= GATHER_TOKENS) & (starts >= page)
        groups: list[tuple[list[int], int]] = []  # rows, and leading pages that are gathered
        for row, alone in enumerate(gathered.tolist()):
            if alone:
                groups.append(([row], int(starts[row]) // page))
            elif groups and not groups[-1][1]:
                groups[-1][0].append(row)
            else:
                groups.append(([row], 0))
        firsts = np.concatenate(([0], np.cumsum(num_new)))
        return tuple(
            self._part(i, [tables[row] for row in rows], starts[rows], num_new[rows], int(firsts[rows[0]]), skipped)
            for i, (rows, skipped) in enumerate(groups)
        )

    def _part(
        self, index: int, tables: list[Int32Array], starts: NDArray[np.int64], num_new: NDArray[np.int64], first: int,
        skipped: int,
    ) -> ChunkPart:  # fmt: skip
        card, num_tokens = self._card, int(num_new.sum())
        own = [table[skipped:] for table in tables]
        starts = starts - skipped * card.page_size
        tile = extend_tile(card.heads)
        tiling = extend_tiling(card.heads, tile, card.page_size, card.num_sms, max_slots=max(8192, 2 * num_tokens))
        plan = build_plan(own, starts, num_new, tiling)
        rows = RowTables(_padded(own, card.device), to_device((starts + num_new).astype(np.int32), card.device))
        prefix = to_device(tables[0][:skipped], card.device) if skipped else None
        return ChunkPart(first, num_tokens, rows, self._upload(index, plan), self._room_for(plan.num_slots), prefix)

    def _upload(self, index: int, plan: Plan) -> DevicePlan:
        num_tokens, num_items = len(plan.q_list), len(plan.items)
        while len(self._plans) <= index:
            self._plans.append(DevicePlan(1024, 1024, self._card.device))
        held = self._plans[index]
        if num_tokens > held.max_tokens or num_items > held.max_items:
            size = triton.next_power_of_2(num_tokens), triton.next_power_of_2(num_items)
            held = self._plans[index] = DevicePlan(
                *map(max, size, (held.max_tokens, held.max_items)), self._card.device
            )
        held.upload(plan)
        return held

    def _room_for(self, num_slots: int) -> Partials:
        """Parts of a step are attended one after another, so they share their room."""
        if self._partials is None or len(self._partials.out) < num_slots:
            self._partials = Partials.empty(self._card.heads, triton.next_power_of_2(num_slots), self._card.device)
        return self._partials


class PromptAttention:
    """Plans steps in which every row is attended as a chunk, however short: what a self-test runs. Satisfies
    `executor.runner.AttentionBackend`."""

    def __init__(self, card: CardAttention) -> None:
        self._card = card
        self._planner = ChunkPlanner(card)

    def begin(self, rows: Sequence[AttentionRow]) -> MixedAttention:
        starts = np.array([row.start for row in rows], np.int64)
        num_new = np.array([row.num_new for row in rows], np.int64)
        parts = self._planner.plan([row.pages for row in rows], starts, num_new)
        slots = [slots_of(row.pages, row.start, row.num_new, self._card.page_size) for row in rows]
        return MixedAttention(
            self._card, to_device(np.concatenate(slots).astype(np.int32), self._card.device), 0, None, parts
        )


def slots_of(pages: Int32Array, start: int, num_new: int, page_size: int) -> NDArray[np.int64]:
    """Where the KV of positions [start, start + num_new) goes: page id * page_size + place in the page."""
    at = np.arange(start, start + num_new)
    return pages[at // page_size].astype(np.int64) * page_size + at % page_size


def _rows_apart(query: torch.Tensor) -> torch.Tensor:
    """`query` [tokens, heads, head_dim] itself if a token's heads lie side by side, else a copy of which they do."""
    head_dim = query.shape[2]
    return query if query.stride()[1:] == (head_dim, 1) else query.contiguous()


def _padded(tables: Sequence[Int32Array], device: torch.device) -> torch.Tensor:
    """int32 [rows, most pages]."""
    padded = np.zeros((len(tables), max(len(table) for table in tables)), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return to_device(padded, device)
