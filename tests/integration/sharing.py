"""Work for every worker of a cluster."""

from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from cluster import Cluster, until
from load import greedy, some

WORK = {"prefill": "calls", "decode": "output_tokens"}
"""The counter that tells of it."""


def serve_until_each_works(cluster: Cluster, names: list[str], seed: int) -> list[dict[str, Any]]:
    """Sixteen prompts at once, again and again: those of a slow client come one by one, and few workers are enough."""
    rng = Random(seed)
    answers: list[dict[str, Any]] = []

    def work() -> list[float]:
        cluster.settled()
        return [cluster.counter(name, WORK[name.partition("-")[0]]) for name in names]

    def each_works() -> bool:
        asked = [greedy(some(rng, 120), 16) for _ in range(16)]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers.extend(pool.map(lambda body: cluster.complete(**body), asked))
        return all(now > then for now, then in zip(work(), before, strict=True))

    before = work()
    until(each_works, f"work on each of {', '.join(names)}")
    return answers
