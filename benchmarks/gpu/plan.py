"""What does a plan cost on the host? From nothing, after a change of rows, when it is kept, and its upload."""

import time

import numpy as np
import torch
from common import Card, Workload, arguments, print_table, save

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import Planner, Tiling, build_plan
from headstart.attention.segments import PrefixOrder


def tables_of(work: Workload) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    prefix = work.prefix // work.page
    kv_lens = prefix * work.page + work.private + rng.integers(-400, 400, work.rows)
    own = -(-kv_lens // work.page) - prefix
    ids = rng.permutation(work.groups * prefix + int(own.sum())).astype(np.int32)
    shared = ids[: work.groups * prefix].reshape(work.groups, prefix)
    ends = work.groups * prefix + np.cumsum(own)
    spans = enumerate(zip(ends, own, strict=True))
    return [np.concatenate([shared[r % work.groups], ids[end - n : end]]) for r, (end, n) in spans], kv_lens


def median_us(call, repeats: int = 300) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    results = []
    for rows, groups, page, chunk in [
        (37, 37, 64, 2048), (128, 20, 64, 2048), (128, 20, 64, 4096), (128, 20, 16, 2048), (128, 128, 64, 2048),
        (256, 20, 64, 2048), (512, 40, 64, 4096),
    ]:  # fmt: skip
        work = Workload(rows, groups, 50_000, 4_675, page=page)
        tables, kv_lens = tables_of(work)
        tiling = Tiling(page, 8, min_chunk=chunk, max_chunk=chunk, max_slots=1 << 16, wave_items=33)
        ones = np.ones(rows, np.int64)
        prefixes = PrefixOrder()
        plan = build_plan(tables, kv_lens - 1, ones, tiling, prefixes)
        planner = Planner(tiling)
        planned = list(tables)
        planner.plan(planned, kv_lens)
        device_plan = DevicePlan(rows, len(plan.items), card.device)
        rng = np.random.default_rng(1)

        def change(tables=tables, kv_lens=kv_lens, tiling=tiling, ones=ones, prefixes=prefixes, rng=rng, rows=rows):
            """One row leaves and another joins on the same prefix; six have grown by a page."""
            joined, *grown = rng.integers(rows, size=7)
            tables[joined] = np.append(tables[joined][:-1], np.int32(rng.integers(1 << 30)))
            for row in grown:
                tables[row] = np.append(tables[row], np.int32(rng.integers(1 << 30)))
            start = time.perf_counter()
            build_plan(tables, kv_lens - 1, ones, tiling, prefixes)
            return time.perf_counter() - start

        def upload(plan=plan, device_plan=device_plan):
            device_plan.upload(plan)
            if card.device == "cuda":
                torch.cuda.synchronize()

        results.append({
            "rows": rows, "groups": groups, "page": page, "chunk": plan.chunk, "items": len(plan.items),
            "slots": plan.num_slots,
            "from_nothing_us": median_us(lambda t=planned, k=kv_lens: build_plan(t, k - 1, np.ones(len(t), np.int64), tiling)),  # noqa: B023
            "change_us": float(np.median([change() for _ in range(300)])) * 1e6,
            "kept_us": median_us(lambda p=planner, t=planned, k=kv_lens: p.plan(t, k)),
            "upload_us": median_us(upload),
        })  # fmt: skip
    print_table(results)
    save(args, "plan", card, results)


if __name__ == "__main__":
    main()
