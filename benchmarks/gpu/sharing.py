"""How much faster is it to read a shared prefix once? Against the best arm that reads it for every row."""

from common import NO_SHARING, Card, Scene, Workload, arguments, compare, print_table, save, tiling_for, warm_arms

from headstart.attention.triton_attention import TileShape, decode_tile, fitting_rows


def tile_for(work: Workload) -> TileShape:
    return decode_tile(work.heads, work.fp8, fitting_rows(work.heads, work.fp8, work.rows / work.groups))


def arms_of(scene: Scene, card: Card) -> dict:
    work, tile, plain = scene.work, tile_for(scene.work), decode_tile(scene.work.heads, scene.work.fp8)
    siblings = tiling_for(card, work, plain, q_tile=1)
    return {
        "plain 2048": scene.ungrouped(plain, 2048),
        "plain 4096": scene.ungrouped(plain, 4096),
        "queue": scene.decode(card, plain, tiling_for(card, work, plain, min_share=NO_SHARING)),
        "siblings side by side": scene.decode(card, plain, siblings),
        "grouped": scene.decode(card, tile, tiling_for(card, work, tile)),
        "grouped, exact": scene.decode(card, tile, tiling_for(card, work, tile, deterministic=True)),
        "queue, exact": scene.decode(
            card, tile, tiling_for(card, work, tile, deterministic=True, min_share=NO_SHARING)
        ),
    }


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    works = [Workload(128, 20, 50_000, 4_675, group=group, fp8=fp8) for group in (2, 4, 8) for fp8 in (False, True)]
    works += [Workload(128, groups, prefix, private) for groups, prefix, private in (
        (1, 50_000, 4_675), (64, 50_000, 4_675), (20, 8_192, 2_048), (1, 2_048, 2_048), (1, 2_048, 8_192),
        (20, 1_024, 1_024), (20, 512, 1_024), (20, 256, 1_024), (20, 16_384, 64),
    )]  # fmt: skip
    works += [Workload(32, 5, 50_000, 4_675), Workload(8, 2, 50_000, 4_675), Workload(256, 20, 16_384, 1_024)]
    if args.smoke:
        works = [works[0].small()]
    warm_arms(arms_of, works, args.smoke)
    results = []
    for work in works:
        scene = Scene.lay_out(work, card.device)
        spreads = compare(arms_of(scene, card), repeats=20)
        ms = {name: spread.median_s / work.layers * 1e3 for name, spread in spreads.items()}
        per_row = min(ms["plain 2048"], ms["plain 4096"], ms["queue"])
        unique = scene.unique_tokens * work.token_bytes
        results.append({
            "rows": work.rows, "groups": work.groups, "prefix": work.prefix, "private": work.private, "g": work.group,
            "kv": "fp8" if work.fp8 else "bf16", **ms, "x_best_per_row": per_row / ms["grouped"],
            "x_siblings": ms["siblings side by side"] / ms["grouped"],
            "ideal": int(scene.kv_lens.sum()) / scene.unique_tokens,
            "of_copy": unique / ms["grouped"] * 1e3 / card.copy_bytes_per_s,
        })  # fmt: skip
    print_table(results)
    save(args, "sharing", card, results)


if __name__ == "__main__":
    main()
