"""Paged batches for the attention kernels: poisoned pools, random trees, and a float64 reference.

Every element that no row may read is NaN, or 0x7F where KV is e4m3: freed pages, the tail of a last page, and other
layers of the pool. Outputs are NaN before each run.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from headstart.attention.chunk_attention import ChunkAttention, ChunkRow, DenseRules
from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import Plan, Tiling, build_plan
from headstart.attention.triton_attention import (
    HeadShape,
    LayerKV,
    Partials,
    PlannedAttention,
    RowTables,
    TileShape,
    UngroupedDecode,
)

NO_SHARING = 1 << 30


@dataclass(frozen=True)
class Spec:
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    page: int = 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    tile_rows: int = 16
    block: int = 64
    warps: int = 4

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.kv_heads * self.group, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    @property
    def tile(self) -> TileShape:
        return TileShape(self.tile_rows, self.block, self.warps, stages=3, programs_per_sm=2)

    @property
    def fp8(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    @property
    def query_dtype(self) -> torch.dtype:
        return torch.float16 if self.dtype == torch.float16 else torch.bfloat16

    def tiling(self, **changes: object) -> Tiling:
        fields = {
            "page_size": self.page,
            "q_tile": self.tile.q_tile(self.heads),
            "min_chunk": 128,
            "max_chunk": 128,
            "exact_chunk": 128,
        }
        return Tiling(**fields | {"min_share": 1, "max_slots": 1 << 20} | changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tree:
    """Lengths of rows and of the prefixes they hang on. Row r: its prefix, then `private[r]` tokens of its own."""

    prefixes: list[tuple[int, int]]  # (parent, pages added); parent -1 is the root
    rows: list[tuple[int, int]]  # (prefix, private tokens incl. the new ones); prefix -1 is none


@dataclass
class Batch:
    """Rows laid out in a pool of layer 1 of 2."""

    spec: Spec
    pool: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor]
    tables: list[np.ndarray]
    starts: np.ndarray
    q_lens: np.ndarray
    q: torch.Tensor
    rows: RowTables = field(init=False)

    def __post_init__(self) -> None:
        width = max((len(table) for table in self.tables), default=1)
        padded = np.full((max(len(self.tables), 1), width), 1 << 30, np.int32)
        for row, table in zip(padded, self.tables, strict=False):
            row[: len(table)] = table
        kv_lens = torch.from_numpy((self.starts + self.q_lens).astype(np.int32)).to(self.spec.device)
        self.rows = RowTables(torch.from_numpy(padded).to(self.spec.device), kv_lens)

    @property
    def kv(self) -> LayerKV:
        return LayerKV.of_pool(self.pool, 1, self.scales if self.spec.fp8 else None)

    @property
    def num_tokens(self) -> int:
        return int(self.q_lens.sum())

    def permuted(self, order: list[int]) -> "Batch":
        """The same decode rows in other batch slots."""
        return replace(
            self,
            tables=[self.tables[row] for row in order],
            starts=self.starts[order],
            q_lens=self.q_lens[order],
            q=self.q[torch.tensor(order, device=self.q.device)],
        )

    def plan(self, **changes: object) -> Plan:
        return build_plan(self.tables, self.starts, self.q_lens, self.spec.tiling(**changes))

    def run(self, padding: int = 0, lse: torch.Tensor | None = None, **changes: object) -> torch.Tensor:
        """Output `[query tokens + padding, q_heads, head_dim]` by plan; `lse` takes base-2 log-sum-exps."""
        plan = self.plan(**changes)
        num_rows = self.num_tokens + padding
        device_plan = DevicePlan(num_rows, len(plan.items), self.spec.device)
        device_plan.upload(plan)
        partials = Partials.empty(self.spec.heads, max(plan.num_slots, 1), self.spec.device)
        partials.out.fill_(float("nan"))
        out = torch.full((num_rows, *self.q.shape[1:]), float("nan"), dtype=self.q.dtype, device=self.spec.device)
        causal = bool((self.q_lens > 1).any())
        attention = PlannedAttention(self.spec.heads, self.spec.tile, partials, num_sms(self.spec.device), causal)
        attention(self.q, self.kv, self.rows, device_plan, out, lse)
        assert int(partials.queue) == 0, "the queue is empty for the next layer"
        return out

    def run_ungrouped(self, chunk: int = 128) -> torch.Tensor:
        splits = -(-int(self.rows.kv_lens.max()) // chunk)
        partials = Partials.empty(self.spec.heads, splits * len(self.tables), self.spec.device)
        out = torch.full_like(self.q, float("nan"))
        return UngroupedDecode(self.spec.heads, self.spec.tile, partials, splits, chunk)(
            self.q, self.kv, self.rows, out
        )


def run_chunks(batch: Batch, rules: DenseRules | None = None) -> torch.Tensor:
    """Output of `ChunkAttention`."""
    spec = batch.spec
    partials = Partials.empty(spec.heads, 4 * batch.num_tokens + 64, spec.device)
    partials.out.fill_(float("nan"))
    chunks = ChunkAttention(spec.heads, batch.kv, partials, num_sms(spec.device), batch.num_tokens, rules)
    rows = [
        ChunkRow(table, start, q_len)
        for table, start, q_len in zip(batch.tables, batch.starts.tolist(), batch.q_lens.tolist(), strict=True)
    ]
    out = torch.full_like(batch.q, float("nan"))
    return chunks(batch.q, batch.kv, chunks.plan(rows), out)


def num_sms(device: str) -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 2


def lay_out(spec: Spec, tree: Tree, q_lens: list[int] | None = None, seed: int = 0) -> Batch:
    """Rows in shuffled pages of a poisoned pool."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    lens = np.array(q_lens or [1] * len(tree.rows), np.int64)
    prefix_pages = sum(pages for _, pages in tree.prefixes)
    own_pages = sum(-(-private // spec.page) for _, private in tree.rows)
    num_pages = prefix_pages + own_pages + 3
    ids = iter(rng.permutation(num_pages).astype(np.int32).tolist())
    paths: list[list[int]] = []
    for parent, pages in tree.prefixes:
        paths.append((paths[parent] if parent >= 0 else []) + [next(ids) for _ in range(pages)])
    tables, kv_lens = [], []
    for prefix, private in tree.rows:
        shared = paths[prefix] if prefix >= 0 else []
        tables.append(np.array(shared + [next(ids) for _ in range(-(-private // spec.page))], np.int32))
        kv_lens.append(len(shared) * spec.page + private)
    pool = poisoned_pool(spec, num_pages)
    for table, kv_len in zip(tables, kv_lens, strict=True):
        fill(spec, pool, table, kv_len)
    scales = tuple(torch.rand(spec.kv_heads, device=spec.device) + 0.5 for _ in range(2))
    q = torch.randn(int(lens.sum()), spec.heads.num_q_heads, spec.head_dim, device=spec.device).to(spec.query_dtype)
    return Batch(spec, pool, scales, tables, np.array(kv_lens, np.int64) - lens, lens, q)  # type: ignore[arg-type]


def poisoned_pool(spec: Spec, num_pages: int) -> torch.Tensor:
    shape = (num_pages, spec.kv_heads, 2, 2, spec.page, spec.head_dim)
    if spec.fp8:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=spec.device).view(spec.dtype)
    return torch.full(shape, float("nan"), dtype=spec.dtype, device=spec.device)


def fill(spec: Spec, pool: torch.Tensor, table: np.ndarray, kv_len: int) -> None:
    """Random KV for the tokens of a row that have none yet."""
    layer = pool[:, :, 1]
    bits = layer.view(torch.uint8) if spec.fp8 else layer
    for i, page in enumerate(table.tolist()):
        used = min(spec.page, kv_len - i * spec.page)
        first = bits[page, 0, 0, 0, 0]
        if used > 0 and bool((first == 0x7F) if spec.fp8 else torch.isnan(first)):
            values = torch.randn(spec.kv_heads, 2, used, spec.head_dim, device=spec.device).to(spec.dtype)
            bits[page, :, :, :used] = values.view(bits.dtype)


def reference(batch: Batch) -> torch.Tensor:
    """Attention in float64 on the stored numbers, dequantised, row by row."""
    spec, outs, first = batch.spec, [], 0
    for table, start, q_len in zip(batch.tables, batch.starts.tolist(), batch.q_lens.tolist(), strict=True):
        k, v = (stored(batch, part, table, start + q_len) for part in (0, 1))
        q = batch.q[first : first + q_len].double().transpose(0, 1)
        first += q_len
        scores = q @ k.transpose(1, 2) * spec.heads.sm_scale
        positions = torch.arange(start, start + q_len, device=spec.device)[:, None]
        future = torch.arange(start + q_len, device=spec.device)[None] > positions
        outs.append((scores.masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def reference_lse(batch: Batch) -> torch.Tensor:
    """Natural log-sum-exps of decode rows, float64 `[rows, q_heads]`."""
    rows = []
    for row, (table, start) in enumerate(zip(batch.tables, batch.starts.tolist(), strict=True)):
        k = stored(batch, 0, table, start + 1)
        scores = (k @ batch.q[row].double()[:, :, None])[..., 0] * batch.spec.heads.sm_scale
        rows.append(scores.logsumexp(-1))
    return torch.stack(rows)


def stored(batch: Batch, part: int, table: np.ndarray, kv_len: int) -> torch.Tensor:
    """[q_heads, kv_len, head_dim] float64 keys or values of a row."""
    pages = batch.pool[:, :, 1, part][torch.from_numpy(table.astype(np.int64)).to(batch.spec.device)]
    values = pages.to(torch.float32).double().transpose(0, 1).flatten(1, 2)[:, :kv_len]
    if batch.spec.fp8:
        values = values * batch.scales[part].double()[:, None, None]
    return values.repeat_interleave(batch.spec.group, 0)


def assert_close(batch: Batch, out: torch.Tensor, expected: torch.Tensor | None = None) -> None:
    """The gates of the kernels: relative error, direction of every vector, and the largest difference."""
    expected = reference(batch) if expected is None else expected
    got = out.double()
    assert torch.isfinite(got).all(), "an output is missing, or read poison"
    error = float((got - expected).norm() / expected.norm())
    assert error <= (6e-3 if batch.spec.fp8 else 4e-3), f"relative error {error}"
    cosine = torch.nn.functional.cosine_similarity(got, expected, dim=-1)
    norms = expected.norm(dim=-1)
    assert float(cosine[norms > 1e-6].min()) >= 0.9999
    largest = max(float(stored(batch, 1, table, int(n)).abs().max()) for table, n in zip(
        batch.tables, batch.starts + batch.q_lens, strict=True))  # fmt: skip
    assert float((got - expected).abs().max()) <= 2e-2 * largest
