"""How near to the weights' bandwidth are a decoder's products at few rows: the library's GEMM, and ours for few rows?

Every shape of Qwen3-1.7B and 8B, the head included. Weights take turns, so that none is found in the cache.
"""

from functools import partial

import torch
from common import Card, Spread, arguments, in_graph, precompile, print_table, save, time_calls

from headstart.model.small_linear import MAX_ROWS, LinearTile, small_linear

SHAPES = {
    "1.7B qkv": (4096, 2048), "1.7B o": (2048, 2048), "1.7B gate_up": (12288, 2048), "1.7B down": (2048, 6144),
    "1.7B head": (151_936, 2048), "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288), "8B head": (151_936, 4096),
}  # fmt: skip
TILES = [
    LinearTile(outputs, inputs, warps, stages)
    for outputs, inputs, warps, stages in (
        (16, 256, 4, 4), (16, 512, 4, 3), (16, 256, 2, 6), (32, 128, 4, 4), (32, 256, 4, 3), (32, 256, 4, 4),
        (64, 128, 4, 4), (64, 256, 4, 3), (16, 512, 8, 4), (32, 256, 8, 5),
    )
]  # fmt: skip
ROWS = (1, 16, 128)


def products(shape: tuple[int, int], rows: int, tile: LinearTile | None, gated: bool, copies: int):
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 50 for _ in range(copies)]
    x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    if tile is None:
        return in_graph(lambda: [torch.nn.functional.linear(x, weight) for weight in weights])
    return in_graph(lambda: [small_linear(x, weight, None, tile, gated) for weight in weights])


def warm(job: tuple[tuple[int, int], LinearTile, bool]) -> None:
    shape, tile, gated = job
    products(shape, 1, tile, gated, 1)()


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    jobs = [(shape, tile, "gate" in name) for name, shape in SHAPES.items() for tile in TILES]
    fits = dict(zip(jobs, precompile(warm, jobs), strict=True))
    results = []
    for name, shape in SHAPES.items():
        gated = "gate" in name
        num_bytes = 2 * shape[0] * shape[1]
        copies = max(2, int(3e8 / num_bytes) + 1)
        for rows in ROWS:
            calls = {"library": products(shape, rows, None, False, copies)}
            for tile in TILES if rows <= MAX_ROWS else []:
                if fits[(shape, tile, gated)]:
                    label = f"{tile.outputs}x{tile.inputs} w{tile.warps} s{tile.stages}"
                    calls[label] = products(shape, rows, tile, gated, copies)
            times = {
                label: Spread.of(spread).median_s / copies
                for label, spread in zip(calls, time_calls(list(calls.values()), repeats=10, warmups=2), strict=True)
            }
            best = min(times, key=lambda label: times[label])
            rate = partial(lambda seconds, total: total / seconds / card.copy_bytes_per_s, total=num_bytes)
            results.append({
                "product": name, "rows": rows, "library us": times["library"] * 1e6, "of copy": rate(times["library"]),
                "best us": times[best] * 1e6, "best of copy": rate(times[best]), "best": best,
                "second": ", ".join(f"{label} {times[label] * 1e6:.1f}" for label in sorted(times, key=times.get)[1:3]),  # type: ignore[arg-type]
            })  # fmt: skip
            del calls
        torch.cuda.empty_cache()
    print_table(results)
    save(args, "gemm", card, results)


if __name__ == "__main__":
    main()
