"""How long is attention of a few rows: in one launch a layer or two, by length of items and tile?"""

from dataclasses import replace

import torch
from common import Card, Scene, Spread, Workload, arguments, precompile, print_table, save, tiling_for, time_calls

from headstart.attention.triton_attention import TileShape, decode_tile

CASES = [(1, 1_024), (4, 1_024), (16, 1_024), (32, 1_024), (64, 1_024), (1, 50_000), (16, 50_000)]


def enough_layers(tokens: int, fp8: bool) -> int:
    """So many that no layer's KV is still in the cache when its turn comes again."""
    return min(64, max(3, int(1.5e8 / (tokens * 2_048 * (1 if fp8 else 2)))))


def arms(work: Workload, smoke: bool) -> dict[str, tuple[TileShape, dict[str, int], bool]]:
    """name -> tile, changes to the tiling, in one launch?"""
    tile = decode_tile(work.heads, work.fp8)
    result: dict[str, tuple[TileShape, dict[str, int], bool]] = {"two, 256": (tile, {"min_chunk": 256}, False)}
    if work.rows <= 4:
        result["two, 64"] = (tile, {"min_chunk": 64}, False)
    for warps in (2, 4):
        for chunk in (64, 128, 256):
            shape = replace(tile, warps=warps)
            result[f"one, {chunk} w{warps}"] = (shape, {"min_chunk": chunk}, True)
    if work.prefix + work.private < 10_000:
        for chunk in (512, 1024, 2048):
            result[f"one, only {chunk}"] = (tile, {"min_chunk": chunk, "max_chunk": chunk}, True)
    return result


def warm(job: tuple[Workload, TileShape, bool]) -> None:
    work, tile, one = job
    small = replace(work, rows=2, groups=2, prefix=0, private=700, layers=1)
    Scene.lay_out(small, "cuda").decode(Card("", "cuda", 132, 1, 1), tile, tiling_for(CARD, small, tile), one)()


CARD = Card("", "cuda", 132, 1, 1)


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    works = [
        Workload(rows, rows, 0, length, group=group, fp8=fp8, layers=enough_layers(rows * length, fp8))
        for group in (2, 4)
        for fp8 in (True, False)
        for rows, length in CASES
    ]
    if args.smoke:
        works = [Workload(2, 2, 0, 70, kv_heads=2, head_dim=64, page=16, layers=1, fp8=True)]
    jobs = list(
        {
            (replace(w, rows=1, private=0, layers=1), tile, one)
            for w in works
            for tile, _, one in arms(w, args.smoke).values()
        }
    )
    if not args.smoke:
        precompile(warm, jobs)
    results = []
    for work in works:
        scene = Scene.lay_out(work, card.device)
        calls = {
            name: scene.decode(card, tile, tiling_for(card, work, tile, **changes), one)
            for name, (tile, changes, one) in arms(work, args.smoke).items()
        }
        row = {"rows": work.rows, "length": work.private, "g": work.group, "kv": "fp8" if work.fp8 else "bf16"}
        times = time_calls(list(calls.values()), repeats=10, warmups=2)
        us = {name: Spread.of(t).median_s / work.layers * 1e6 for name, t in zip(calls, times, strict=True)}
        ranked = sorted(us, key=lambda name: us[name])
        ideal = scene.unique_tokens * work.token_bytes / card.copy_bytes_per_s * 1e6
        results.append(row | {"ideal us": ideal, "two, 256": us["two, 256"], "best us": us[ranked[0]],
                              "ranking": "; ".join(f"{name} {us[name]:.1f}" for name in ranked[:6]), "us": us})  # fmt: skip
        del scene, calls
        if card.device == "cuda":
            torch.cuda.empty_cache()
    print_table([{key: value for key, value in row.items() if key != "us"} for row in results])
    save(args, "small_batch", card, results)


if __name__ == "__main__":
    main()
