"""What part of the card's copy bandwidth does decode attention reach, counting each resident KV byte once?"""

from common import Card, Scene, Workload, arguments, compare, print_table, save, tiling_for, warm_arms

from headstart.attention.triton_attention import decode_tile


def arms_of(scene: Scene, card: Card) -> dict:
    work = scene.work
    if work.groups == work.rows:
        tile = decode_tile(work.heads, work.fp8)
        return {f"ungrouped, chunk {chunk}": scene.ungrouped(tile, chunk) for chunk in (2048, 4096)}
    tiles = {rows: decode_tile(work.heads, work.fp8, rows) for rows in (16, 32, 64) if rows >= 4 * work.group}
    return {
        f"grouped, {rows} rows": scene.decode(card, tile, tiling_for(card, work, tile)) for rows, tile in tiles.items()
    }


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    works = [
        Workload(rows, groups, 50_000, 4_675, group=group, fp8=fp8)
        for group in (2, 4, 8)
        for fp8 in (False, True)
        for rows, groups in ((37, 37), (128, 20))
    ]
    if args.smoke:
        works = [works[1].small()]
    warm_arms(arms_of, works, args.smoke)
    results = []
    for work in works:
        scene = Scene.lay_out(work, card.device)
        arms = arms_of(scene, card)
        unique = scene.unique_tokens * work.token_bytes * work.layers
        for name, spread in compare(arms).items():
            results.append({
                "rows": work.rows, "groups": work.groups, "g": work.group, "kv": "fp8" if work.fp8 else "bf16",
                "arm": name, "ms_layer": spread.median_s / work.layers * 1e3,
                "p10": spread.p10_s / work.layers * 1e3, "p90": spread.p90_s / work.layers * 1e3,
                "tb_per_s": unique / spread.median_s / 1e12,
                "of_copy": unique / spread.median_s / card.copy_bytes_per_s,
            })  # fmt: skip
    print_table(results)
    save(args, "bandwidth", card, results)


if __name__ == "__main__":
    main()
