"""What matching one long prompt costs: 50,000 tokens, page 16 and 64, over paths of 1 to 3,125 tree nodes.

python benchmarks/radix_match.py [--json]
"""

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.kv.cache import PrefixCache

NUM_TOKENS = 50_000
VOCAB_SIZE = 128_000
GOALS_US = {64: 50.0, 16: 150.0}  # for paths of up to 10 nodes


@dataclass(frozen=True)
class Result:
    page_size: int
    num_nodes: int
    num_pages: int
    median_us: float
    p90_us: float
    goal_us: float | None


def forked_cache(page_size: int, num_nodes: int, prompt: Int32Array) -> PrefixCache:
    """A cache that holds `prompt` on a path of `num_nodes` nodes: another prompt forks off at each node's end."""
    num_pages = len(prompt) // page_size
    cache = PrefixCache(2 * num_pages + 2, page_size)
    insert(cache, prompt)
    for fork in np.linspace(0, num_pages, num_nodes + 1).astype(int)[1:-1]:
        other = prompt[: (fork + 1) * page_size].copy()
        other[fork * page_size] += 1
        insert(cache, other)
    cache.check()
    return cache


def insert(cache: PrefixCache, tokens: Int32Array) -> None:
    match = cache.match(b"", tokens)
    lease = cache.try_lease(match, len(tokens) // cache.page_size - match.num_pages)
    assert lease is not None
    cache.commit(lease, tokens, len(tokens))
    cache.release(lease)


def measure(page_size: int, num_nodes: int, repeats: int) -> Result:
    prompt = np.random.default_rng(0).integers(VOCAB_SIZE, size=NUM_TOKENS, dtype=np.int32)
    cache = forked_cache(page_size, num_nodes, prompt)
    times_us = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        match = cache.match(b"", prompt)
        times_us.append((time.perf_counter_ns() - start) / 1e3)
        assert match.num_pages == NUM_TOKENS // page_size
    goal = GOALS_US[page_size] if num_nodes <= 10 else None
    p90 = statistics.quantiles(times_us, n=10)[-1]
    return Result(page_size, num_nodes, NUM_TOKENS // page_size, statistics.median(times_us), p90, goal)


def machine() -> dict[str, str | int | None]:
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON with machine facts instead of a table")
    parser.add_argument("--repeats", type=int, default=300)
    args = parser.parse_args()
    results = [
        measure(page_size, num_nodes, args.repeats)
        for page_size in (16, 64)
        for num_nodes in (1, 10, 50, 200, NUM_TOKENS // page_size)
    ]
    if args.json:
        print(json.dumps({**machine(), "num_tokens": NUM_TOKENS, "results": [asdict(r) for r in results]}, indent=2))
        return
    print(f"match of {NUM_TOKENS:,} tokens, {args.repeats} repeats")
    print(f"{'page':>5} {'nodes':>6} {'pages':>6} {'median us':>10} {'p90 us':>8} {'goal us':>8}")
    for r in results:
        goal = "" if r.goal_us is None else f"{r.goal_us:.0f}"
        print(f"{r.page_size:>5} {r.num_nodes:>6} {r.num_pages:>6} {r.median_us:>10.1f} {r.p90_us:>8.1f} {goal:>8}")


if __name__ == "__main__":
    main()
