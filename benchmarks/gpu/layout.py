"""What does a strided layer of the page-first pool cost, against one tensor for each layer?"""

from dataclasses import replace

from common import Card, Scene, Workload, arguments, compare, print_table, save, tiling_for

from headstart.attention.triton_attention import decode_tile


def main() -> None:
    args = arguments(__doc__, short=True)
    card = Card.measure(args.smoke)
    works = [
        Workload(rows, groups, 26_000, 2_340, page=page, fp8=fp8, layers=4)
        for page in (16, 64)
        for fp8 in (False, True)
        for rows, groups in (((37, 37), (128, 20)) if not args.short else ((128, 20),))
    ]
    if args.smoke:
        works = [works[0].small()]
    results = []
    for work in works:
        scene = Scene.lay_out(work, card.device)
        # Each layer as a pool of its own: the same pages, but nothing of other layers between them.
        apart = [replace(scene, work=replace(work, layers=1), pool=scene.pool[:, :, i : i + 1].contiguous())
                 for i in range(work.layers)]  # fmt: skip
        tile = decode_tile(work.heads, work.fp8)
        tiling = tiling_for(card, work, tile)
        singles = [one.decode(card, tile, tiling) for one in apart]

        def all_apart(singles=singles):
            for single in singles:
                single()

        strided = [replace(one, pool=scene.pool[:, :, i : i + 1]) for i, one in enumerate(apart)]
        views = [one.decode(card, tile, tiling) for one in strided]

        def all_views(views=views):
            for view in views:
                view()

        ms = {name: spread.median_s / work.layers * 1e3
              for name, spread in compare({"one tensor a layer": all_apart, "page-first": all_views}).items()}  # fmt: skip
        unique = scene.unique_tokens * work.token_bytes
        results.append({
            "rows": work.rows, "groups": work.groups, "page": work.page, "kv": "fp8" if work.fp8 else "bf16", **ms,
            "cost": ms["page-first"] / ms["one tensor a layer"] - 1,
            "of_copy": unique / ms["page-first"] * 1e3 / card.copy_bytes_per_s,
        })  # fmt: skip
    print_table(results)
    save(args, "layout", card, results)


if __name__ == "__main__":
    main()
