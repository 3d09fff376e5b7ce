"""Which tile shape and chunk reads KV fastest? Sweeps the decode kernels; every other script uses what wins here."""

import itertools
from dataclasses import replace

from common import (
    NO_SHARING,
    Card,
    Scene,
    Spread,
    Workload,
    arguments,
    precompile,
    print_table,
    save,
    tiling_for,
    time_calls,
)

from headstart.attention.triton_attention import TileShape


def shapes(rows: int, fp8: bool) -> list[TileShape]:
    if fp8:
        grid = itertools.product((32, 64, 128), (1, 2, 4), (3, 4), (2, 3, 4, 5, 6))
    else:
        grid = itertools.product((64,), (2, 4) if rows < 64 else (4, 8), (3, 4), (2,))
    found = []
    for keys, warps, stages, programs in grid:
        smem = (stages - 1) * keys * (256 if fp8 else 512) + 12_000
        if 80_000 < smem * programs < 226_000 and 4 <= warps * programs <= 16:
            found.append(TileShape(rows, keys, warps, stages, programs))
    return found


def warm(job: tuple[Workload, TileShape]) -> None:
    work, tile = job
    small = replace(work, rows=2, groups=1, prefix=1024, private=100)
    card = Card("", "cuda", 2, 1, 1)
    Scene.lay_out(small, "cuda").decode(card, tile, tiling_for(card, small, tile))()


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    full = [
        (Workload(37, 37, 50_000, 4_675, fp8=fp8), (16,), NO_SHARING) for fp8 in (False, True)
    ] + [
        (Workload(128, 20, 50_000, 4_675, group=group, fp8=fp8), (16, 32) if group == 2 else (32, 64), 256)
        for group in (2, 4, 8) for fp8 in (False, True)
    ]  # fmt: skip
    cases = [(work, rows, share) for work, all_rows, share in full for rows in all_rows]
    if args.smoke:
        cases = [(cases[0][0].small(), 16, 256)]
    jobs = [(work, tile) for work, rows, _ in cases for tile in shapes(rows, work.fp8)]
    fits = dict.fromkeys(jobs, True) if args.smoke else dict(zip(jobs, precompile(warm, jobs), strict=True))
    results = []
    scenes: dict[Workload, Scene] = {}
    for work, rows, share in cases:
        if work not in scenes:
            scenes.clear()
            scenes[work] = Scene.lay_out(work, card.device)
        scene = scenes[work]
        tiles = [tile for tile in shapes(rows, work.fp8) if fits.get((work, tile))][: 1 if args.smoke else None]
        calls = [
            scene.decode(card, tile, tiling_for(card, work, tile, min_share=share, min_chunk=2048, max_chunk=2048))
            for tile in tiles
        ]
        unique = scene.unique_tokens * work.token_bytes * work.layers
        found = []
        for tile, times in zip(tiles, time_calls(calls, repeats=6, warmups=1), strict=True):
            spread = Spread.of(times)
            found.append({
                "rows": work.rows, "g": work.group, "kv": "fp8" if work.fp8 else "bf16", "MT": tile.rows,
                "BN": tile.keys, "warps": tile.warps, "stages": tile.stages, "per_sm": tile.programs_per_sm,
                "ms_layer": spread.median_s / work.layers * 1e3,
                "of_copy": unique / spread.median_s / card.copy_bytes_per_s,
            })  # fmt: skip
        found.sort(key=lambda row: -row["of_copy"])
        results += found
        print_table(found[:7])
    save(args, "tune", card, results)


if __name__ == "__main__":
    main()
