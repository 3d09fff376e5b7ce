"""From how many new and cached tokens on do dense kernels pay, and how fast is the prefill of a long prompt?

The first table is attention of one chunk by `ChunkAttention`: everything paged, against the prefix or the chunk's own
keys gathered for dense kernels. The second is the whole fused Qwen3-8B with random weights over one chunk: operations of
its products and of its attention, by the rate of an 8192^3 product; "first" is the first step of a shape, in which the
library prepares its kernels.
"""

import time

import torch
from common import Card, Spread, arguments, in_graph, precompile, print_table, save, time_calls
from extend import Chunk
from step import build_model, prepare

from headstart.attention.chunk_attention import ChunkAttention, ChunkRow, DenseRules
from headstart.attention.packed import PackedHeads
from headstart.attention.triton_attention import HeadShape, LayerKV, Partials
from headstart.attention.triton_write import norm_rope_write
from headstart.model.hook import STEP_KEYWORD

NEW = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CACHED = (0, 2048, 4096, 16_384, 50_000)
HEADS = HeadShape(32, 8, 128, 128**-0.5)


NEVER = 1 << 30
ARMS = {
    "paged": DenseRules(NEVER, NEVER, NEVER),
    "prefix dense": DenseRules(1, 1, NEVER),
    "own dense": DenseRules(NEVER, NEVER, 1),
    "both": DenseRules(1, 1, 1),
}


def attention(chunk: Chunk, rules: DenseRules):
    partials = Partials.empty(chunk.heads, 2 * len(chunk.q) + 4096, chunk.device)
    chunks = ChunkAttention(chunk.heads, chunk.kv, partials, chunk.card.num_sms, len(chunk.q), rules)
    plan = chunks.plan([ChunkRow(table, chunk.prefix, chunk.new) for table in chunk.tables])
    return in_graph(lambda: chunks(chunk.q, chunk.kv, plan, chunk.out))


def warm(fp8: bool) -> None:
    chunk = Chunk(HEADS, 1, 512, 2048, 64, fp8, Card("", "cuda", 132, 1, 1))
    for rules in ARMS.values():
        attention(chunk, rules)()


def crossover(card: Card, fp8: bool) -> list[dict]:
    results = []
    for cached in CACHED:
        for new in NEW:
            chunk = Chunk(HEADS, 1, new, cached, 64, fp8, card)
            names = ("paged", "own dense") if cached == 0 else ("paged", "prefix dense", "both")
            calls = {name: attention(chunk, ARMS[name]) for name in names}
            times = time_calls(list(calls.values()), repeats=6, warmups=1)
            us = {name: Spread.of(spread).median_s * 1e6 for name, spread in zip(calls, times, strict=True)}
            results.append({"kv": "fp8" if fp8 else "bf16", "new": new, "cached": cached, **us,
                            "TFLOP/s": chunk.flop / min(us.values()) / 1e6})  # fmt: skip
    return results


class ChunkStep:
    """One chunk's attention in the fused model: every layer's KV lies in the same two layers of pages."""

    def __init__(self, chunk: Chunk) -> None:
        partials = Partials.empty(chunk.heads, 2 * len(chunk.q), chunk.device)
        self.chunk = chunk
        self.chunks = ChunkAttention(chunk.heads, chunk.kv, partials, chunk.card.num_sms, len(chunk.q))
        self.plan = self.chunks.plan([ChunkRow(chunk.tables[0], chunk.prefix, chunk.new)])
        positions = torch.arange(chunk.prefix, chunk.prefix + chunk.new, device=chunk.device)
        pages = torch.from_numpy(chunk.tables[0]).to(chunk.device)
        self.slots = (pages[positions // chunk.page] * chunk.page + positions % chunk.page).to(torch.int32)
        self.positions = positions[None]

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> torch.Tensor:
        kv: LayerKV = self.chunk.kv
        q = norm_rope_write(heads, self.chunk.heads, kv, self.slots)
        return self.chunks(q, kv, self.plan, torch.empty(q.shape, dtype=q.dtype, device=q.device))


def whole_prefill(card: Card) -> list[dict]:
    model = build_model("8B", smoke=False)
    prepare(model, "fused")
    num_layers = model.config.num_hidden_layers
    weights = sum(p.numel() for layer in model.model.layers for p in layer.parameters() if p.dim() == 2)
    results = []
    for fp8 in (True, False):
        for new, cached in ((4500, 50_000), (8192, 0), (2048, 0), (512, 8192)):
            chunk = Chunk(HEADS, 1, new, cached, 64, fp8, card)
            step = ChunkStep(chunk)
            tokens = torch.randint(151_936, (1, new), device="cuda")

            def run(step: ChunkStep = step, tokens: torch.Tensor = tokens) -> object:
                with torch.inference_mode():
                    return model(
                        tokens, position_ids=step.positions, use_cache=False, logits_to_keep=1, **{STEP_KEYWORD: step}
                    ).logits

            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            first = time.perf_counter() - start
            spread = Spread.of(time_calls([run], repeats=6, warmups=1)[0])
            flop = 2 * weights * new + num_layers * chunk.flop
            rate = flop / spread.median_s
            results.append({"kv": "fp8" if fp8 else "bf16", "new": new, "cached": cached, "ms": spread.median_s * 1e3,
                            "first ms": first * 1e3,
                            "TFLOP": flop / 1e12, "TFLOP/s": rate / 1e12, "of matmul": rate / card.matmul_flop_per_s,
                            "attention part of FLOP": num_layers * chunk.flop / flop})  # fmt: skip
            del chunk, step
    return results


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    precompile(warm, [False, True])
    found = crossover(card, True) + crossover(card, False)
    print_table(found)
    whole = whole_prefill(card)
    print_table(whole)
    save(args, "chunks", card, found + whole)


if __name__ == "__main__":
    main()
