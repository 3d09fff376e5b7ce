"""What does the planned path cost where rows share nothing, against the plain kernel?"""

from common import Card, Scene, Workload, arguments, compare, print_table, save, tiling_for, warm_arms

from headstart.attention.triton_attention import decode_tile


def arms_of(scene: Scene, card: Card) -> dict:
    work = scene.work
    tile, wide = (decode_tile(work.heads, work.fp8, rows) for rows in (16, 32))
    return {f"plain {chunk}": scene.ungrouped(tile, chunk) for chunk in (512, 1024, 2048, 4096)} | {
        "planned": scene.decode(card, tile, tiling_for(card, work, tile)),
        "planned, 32 rows": scene.decode(card, wide, tiling_for(card, work, wide)),
    }


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    shapes = [(37, 54_675), (128, 16_384), (128, 4_096), (128, 1_024), (8, 32_768), (1, 54_675)]
    works = [Workload(rows, rows, 0, length, fp8=fp8) for rows, length in shapes for fp8 in (False, True)]
    if args.smoke:
        works = [works[0].small()]
    warm_arms(arms_of, works, args.smoke)
    results = []
    for work in works:
        scene = Scene.lay_out(work, card.device)
        arms = arms_of(scene, card)
        spreads = compare(arms)
        ms = {name: spread.median_s / work.layers * 1e3 for name, spread in spreads.items()}
        plain = min(value for name, value in ms.items() if name.startswith("plain"))
        results.append({
            "rows": work.rows, "length": work.private, "kv": "fp8" if work.fp8 else "bf16", **ms,
            "overhead": ms["planned"] / plain - 1,
        })  # fmt: skip
    print_table(results)
    save(args, "no_sharing", card, results)


if __name__ == "__main__":
    main()
