"""One run: empty the cache, warm up, measure, and put it all into one row of the report."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import Any, Protocol

from headstart.bench.details import details
from headstart.bench.errors import BenchError
from headstart.bench.load_generator import LoadClient, LoadEnvironment, LoadResult, Pace, play
from headstart.bench.metrics import curve, samples, spread, summarize
from headstart.bench.records import RequestRecord
from headstart.bench.reuse import ReuseIndex
from headstart.bench.sanity_checks import impossible
from headstart.bench.workload import Session, TokenSource, TokenSpan, Turn, Workload, stream_id
from headstart.core.clock import Clock

ReportRow = dict[str, Any]
SHOWN_PROBLEMS = 5


class BenchTarget(Protocol):
    """What ServerTarget does, as far as a run needs it: a server, or a simulated cluster."""

    @property
    def label(self) -> str: ...

    @property
    def backend(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    @property
    def client(self) -> LoadClient: ...

    async def flush(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What one run is. `options` describe the workload in the report, apart from its seed."""

    workload: Workload
    options: dict[str, Any]
    pace: Pace
    seed: int
    prefix_share: float | None = None
    flush: bool = True
    commit: str = ""
    """Of the code that measures. Stamped on each run, since a report may gather runs of several."""


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """What a run is made with, the same for all."""

    source: TokenSource
    clock: Clock
    as_text: bool = False
    on_record: Callable[[RequestRecord], None] = lambda record: None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    keeps_requests: bool = False  # in the row, one by one


async def measure(run_spec: RunSpec, target: BenchTarget, run_env: RunEnvironment) -> ReportRow:
    """The run's row. Raises BenchError if a request fails or a value is impossible."""
    rng = Random(f"pace {run_spec.seed}")
    load_env = LoadEnvironment(
        target.client, run_env.source, ReuseIndex(), run_env.clock, run_env.sleep, run_env.as_text, run_env.on_record
    )
    await play([_first_request(run_spec.seed)], Pace(), load_env, rng)  # what a server does once, it does here
    flushed = await target.flush() if run_spec.flush else False
    closed = Pace(run_spec.pace.max_concurrency)
    cold = await play(run_spec.workload.warmup, closed, load_env, rng)
    sample = await play(run_spec.workload.measured, run_spec.pace, load_env, rng)
    refuse_impossible(cold, sample)
    requests = {"requests": details(cold, sample)} if run_env.keeps_requests else {}
    measured = {"flushed": flushed, "cold": _cold(cold), **summarize(sample), **_curves(sample)}
    return {**_heading(run_spec, target), **measured, **requests}


def refuse_impossible(*phases: LoadResult) -> None:
    """Raise BenchError naming the first few failed requests or impossible values."""
    problems = []
    for record in (record for phase in phases for record in phase.records):
        if record.is_complete:
            problems += impossible(record)
        else:
            reason = record.answer.error or "no token arrived"
            problems.append(f"{record.request.session} turn {record.request.turn + 1} failed: {reason}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        lines = problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise BenchError("this run cannot be used:\n  " + "\n  ".join(lines))


def _first_request(seed: int) -> Session:
    return Session("first", (Turn((TokenSpan(stream_id(seed, "first"), 0, 32),), 4),))


def _heading(run_spec: RunSpec, target: BenchTarget) -> ReportRow:
    pace = run_spec.pace
    return {
        "label": target.label,
        "commit": run_spec.commit,
        "backend": target.backend,
        "server": target.facts,
        "dataset_name": run_spec.workload.name,
        "options": run_spec.options,
        "seed": run_spec.seed,
        "prefix_share": run_spec.prefix_share,
        "max_concurrency": pace.max_concurrency,
        "request_rate": pace.request_rate if isfinite(pace.request_rate) else "inf",  # JSON has no infinity
        "open_loop": pace.open_loop,
    }


def _cold(phase: LoadResult) -> ReportRow:
    """The excluded warm-up: its first turns met an empty cache."""
    ttfts = [record.ttft_s for record in phase.records if record.request.turn == 0]
    times = {
        f"{name}_ttft_ms": 1e3 * value for name, value in spread(ttfts).items() if name in ("mean", "median", "max")
    }
    return {"num_requests": len(phase.records), "num_first_turns": len(ttfts), **times}


def _curves(phase: LoadResult) -> ReportRow:
    values = samples(phase.records)
    return {"curves": {"ttft_ms": curve(values["ttft"]), "itl_ms": curve(values["itl"])}}
