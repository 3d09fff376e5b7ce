"""Attention of a step's prompt chunks: rows of any lengths, over any cached prefixes, some of them shared.

    keys of a row   [ whole pages of a long prefix | the rest, to its end                 ]
                      gathered once for the          many that begin a page: gathered,
                      rows that share it, dense,     dense, causal; else the paged kernel,
                      no mask                        causal

Dense kernels are faster than the paged one, and gathering, which also dequantises, costs little beside them if there
are many query tokens. The choice changes rounding only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import build_plan
from headstart.attention.segments import Int64Array
from headstart.attention.triton_attention import (
    HeadShape,
    LayerKV,
    Partials,
    PlannedAttention,
    RowTables,
    extend_tile,
    extend_tiling,
)
from headstart.attention.triton_extend import (
    MAX_CUDNN_DIM,
    Attended,
    PieceSizes,
    attend_own,
    attend_prefix,
    dense_attention,
)
from headstart.core.arrays import Int32Array
from headstart.core.layout import pages_for


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One row's part of a step: `num_new` tokens after `num_cached`, whose own KV is written before attention runs."""

    pages: Int32Array
    num_cached: int
    num_new: int


_SIZES = PieceSizes(keys=(8192, 2048), queries=(2048, 512), own_step=1024)


@dataclass(frozen=True, slots=True)
class DenseRules:
    """From how many tokens on dense kernels over gathered keys are used, and the sizes that they are given."""

    prefix_new: int  # query tokens on a prefix
    prefix_cached: int  # tokens of the prefix
    own_new: int  # query tokens of a row
    sizes: PieceSizes = _SIZES


