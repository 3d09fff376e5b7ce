"""Launches the Triton kernels: decode steps inside or outside of CUDA graphs, and chunks of prompts."""

import math
from dataclasses import dataclass

import torch
import triton

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import Tiling
from headstart.attention.triton_decode import grouped_kernel, merge_kernel, ungrouped_kernel

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Attention heads of one worker's part of the model."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a kernel is compiled and launched. Outputs of two shapes differ in rounding."""

    rows: int  # (query token, head) rows of a tile: 16, 32, 64 or 128
    keys: int  # keys of a block
    warps: int
    stages: int  # blocks of keys in flight
    programs_per_sm: int

    def q_tile(self, heads: HeadShape) -> int:
        """Query tokens a tile holds: `Tiling.q_tile` of the plan."""
        return self.rows // heads.group


def fitting_rows(heads: HeadShape, fp8: bool, group_size: float) -> int:
    """Rows of the tile for groups of about `group_size` decode rows: keys are read once for each tile a group fills.

    A tile of 64 bf16 rows runs on the wider tensor core instructions and costs no more than one of 32. An fp8 one does:
    its unpacked values go back through shared memory.
    """
    rows = group_size * heads.group
    if rows <= 16:
        return 16
    return 32 if fp8 and rows <= 32 else 64


def decode_tile(heads: HeadShape, fp8: bool, rows: int = 16) -> TileShape:
    """What the decode kernels ran fastest with on Hopper, for tiles of `rows` query rows or the next that fit."""
    while rows < heads.group:
        rows *= 2
    keys = 64 if heads.head_dim <= 128 else 32
    warps = 8 if rows > 64 else 2 if fp8 and rows <= 32 and heads.head_dim <= 128 else 4
    if fp8 and rows >= 64:
        return TileShape(rows, keys, warps, stages=4, programs_per_sm=2 if rows == 64 and heads.head_dim <= 128 else 1)
    smem = 2 * 2 * keys * heads.head_dim * (1 if fp8 else 2) + 12_000
    return TileShape(rows, keys, warps, stages=3, programs_per_sm=max(1, min(4, 220_000 // smem)))


def decode_tiling(heads: HeadShape, tile: TileShape, page_size: int, num_sms: int, fp8: bool) -> Tiling:
    """Tiling of decode plans for `tile` on a card of `num_sms` multiprocessors.

    Fp8 items have more to do at their ends (splitting queries, interleaving outputs), so they are cut longer. A few short
    rows are done soonest with two programs a multiprocessor, however many would fit.
    """
    return Tiling(
        page_size,
        tile.q_tile(heads),
        min_chunk=-(-64 // page_size) * page_size,
        max_chunk=4096 if fp8 else 2048,
        wave_items=max(1, num_sms * tile.programs_per_sm // heads.num_kv_heads),
        short_wave_items=max(1, num_sms * min(tile.programs_per_sm, 2) // heads.num_kv_heads),
        item_cost=200 if fp8 else 50,
    )


def extend_tile(heads: HeadShape) -> TileShape:
    """The same for chunks of prompts."""
    return TileShape(128, 64 if heads.head_dim <= 128 else 32, warps=8, stages=3, programs_per_sm=1)


def extend_tiling(heads: HeadShape, tile: TileShape, page_size: int, num_sms: int, max_slots: int) -> Tiling:
    """The same for chunks of prompts: keys are split only where there are too few tiles of queries for the card."""
    wave_items = max(1, num_sms * tile.programs_per_sm // heads.num_kv_heads)
    return Tiling(page_size, tile.q_tile(heads), max_chunk=1 << 20, wave_items=wave_items, max_slots=max_slots)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's part of the KV pool: strided views `[pages, kv_heads, page, head_dim]`, last two dims contiguous.

    For fp8 (e4m3) the scales, fp32 `[kv_heads]`, turn stored numbers into keys and values.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @classmethod
    def of_pool(
        cls, pool: torch.Tensor, layer: int, scales: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> "LayerKV":
        """Layer `layer` of a pool `[pages, kv_heads, layers, 2, page, head_dim]`."""
        return cls(pool[:, :, layer, 0], pool[:, :, layer, 1], *(scales or ()))

    @property
    def is_fp8(self) -> bool:
        return self.k.dtype == torch.float8_e4m3fn

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, slots=True)
class RowTables:
    """What a step's rows hold, int32 on the device."""

    pages: torch.Tensor  # [rows, max_pages] page tables; entries past a row's keys are never read
    kv_lens: torch.Tensor  # [rows]


@dataclass(frozen=True, slots=True)
class Partials:
    """Room for partial results, shared by all layers: fp32 `[slots, q_heads, head_dim]` and base-2 log-sum-exps."""

    out: torch.Tensor
    lse: torch.Tensor
    queue: torch.Tensor  # int32 [1], 0 between launches

    @classmethod
    def empty(cls, heads: HeadShape, max_slots: int, device: torch.device | str) -> "Partials":
        shape = (max_slots, heads.num_q_heads)
        return cls(
            torch.empty(*shape, heads.head_dim, dtype=torch.float32, device=device),
            torch.empty(*shape, dtype=torch.float32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )


class PlannedAttention:
    """Attention of one step's query tokens over the pool, as a plan lays it out. Every launch reads the plan anew."""

    def __init__(self, heads: HeadShape, tile: TileShape, partials: Partials, num_sms: int, causal: bool) -> None:
        """`causal`: rows may have several query tokens (chunks of prompts)."""
        self._heads = heads
        self._tile = tile
        self._partials = partials
        self._num_programs = num_sms * tile.programs_per_sm
        self._causal = causal

    def __call__(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        rows: RowTables,
        plan: DevicePlan,
        out: torch.Tensor,
        out_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`q`, `out` [query tokens, q_heads, head_dim]; `out_lse`: fp32 base-2 log-sum-exps [query tokens, q_heads]."""
        heads, partials = self._heads, self._partials
        k, v, k_scale, v_scale = _operands(kv, self._tile)
        grouped_kernel[(self._num_programs,)](
            q, k, v, rows.pages, rows.kv_lens, plan.count, plan.items, plan.q_list, plan.slot_ptr, plan.pos_of,
            partials.queue, partials.out, partials.lse, out, k_scale, v_scale, heads.sm_scale * _LOG2_E, q.stride(0),
            k.stride(0), k.stride(1), rows.pages.stride(0), **_constants(heads, self._tile, kv), CAUSAL=self._causal,
        )  # fmt: skip
        merge_kernel[(out.shape[0], heads.num_q_heads)](
            partials.out, partials.lse, plan.slot_ptr, rows.kv_lens, partials.queue, out,
            partials.lse if out_lse is None else out_lse, v_scale, 0, 1, **_merge_constants(heads, kv),
            UNGROUPED=False, WITH_LSE=out_lse is not None,
        )  # fmt: skip
        return out


class UngroupedDecode:
    """Plain split-KV decode: each row reads all of its own keys. The baseline that sharing is measured against."""

    def __init__(self, heads: HeadShape, tile: TileShape, partials: Partials, num_splits: int, chunk: int) -> None:
        """Rows may have up to `num_splits` * `chunk` keys; partials need rows * num_splits slots."""
        self._heads = heads
        self._tile = tile
        self._partials = partials
        self._num_splits = num_splits
        self._chunk = chunk

    def __call__(self, q: torch.Tensor, kv: LayerKV, rows: RowTables, out: torch.Tensor) -> torch.Tensor:
        """`q`, `out` [rows, q_heads, head_dim], one query token a row."""
        heads, partials = self._heads, self._partials
        k, v, k_scale, v_scale = _operands(kv, self._tile)
        ungrouped_kernel[(heads.num_kv_heads, self._num_splits, q.shape[0])](
            q, k, v, rows.pages, rows.kv_lens, partials.out, partials.lse, k_scale, heads.sm_scale * _LOG2_E,
            q.stride(0), k.stride(0), k.stride(1), rows.pages.stride(0), self._chunk,
            **_constants(heads, self._tile, kv),
        )  # fmt: skip
        merge_kernel[(out.shape[0], heads.num_q_heads)](
            partials.out, partials.lse, rows.kv_lens, rows.kv_lens, partials.queue, out, partials.lse, v_scale,
            self._num_splits, self._chunk, **_merge_constants(heads, kv), UNGROUPED=True, WITH_LSE=False,
        )  # fmt: skip
        return out


def _operands(kv: LayerKV, tile: TileShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values as `attend` loads them (fp8 in small tiles: as pairs), and scales, which bf16 never reads."""
    if not kv.is_fp8:
        return kv.k, kv.v, kv.k, kv.v
    assert kv.k_scale is not None
    assert kv.v_scale is not None
    if tile.rows >= 64:
        return kv.k, kv.v, kv.k_scale, kv.v_scale
    return kv.k.view(torch.int16), kv.v.view(torch.int16), kv.k_scale, kv.v_scale


def _constants(heads: HeadShape, tile: TileShape, kv: LayerKV) -> dict[str, int | bool]:
    return {
        "KVH": heads.num_kv_heads,
        "G": heads.group,
        "D": heads.head_dim,
        "PAGE": kv.page_size,
        "MT": tile.rows,
        "BN": tile.keys,
        "FP8": kv.is_fp8,
        "ASM": not triton.knobs.runtime.interpret,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _merge_constants(heads: HeadShape, kv: LayerKV) -> dict[str, int | bool]:
    return {
        "HQ": heads.num_q_heads,
        "G": heads.group,
        "D": heads.head_dim,
        "NS": 32,
        "FP8": kv.is_fp8,
        "num_warps": 4,
    }
