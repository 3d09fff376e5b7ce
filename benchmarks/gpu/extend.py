"""How fast is a long chunk over a cached prefix: the paged kernel, and gathering with a dense kernel?"""

import numpy as np
import torch
from common import (
    Card,
    Spread,
    arguments,
    in_graph,
    precompile,
    print_table,
    query_dtype,
    random_pool,
    save,
    time_calls,
)

from headstart.attention.chunk_attention import ChunkAttention, ChunkRow
from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import build_plan
from headstart.attention.triton_attention import (
    HeadShape,
    LayerKV,
    Partials,
    PlannedAttention,
    RowTables,
    TileShape,
    extend_tiling,
)
from headstart.attention.triton_extend import dense_attention, gather

SHAPES = [
    TileShape(rows, keys, warps, stages, per_sm)
    for rows, keys, warps, stages, per_sm in [
        (128, 64, 4, 3, 1), (128, 64, 8, 2, 1), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (128, 128, 8, 2, 1),
        (128, 128, 8, 3, 1), (64, 64, 4, 2, 2), (64, 64, 4, 3, 2), (64, 64, 4, 2, 3), (64, 128, 4, 2, 2),
        (128, 64, 8, 2, 2), (128, 32, 8, 3, 2),
    ]
]  # fmt: skip


class Chunk:
    """`rows` chunks of `new` tokens, one after another in the batch, over one cached prefix."""

    def __init__(self, heads: HeadShape, rows: int, new: int, prefix: int, page: int, fp8: bool, card: Card) -> None:
        torch.manual_seed(0)
        self.heads, self.rows, self.new, self.page, self.device = heads, rows, new, page, card.device
        self.card = card
        self.prefix = prefix // page * page
        own = -(-new // page)
        num_pages = self.prefix // page + rows * own
        ids = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        shared = ids[: self.prefix // page]
        self.tables = [np.concatenate([shared, part]) for part in np.split(ids[len(shared) :], rows)]
        pool = random_pool((num_pages, heads.num_kv_heads, 2, 2, page, heads.head_dim), fp8, card.device)
        scales = tuple(torch.ones(heads.num_kv_heads, device=card.device) for _ in range(2))
        self.kv = LayerKV.of_pool(pool, 1, scales if fp8 else None)  # type: ignore[arg-type]
        shape = (rows * new, heads.num_q_heads, heads.head_dim)
        self.q = torch.randn(shape, device=card.device).to(query_dtype(card.device))
        self.out = torch.empty_like(self.q)

    @property
    def flop(self) -> float:
        scores = self.rows * (self.new * self.prefix + self.new * (self.new + 1) / 2)
        return 4 * scores * self.heads.num_q_heads * self.heads.head_dim

    def paged(self, tile: TileShape) -> tuple[PlannedAttention, RowTables, DevicePlan]:
        starts = np.full(self.rows, self.prefix)
        tiling = extend_tiling(self.heads, tile, self.page, self.card.num_sms, max_slots=1 << 20)
        plan = build_plan(self.tables, starts, np.full(self.rows, self.new), tiling)
        device_plan = DevicePlan(len(self.q), len(plan.items), self.device)
        device_plan.upload(plan)
        rows = RowTables(
            torch.from_numpy(np.stack(self.tables)).to(self.device),
            torch.from_numpy((starts + self.new).astype(np.int32)).to(self.device),
        )
        partials = Partials.empty(self.heads, plan.num_slots, self.device)
        return PlannedAttention(self.heads, tile, partials, self.card.num_sms, causal=True), rows, device_plan

    def run_paged(self, tile: TileShape):
        attention, rows, plan = self.paged(tile)
        return in_graph(lambda: attention(self.q, self.kv, rows, plan, self.out))

    def run_gathered(self):
        chunks = ChunkAttention(
            self.heads, self.kv, Partials.empty(self.heads, 2 * len(self.q), self.device), self.card.num_sms,
            len(self.q), gathers=lambda new, cached, fp8: True,
        )  # fmt: skip
        plan = chunks.plan([ChunkRow(table, self.prefix, self.new) for table in self.tables])
        return in_graph(lambda: chunks(self.q, self.kv, plan, self.out))

    def parts(self) -> dict[str, object]:
        """The dense kernel alone, and the gather alone."""
        skip = self.prefix // self.page
        pages = torch.from_numpy(self.tables[0][:skip].copy()).to(self.device)
        k, v = (gather(self.kv, part, pages, self.q.dtype)[None] for part in (0, 1))
        packed = torch.randn(
            1, self.heads.num_kv_heads, len(self.q) * self.heads.group, self.heads.head_dim, device=self.device
        ).to(self.q.dtype)
        return {
            "gather alone": in_graph(lambda: [gather(self.kv, part, pages, self.q.dtype) for part in (0, 1)]),
            "dense alone": in_graph(lambda: dense_attention(packed, k, v, self.heads.sm_scale, causal=False)),
        }


def warm(job: tuple[TileShape, bool]) -> None:
    tile, fp8 = job
    Chunk(HeadShape(32, 8, 128, 128**-0.5), 1, 512, 4_096, 64, fp8, Card("", "cuda", 132, 1, 1)).run_paged(tile)()


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    heads = HeadShape(32, 8, 128, 128**-0.5)
    results = []
    cases = [(1, 4_500, 50_000, False), (1, 4_500, 50_000, True), (8, 256, 50_000, False), (1, 512, 8_192, False)]
    shapes = SHAPES
    if args.smoke:
        heads, cases, shapes = HeadShape(4, 2, 64, 0.125), [(2, 40, 64, False)], [TileShape(32, 32, 4, 2, 1)]
    jobs = [(tile, fp8) for fp8 in (False, True) for tile in (shapes[:3] if fp8 else shapes)]
    fits = dict.fromkeys(jobs, True) if args.smoke else dict(zip(jobs, precompile(warm, jobs), strict=True))
    for rows, new, prefix, fp8 in cases:
        chunk = Chunk(heads, rows, new, prefix, 16 if args.smoke else 64, fp8, card)
        calls: dict = {}
        for tile in shapes:
            if fits.get((tile, fp8)):
                name = f"paged {tile.rows}x{tile.keys} w{tile.warps} s{tile.stages} p{tile.programs_per_sm}"
                calls[name] = chunk.run_paged(tile)
        calls["gather + dense"] = chunk.run_gathered()
        calls |= chunk.parts()
        times = time_calls(list(calls.values()), repeats=10, warmups=2)
        for name, spread in zip(calls, map(Spread.of, times), strict=True):
            results.append({
                "rows": rows, "new": new, "prefix": prefix, "kv": "fp8" if fp8 else "bf16", "arm": name,
                "ms": spread.median_s * 1e3, "p10_ms": spread.p10_s * 1e3, "p90_ms": spread.p90_s * 1e3,
                "tflops": chunk.flop / spread.median_s / 1e12,
            })  # fmt: skip
        print_table(sorted(results[-len(calls) :], key=lambda row: row["ms"])[:9])
    save(args, "extend", card, results)


if __name__ == "__main__":
    main()
