"""Attention of a step on the card: KV first, then decode rows by plan and chunks of prompts beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from headstart.attention.chunk_attention import ChunkAttention, ChunkPlan, ChunkRow
from headstart.attention.device_plan import DevicePlan
from headstart.attention.packed import PackedHeads
from headstart.attention.torch_cpu import AttentionRow
from headstart.attention.triton_attention import (
    HeadShape,
    LayerKV,
    Partials,
    PlannedAttention,
    RowTables,
    TileShape,
    extend_tile,
)
from headstart.attention.triton_write import norm_rope_write
from headstart.core.arrays import Int32Array
from headstart.executor.cuda.kernels import write_kv
from headstart.executor.cuda.upload import to_device


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
        heads = self.card.with_scale(scale)
        attention = PlannedAttention(heads, self.tile, self.partials, self.card.num_sms, causal=False)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        return attention(_rows_apart(query), self.card.layers[layer], self.rows, self.plan, out)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Chunk rows of a captured step, all paged: query tokens [first, first + num_tokens) of the step's chunks."""

    first: int
    num_tokens: int
    rows: RowTables
    plan: DevicePlan
    partials: Partials
    prefix: None = None  # a graph cannot hold prefixes of any length; see `PlannedChunks`

    def read(self, card: CardAttention, query: torch.Tensor, layer: int, scale: float, out: torch.Tensor) -> None:
        heads = card.with_scale(scale)
        paged = PlannedAttention(heads, extend_tile(heads), self.partials, card.num_sms, causal=True)
        paged(query, card.layers[layer], self.rows, self.plan, out)


@dataclass(frozen=True, slots=True)
class PlannedChunks:
    """All chunk rows of a step that is run eagerly."""

    num_tokens: int
    attention: ChunkAttention
    plan: ChunkPlan
    first: int = 0

    def read(self, card: CardAttention, query: torch.Tensor, layer: int, scale: float, out: torch.Tensor) -> None:
        self.attention(query, card.layers[layer], self.plan, out, scale)


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Decode rows, then chunk rows, packed one after another. See `headstart.model.hook.StepAttention`."""

    card: CardAttention
    slots: torch.Tensor  # int32 [tokens]
    num_decode: int
    decode: DecodeAttention | None
    chunks: tuple[ChunkPart | PlannedChunks, ...]

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
        query = _rows_apart(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self.decode is not None:
            out[: self.num_decode] = self.decode.read(layer, query[: self.num_decode], scale)
        for part in self.chunks:
            first = self.num_decode + part.first
            mine = slice(first, first + part.num_tokens)
            part.read(self.card, query[mine], layer, scale, out[mine])
        return out


class ChunkPlanner:
    """Plans the chunk rows of steps that are run eagerly. Owns the buffers, which grow with the longest step seen."""

    def __init__(self, card: CardAttention) -> None:
        self._card = card
        self._attention: ChunkAttention | None = None

    def plan(
        self, tables: Sequence[Int32Array], starts: NDArray[np.int64], num_new: NDArray[np.int64]
    ) -> tuple[PlannedChunks, ...]:
        rows = [
            ChunkRow(table, start, new)
            for table, start, new in zip(tables, starts.tolist(), num_new.tolist(), strict=True)
        ]
        num_tokens = int(num_new.sum())
        attention = self._for(num_tokens)
        return (PlannedChunks(num_tokens, attention, attention.plan(rows)),)

    def warm_up(self, max_tokens: int, dtype: torch.dtype) -> None:
        """Prepare dense kernels for steps of up to `max_tokens`; on the thread that launches steps."""
        self._for(max_tokens).warm_up(dtype, max_tokens)

    def _for(self, num_tokens: int) -> ChunkAttention:
        if self._attention is None or self._attention.max_tokens < num_tokens:
            card, room = self._card, max(1024, triton.next_power_of_2(num_tokens))
            partials = Partials.empty(card.heads, 2 * room + 4096, card.device)
            self._attention = ChunkAttention(card.heads, card.layers[0], partials, card.num_sms, room)
        return self._attention


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