def measured_rules(fp8: bool) -> DenseRules:
    """What was faster on an H200, with 32 query heads on 8 KV heads of 128. Paged fp8 keys are unpacked many times."""
    return DenseRules(384, 2048, 1024) if fp8 else DenseRules(512, 4096, 1024)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Pages to gather, and the query tokens that attend their keys."""

    pages: torch.Tensor  # int32 [pages]
    tokens: slice | torch.Tensor  # a run, or int64 indices


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """What `ChunkAttention` runs for one step, in every layer."""

    prefixes: tuple[Gathered, ...]
    own: tuple[Gathered, ...]  # one row's each: its tokens are a run
    paged: RowTables | None  # other rows, from the end of their gathered prefix on
    paged_tokens: slice | torch.Tensor


class ChunkAttention:
    """Plans a step's chunks and runs them layer by layer, all on the current stream."""

    def __init__(
        self,
        heads: HeadShape,
        kv: LayerKV,
        partials: Partials,
        num_sms: int,
        max_tokens: int,
        rules: DenseRules | None = None,
    ) -> None:
        """For layers like `kv`, and steps of up to `max_tokens` query tokens; by `measured_rules` if none are given.

        `partials` need a slot for each query token, and more for few tokens over many keys.
        """
        self.max_tokens = max_tokens
        tile = extend_tile(heads)
        max_slots = partials.lse.shape[0]
        self._heads = heads
        self._partials = partials
        self._num_sms = num_sms
        self._page_size = kv.page_size
        self._rules = rules or measured_rules(kv.is_fp8)
        self._tiling = extend_tiling(heads, tile, kv.page_size, num_sms, max_slots)
        self._device_plan = DevicePlan(max_tokens, max_slots, partials.lse.device)
        self._device = partials.lse.device

    def plan(self, rows: Sequence[ChunkRow]) -> ChunkPlan:
        """Upload the plan of a step; it holds until the next. Raises ValueError if it exceeds the bounds."""
        first = np.concatenate(([0], np.array([row.num_new for row in rows]).cumsum()))
        groups = prefix_groups(rows, self._page_size)
        for group in groups:
            group.num_pages -= group.num_pages % (self._rules.sizes.keys[-1] // self._page_size)
        groups = [group for group in groups if self._prefix_pays(rows, group)]
        skip = np.zeros(len(rows), np.int64)
        for group in groups:
            skip[group.rows] = group.num_pages
        own = [r for r, row in enumerate(rows) if self._own_pays(row, int(skip[r]))]
        paged = [r for r in range(len(rows)) if r not in own]
        return ChunkPlan(
            prefixes=tuple(
                Gathered(self._upload(rows[group.rows[0]].pages[: group.num_pages]), self._tokens(group.rows, first))
                for group in groups
            ),
            own=tuple(
                Gathered(
                    self._upload(rows[r].pages[skip[r] : skip[r] + pages_for(rows[r].num_new, self._page_size)]),
                    self._tokens([r], first),
                )
                for r in own
            ),
            paged=self._plan_paged([rows[r] for r in paged], skip[paged]) if paged else None,
            paged_tokens=self._tokens(paged, first) if paged else slice(0, 0),
        )

    def __call__(
        self, q: torch.Tensor, kv: LayerKV, plan: ChunkPlan, out: torch.Tensor, sm_scale: float | None = None
    ) -> torch.Tensor:
        """`q`, `out` [query tokens, q_heads, head_dim], tokens row by row; a token of `q` is contiguous, `out` is whole.

        `sm_scale` stands in for that of the heads.
        """
        heads = self._heads if sm_scale is None else replace(self._heads, sm_scale=sm_scale)
        step = Attended(q, out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
        if plan.paged is not None:
            self._run_paged(heads, kv, plan.paged, plan.paged_tokens, step)
        for part in plan.own:
            assert isinstance(part.tokens, slice)
            attend_own(heads, kv, step, part.pages, part.tokens, self._rules.sizes)
        for part in plan.prefixes:
            attend_prefix(heads, kv, step, part.pages, part.tokens, self._rules.sizes)
        return out

    def warm_up(self, dtype: torch.dtype, max_own: int) -> None:
        """Have the library prepare every shape that dense kernels meet, own keys up to `max_own` query tokens.

        It remembers them for the calling thread alone: call this on the one that will run steps.
        """
        sizes, heads = self._rules.sizes, self._heads

        def empty(num_heads: int, tokens: int) -> torch.Tensor:
            return torch.zeros(1, num_heads, tokens, heads.head_dim, dtype=dtype, device=self._device)

        for keys in sizes.keys:
            k = empty(heads.num_kv_heads, keys)
            for queries in sizes.queries:
                packed = empty(heads.num_kv_heads, queries * heads.group)
                dense_attention(packed, k, k, heads.sm_scale, causal=False)
        if heads.head_dim <= MAX_CUDNN_DIM:
            for own in range(sizes.own_step, max_own + sizes.own_step, sizes.own_step):
                q = empty(1, own * heads.num_q_heads).view(own, heads.num_q_heads, -1).transpose(0, 1)[None]
                k = empty(heads.num_kv_heads, own)
                dense_attention(q, k, k, heads.sm_scale, causal=True)

    def _prefix_pays(self, rows: Sequence[ChunkRow], group: "PrefixGroup") -> bool:
        num_new = sum(rows[r].num_new for r in group.rows)
        num_cached = group.num_pages * self._page_size
        return num_cached > 0 and num_new >= self._rules.prefix_new and num_cached >= self._rules.prefix_cached

    def _own_pays(self, row: ChunkRow, skip: int) -> bool:
        """Are all keys that are left those of the query tokens, and many?"""
        alone = row.num_cached == skip * self._page_size
        return alone and row.num_new >= self._rules.own_new and self._heads.head_dim <= MAX_CUDNN_DIM

    def _plan_paged(self, rows: list[ChunkRow], skip: Int64Array) -> RowTables:
        lens = np.array([row.num_new for row in rows], np.int64)
        starts = np.array([row.num_cached for row in rows], np.int64) - skip * self._page_size
        tables = [row.pages[num_pages:] for row, num_pages in zip(rows, skip.tolist(), strict=True)]
        self._device_plan.upload(build_plan(tables, starts, lens, self._tiling))
        padded = np.zeros((len(rows), max(len(table) for table in tables)), np.int32)
        for out, table in zip(padded, tables, strict=True):
            out[: len(table)] = table
        return RowTables(self._upload(padded), self._upload((starts + lens).astype(np.int32)))

    def _run_paged(
        self, heads: HeadShape, kv: LayerKV, rows: RowTables, tokens: slice | torch.Tensor, step: Attended
    ) -> None:
        q, out, lse = step.q[tokens], step.out[tokens], step.lse[tokens]
        paged = PlannedAttention(heads, extend_tile(heads), self._partials, self._num_sms, causal=True)
        paged(q, kv, rows, self._device_plan, out, out_lse=lse)
        if isinstance(tokens, torch.Tensor):  # those were copies
            step.out[tokens] = out
            step.lse[tokens] = lse

    def _tokens(self, rows: list[int], first: Int64Array) -> slice | torch.Tensor:
        """The query tokens of `rows`, which are in order."""
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(int(first[rows[0]]), int(first[rows[-1] + 1]))
        return self._upload(np.concatenate([np.arange(first[r], first[r + 1]) for r in rows]))

    def _upload(self, array: Int32Array | Int64Array) -> torch.Tensor:
        """A copy on the device, behind what was launched before, without waiting."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type != "cuda":
            return host.clone()
        return host.pin_memory().to(self._device, non_blocking=True)


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
