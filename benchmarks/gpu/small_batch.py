"""How long is attention of a few rows, by length of items and tile?"""

from dataclasses import replace

import torch
from common import Card, Scene, Spread, Workload, arguments, precompile, print_table, save, tiling_for, time_calls

from headstart.attention.triton_attention import TileShape, decode_tile

CASES = [
    (2, True, 1, 1_024), (2, True, 4, 1_024), (2, True, 8, 1_024), (2, True, 16, 1_024), (2, True, 32, 1_024),
    (2, True, 64, 1_024), (2, True, 1, 50_000), (2, True, 16, 50_000), (4, True, 1, 1_024), (4, True, 16, 1_024),
    (4, True, 1, 50_000), (2, False, 1, 1_024), (2, False, 16, 1_024), (2, False, 1, 50_000),
]  # fmt: skip
SHAPES = ((64, 4, 3, 4), (64, 4, 3, 2), (64, 2, 2, 4), (128, 4, 2, 2), (32, 2, 3, 4), (64, 1, 3, 4))


def enough_layers(tokens: int, fp8: bool) -> int:
    """So many that no layer's KV is still in the cache when its turn comes again."""
    return min(64, max(3, int(1.5e8 / (tokens * 2_048 * (1 if fp8 else 2)))))


def arms(work: Workload) -> dict[str, tuple[TileShape, dict[str, int]]]:
    """name -> tile, changes to the tiling."""
    tile = decode_tile(work.heads, work.fp8)
    shapes = [replace(tile, keys=k, warps=w, stages=s, programs_per_sm=p) for k, w, s, p in SHAPES]
    tilings: dict[str, dict[str, int]] = {"chosen": {}}
    if work.prefix + work.private <= 10_000:
        tilings |= {str(chunk): {"min_chunk": chunk, "max_chunk": chunk} for chunk in (64, 128, 256, 512, 1024)}
    result = {name: (tile, changes) for name, changes in tilings.items()}
    for shape in shapes:
        label = f"k{shape.keys}w{shape.warps}s{shape.stages}p{shape.programs_per_sm}"
        result |= {f"{name} {label}": (shape, changes) for name, changes in tilings.items()}
    return result


def warm(job: tuple[Workload, TileShape]) -> None:
    work, tile = job
    Scene.lay_out(work, "cuda").decode(CARD, tile, tiling_for(CARD, work, tile))()


CARD = Card("", "cuda", 132, 1, 1)


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    works = [
        Workload(rows, rows, 0, length, group=group, fp8=fp8, layers=enough_layers(rows * length, fp8))
        for group, fp8, rows, length in CASES
    ]
    if args.smoke:
        works = [Workload(2, 2, 0, 70, kv_heads=2, head_dim=64, page=16, layers=1, fp8=True)]
    kinds = {replace(work, rows=2, groups=2, private=700, layers=1): work for work in works}
    jobs = list({(kind, tile) for kind, work in kinds.items() for tile, _ in arms(work).values()})
    if not args.smoke:
        precompile(warm, jobs)
    results = []
    for work in works:
        scene = Scene.lay_out(work, card.device)
        calls = {
            name: scene.decode(card, tile, tiling_for(card, work, tile, **changes))
            for name, (tile, changes) in arms(work).items()
        }
        row = {"rows": work.rows, "length": work.private, "g": work.group, "kv": "fp8" if work.fp8 else "bf16"}
        times = time_calls(list(calls.values()), repeats=10, warmups=2)
        us = {name: Spread.of(t).median_s / work.layers * 1e6 for name, t in zip(calls, times, strict=True)}
        ranked = sorted(us, key=lambda name: us[name])
        ideal = scene.unique_tokens * work.token_bytes / card.copy_bytes_per_s * 1e6
        results.append(row | {"ideal us": ideal, "chosen": us["chosen"], "best": us[ranked[0]],
                              "ranking": "; ".join(f"{name} {us[name]:.1f}" for name in ranked[:6]), "us": us})  # fmt: skip
        del scene, calls
        if card.device == "cuda":
            torch.cuda.empty_cache()
    print_table([{key: value for key, value in row.items() if key != "us"} for row in results])
    save(args, "small_batch", card, results)


if __name__ == "__main__":
    main()
