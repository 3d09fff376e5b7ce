"""Attention of a step's prompt chunks: rows of any lengths, over any cached prefixes, some of them shared.

    keys of a row   [ whole pages of a long prefix: gathered once for the rows that share it | the rest, to its end ]
                      dense kernel, no mask                                                    paged kernel, causal

A dense kernel is faster than a paged one, and gathering, which also dequantises, costs little beside it if there are
many query tokens on the prefix. Below that, or without a long prefix, the paged kernel reads all keys of a row. The
choice changes rounding only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import build_plan
from headstart.attention.triton_attention import (
    HeadShape,
    LayerKV,
    Partials,
    PlannedAttention,
    RowTables,
    extend_tile,
    extend_tiling,
)
from headstart.attention.triton_extend import attend_gathered
from headstart.core.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One row's part of a step: `num_new` tokens after `num_cached`, whose own KV is written before attention runs."""

    pages: Int32Array
    num_cached: int
    num_new: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages that several rows' query tokens see whole."""

    pages: torch.Tensor  # int32 [pages]
    tokens: slice | torch.Tensor  # query tokens of the rows: a run, or int64 indices


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What `ChunkAttention` runs for one step, in every layer."""

    prefixes: tuple[Prefix, ...]
    rows: RowTables  # the rows from the end of their gathered prefix on
    num_tokens: int


def gathering_pays(num_new: int, num_cached: int, fp8: bool) -> bool:
    """Are `num_new` query tokens on one prefix of `num_cached` tokens faster with the prefix gathered?"""
    return num_new >= (256 if fp8 else 512) and num_cached >= 1024


class ChunkAttention:
    """Plans a step's chunks and runs them layer by layer, all on the current stream."""

    def __init__(
        self,
        heads: HeadShape,
        kv: LayerKV,
        partials: Partials,
        num_sms: int,
        max_tokens: int,
        gathers: Callable[[int, int, bool], bool] = gathering_pays,
    ) -> None:
        """For layers like `kv`, and steps of up to `max_tokens` query tokens.

        `partials` need a slot for each query token, and more for few tokens over many keys.
        """
        tile = extend_tile(heads)
        max_slots = partials.lse.shape[0]
        self._heads = heads
        self._page_size = kv.page_size
        self._fp8 = kv.is_fp8
        self._gathers = gathers
        self._tiling = extend_tiling(heads, tile, kv.page_size, num_sms, max_slots)
        self._paged = PlannedAttention(heads, tile, partials, num_sms, causal=True)
        self._device_plan = DevicePlan(max_tokens, max_slots, partials.lse.device)

    def plan(self, rows: Sequence[ChunkRow]) -> ChunkPlan:
        """Upload the plan of a step; it holds until the next. Raises ValueError if it exceeds the bounds."""
        groups = [
            group for group in prefix_groups(rows, self._page_size)
            if self._gathers(sum(rows[r].num_new for r in group.rows), group.num_pages * self._page_size, self._fp8)
        ]  # fmt: skip
        skip = np.zeros(len(rows), np.int64)
        for group in groups:
            skip[group.rows] = group.num_pages
        lens = np.array([row.num_new for row in rows], np.int64)
        starts = np.array([row.num_cached for row in rows], np.int64) - skip * self._page_size
        tables = [row.pages[num_pages:] for row, num_pages in zip(rows, skip, strict=True)]
        plan = build_plan(tables, starts, lens, self._tiling)
        self._device_plan.upload(plan)
        device = self._device_plan.count.device
        first = np.concatenate(([0], lens.cumsum()))
        prefixes = tuple(
            Prefix(
                _to_device(rows[group.rows[0]].pages[: group.num_pages], device),
                _token_range(group.rows, first, device),
            )
            for group in groups
        )
        padded = np.zeros((len(rows), max(len(table) for table in tables)), np.int32)
        for out, table in zip(padded, tables, strict=True):
            out[: len(table)] = table
        kv_lens = (starts + lens).astype(np.int32)
        return ChunkPlan(prefixes, RowTables(_to_device(padded, device), _to_device(kv_lens, device)), int(first[-1]))

    def __call__(self, q: torch.Tensor, kv: LayerKV, plan: ChunkPlan, out: torch.Tensor) -> torch.Tensor:
        """`q`, `out` [query tokens, q_heads, head_dim], tokens row by row; a token of `q` is contiguous, `out` is whole."""
        if not plan.prefixes:
            return self._paged(q, kv, plan.rows, self._device_plan, out)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self._paged(q, kv, plan.rows, self._device_plan, out, out_lse=lse)
        for prefix in plan.prefixes:
            attend_gathered(self._heads, q, kv, prefix.pages, prefix.tokens, out, lse)
        return out


@dataclass(slots=True)
class PrefixGroup:
    """Rows whose cached tokens begin with the same whole pages."""

    rows: list[int]
    num_pages: int


def prefix_groups(rows: Sequence[ChunkRow], page_size: int) -> list[PrefixGroup]:
    """Every row in one group. A row joins another's if that leaves both at least half of their cached pages in common."""
    groups: list[PrefixGroup] = []
    for r, row in enumerate(rows):
        num_pages = row.num_cached // page_size
        for group in groups:
            shorter = min(num_pages, group.num_pages)
            differs = np.flatnonzero(row.pages[:shorter] != rows[group.rows[0]].pages[:shorter])
            common = int(differs[0]) if len(differs) else shorter
            if 2 * common >= max(num_pages, group.num_pages):
                group.rows.append(r)
                group.num_pages = common
                break
        else:
            groups.append(PrefixGroup([r], num_pages))
    return groups


def _token_range(rows: list[int], first: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(first[rows[0]]), int(first[rows[-1] + 1]))
    return _to_device(np.concatenate([np.arange(first[r], first[r + 1]) for r in rows]), device)


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copied behind what was launched before, without waiting."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)
