"""What the workers of a simulated cluster did during a run, sampled at equal steps of virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.bench.errors import BenchError
from headstart.core.messages import WorkerLoad
from headstart.sim.cluster import SimCluster

FIRST_STEP_S = 0.01
MOST_LOOKS = 8_000
"""Samples times workers: with more, every other sample is dropped and the step doubles."""
MOST_SAMPLES = (64, 512)
"""How many samples that are: 64 of however many workers, 512 of however few."""

MOST_LINES = 16
"""Of one role in a table."""


class Look(NamedTuple):
    """One worker at one time: how it stands, and what it has done since it started."""

    running: float
    waiting: float
    pool_usage: float
    prompt_tokens: float
    hit_tokens: float
    pages_moved: float
    retractions: float
    steps: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Sample:
    """`looks` [num_workers, fields of Look]."""

    at_s: float
    looks: NDArray[np.float64]


class Watch:
    """Looks at every worker from its start on. Workers are those that live then; they must live to the end."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._names = tuple(cluster.workers)
        self._seen = [-1] * len(self._names)  # changes of each worker, at the last look at it
        self._looks = np.zeros((len(self._names), len(Look._fields)))
        self._step_s = FIRST_STEP_S
        self._samples: list[Sample] = []

    def start(self) -> None:
        self._look()

    def between(self, began_s: float, ended_s: float) -> list[dict[str, Any]]:
        """One row for each worker about that time. Ends the sample with a look at the workers now. Raises BenchError where
        one has been lost."""
        self._take()
        seen = [sample for sample in self._samples if began_s <= sample.at_s <= ended_s]
        earlier = [sample for sample in self._samples if sample.at_s <= began_s][-1:] or seen[:1]
        looks = np.stack([sample.looks for sample in seen])
        gained = seen[-1].looks - earlier[0].looks
        return [row_of(name, looks[:, index], Look(*gained[index])) for index, name in enumerate(self._names)]

    def _look(self) -> None:
        self._take()
        of_many, of_few = MOST_SAMPLES
        if len(self._samples) > min(max(MOST_LOOKS // len(self._names), of_many), of_few):
            self._samples = self._samples[::2]
            self._step_s *= 2
        self._cluster.at(self._cluster.clock.now() + self._step_s, self._look)

    def _take(self) -> None:
        """A worker in which nothing has changed looks as before."""
        for index, name in enumerate(self._names):
            worker = self._cluster.workers.get(name)
            if worker is None:
                raise BenchError(
                    f"the link is too slow for this load: {name} was ended for writes past their deadlines"
                )
            worker.catch_up()
            if worker.num_changes != self._seen[index]:
                self._seen[index] = worker.num_changes
                self._looks[index] = look_of(worker.load())
        self._samples.append(Sample(self._cluster.clock.now(), self._looks.copy()))


def look_of(load: WorkerLoad) -> Look:
    """`pool_usage` is the share of the pool that is neither free nor evictable: what SGLang logs as token_usage."""
    count = load.counters.get
    return Look(
        running=load.num_running,
        waiting=load.num_waiting,
        pool_usage=load.used_pages / load.pool_pages,
        prompt_tokens=count("prompt_tokens", 0),
        hit_tokens=count("hit_tokens", 0),
        pages_moved=count("pages_moved", 0) + count("pages_posted", 0),
        retractions=count("retractions", 0),
        steps=count("steps", 0),
        output_tokens=count("output_tokens", 0),
    )


def row_of(name: str, looks: NDArray[np.float64], gained: Look) -> dict[str, Any]:
    """`looks` [num_samples, fields of Look]."""
    return {
        "worker": name,
        "num_samples": len(looks),
        "running": _spread(looks[:, Look._fields.index("running")]),
        "waiting": _spread(looks[:, Look._fields.index("waiting")]),
        "pool_usage": _spread(looks[:, Look._fields.index("pool_usage")]),
        "hit_rate": gained.hit_tokens / gained.prompt_tokens if gained.prompt_tokens else None,
        "retractions": int(gained.retractions),
        "pages_moved": int(gained.pages_moved),
        "steps": int(gained.steps),
        "rows_per_step": gained.output_tokens / gained.steps if gained.steps else None,
    }


def workers_table(workers: Sequence[dict[str, Any]]) -> str:
    """A line for each worker's row, or for all of a role where there are many."""
    lines = [
        f"{'worker':<12} {'running: mean':>13} {'max':>5} {'waiting':>8} {'pool: mean':>10} {'max':>6} {'hits':>6} "
        f"{'retracted':>9} {'pages moved':>11}"
    ]
    roles: dict[str, list[dict[str, Any]]] = {}
    for worker in workers:
        roles.setdefault(worker["worker"].rpartition("-")[0], []).append(worker)
    for role, members in roles.items():
        shown = members if len(members) <= MOST_LINES else [_together(f"{role} x {len(members)}", members)]
        lines += [_line(worker) for worker in shown]
    return "\n".join(lines)


def _line(worker: dict[str, Any]) -> str:
    running, usage, hits = worker["running"], worker["pool_usage"], worker["hit_rate"]
    return (
        f"{worker['worker']:<12} {running['mean']:>13.1f} {running['max']:>5.0f} {worker['waiting']['mean']:>8.1f} "
        f"{usage['mean']:>10.3f} {usage['max']:>6.3f} {'-' if hits is None else f'{hits:.3f}':>6} "
        f"{worker['retractions']:>9} {worker['pages_moved']:>11}"
    )


def _together(name: str, workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of means, the highest of the highest, sums of counts; of hit rates the mean over those that have one."""
    hits = [worker["hit_rate"] for worker in workers if worker["hit_rate"] is not None]
    row: dict[str, Any] = {"worker": name, "hit_rate": fmean(hits) if hits else None}
    for key in ("running", "waiting", "pool_usage"):
        row[key] = {"mean": fmean(w[key]["mean"] for w in workers), "max": max(w[key]["max"] for w in workers)}
    for key in ("retractions", "pages_moved"):
        row[key] = sum(worker[key] for worker in workers)
    return row


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "median": float(np.median(values)), "max": float(values.max())}
