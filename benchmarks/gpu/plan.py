"""What does a plan cost on the host: from nothing, after a change of rows, when it is kept? And its upload?

Plans are timed by the CPU time of the thread, so that other load on the machine weighs less; uploads by the clock.
"""

import time
from collections.abc import Callable

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


class Batch:
    """Decode rows that join, leave and grow; every plan is timed in microseconds."""

    def __init__(self, work: Workload, tiling: Tiling) -> None:
        self.tables, self.kv_lens = tables_of(work)
        self.tiling = tiling
        self.prefixes = PrefixOrder()
        self.rng = np.random.default_rng(1)
        self.plan_us(self.prefixes)

    def plan_us(self, prefixes: PrefixOrder | None) -> float:
        start = time.thread_time()
        build_plan(self.tables, self.kv_lens - 1, np.ones(len(self.tables), np.int64), self.tiling, prefixes)
        return (time.thread_time() - start) * 1e6

    def leave_and_join(self) -> tuple[float, float]:
        """One row leaves, then another joins on the same prefix."""
        leaving = int(self.rng.integers(len(self.tables)))
        table, kv_len = self.tables.pop(leaving), self.kv_lens[leaving]
        self.kv_lens = np.delete(self.kv_lens, leaving)
        leave_us = self.plan_us(self.prefixes)
        self.tables.append(np.append(table[:-1], self._fresh_page()))
        self.kv_lens = np.append(self.kv_lens, kv_len)
        return leave_us, self.plan_us(self.prefixes)

    def grow_six(self) -> float:
        """Six rows have a page more."""
        for row in self.rng.choice(len(self.tables), 6, replace=False):
            self.tables[row] = np.append(self.tables[row], self._fresh_page())
            self.kv_lens[row] += self.tiling.page_size
        return self.plan_us(self.prefixes)

    def _fresh_page(self) -> np.int32:
        return np.int32(self.rng.integers(1 << 30))


def median_us(call: Callable[[], object], clock: Callable[[], float], repeats: int = 300) -> float:
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return float(np.median(times)) * 1e6


def upload_us(batch: Batch, card: Card) -> float:
    plan = build_plan(batch.tables, batch.kv_lens - 1, np.ones(len(batch.tables), np.int64), batch.tiling)
    device_plan = DevicePlan(len(batch.tables), len(plan.items), card.device)

    def upload() -> None:
        device_plan.upload(plan)
        if card.device == "cuda":
            torch.cuda.synchronize()

    return median_us(upload, time.perf_counter)


def costs(work: Workload, chunk: int, card: Card) -> dict[str, int | float]:
    tiling = Tiling(work.page, 8, min_chunk=chunk, max_chunk=chunk, max_slots=1 << 16, wave_items=33)
    batch = Batch(work, tiling)
    planner = Planner(tiling)
    plan = planner.plan(batch.tables, batch.kv_lens)
    kept_us = median_us(lambda: planner.plan(batch.tables, batch.kv_lens), time.thread_time)
    leaves, joins = zip(*(batch.leave_and_join() for _ in range(150)), strict=True)
    return {
        "rows": work.rows,
        "groups": work.groups,
        "page": work.page,
        "chunk": plan.chunk,
        "items": len(plan.items),
        "slots": plan.num_slots,
        "from_nothing_us": float(np.median([batch.plan_us(None) for _ in range(150)])),
        "join_us": float(np.median(joins)),
        "leave_us": float(np.median(leaves)),
        "six_grown_us": float(np.median([batch.grow_six() for _ in range(150)])),
        "kept_us": kept_us,
        "upload_us": upload_us(batch, card),
    }


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    shapes = [
        (37, 37, 64, 2048), (128, 20, 64, 2048), (128, 20, 64, 4096), (128, 20, 16, 2048), (128, 128, 64, 2048),
        (256, 20, 64, 2048), (512, 40, 64, 4096),
    ]  # fmt: skip
    results = [
        costs(Workload(rows, groups, 50_000, 4_675, page=page), chunk, card)
        for rows, groups, page, chunk in (shapes[:2] if args.smoke else shapes)
    ]
    print_table(results)
    save(args, "plan", card, results)


if __name__ == "__main__":
    main()
