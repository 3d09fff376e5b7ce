"""One run: empty the cache, warm up, measure, and put it all into one row of the report."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import Any, Protocol

from headstart.bench.details import details
from headstart.bench.errors import BenchError
from headstart.bench.load_generator import Asks, Pace, Phase, Stage, play
from headstart.bench.metrics import curve, samples, spread, summarize
from headstart.bench.records import Record
from headstart.bench.reuse import ReuseIndex
from headstart.bench.sanity_checks import impossible
from headstart.bench.workload import Piece, Session, TokenSource, Turn, Workload, stream_id
from headstart.core.clock import Clock

Row = dict[str, Any]
SHOWN_PROBLEMS = 5


class Measured(Protocol):
    """What Target does, as far as a run needs it: a server, or a simulated cluster."""

    @property
    def label(self) -> str: ...

    @property
    def backend(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    @property
    def client(self) -> Asks: ...

    async def flush(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Plan:
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
class Means:
    """What a run is made with, the same for all."""

    source: TokenSource
    clock: Clock
    as_text: bool = False
    on_record: Callable[[Record], None] = lambda record: None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    keeps_requests: bool = False  # in the row, one by one


async def measure(plan: Plan, target: Measured, means: Means) -> Row:
    """The run's row. Raises BenchError if a request fails or a value is impossible."""
    rng = Random(f"pace {plan.seed}")
    stage = Stage(target.client, means.source, ReuseIndex(), means.clock, means.sleep, means.as_text, means.on_record)
    await play([_first_breath(plan.seed)], Pace(), stage, rng)  # what a server does once, it does here
    flushed = await target.flush() if plan.flush else False
    closed = Pace(plan.pace.max_concurrency)
    cold = await play(plan.workload.warmup, closed, stage, rng)
    sample = await play(plan.workload.measured, plan.pace, stage, rng)
    refuse_untrue(cold, sample)
    requests = {"requests": details(cold, sample)} if means.keeps_requests else {}
    measured = {"flushed": flushed, "cold": _cold(cold), **summarize(sample), **_curves(sample)}
    return {**_heading(plan, target), **measured, **requests}


def refuse_untrue(*phases: Phase) -> None:
    """Raise BenchError naming the first few failed requests or impossible values."""
    problems = []
    for record in (record for phase in phases for record in phase.records):
        if record.is_complete:
            problems += impossible(record)
        else:
            reason = record.answer.error or "no token arrived"
            problems.append(f"{record.asked.session} turn {record.asked.turn + 1} failed: {reason}")
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        lines = problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        raise BenchError("this run cannot be used:\n  " + "\n  ".join(lines))


def _first_breath(seed: int) -> Session:
    return Session("first", (Turn((Piece(stream_id(seed, "first"), 0, 32),), 4),))


def _heading(plan: Plan, target: Measured) -> Row:
    return {
        "label": target.label,
        "commit": plan.commit,
        "backend": target.backend,
        "server": target.facts,
        "dataset_name": plan.workload.name,
        "options": plan.options,
        "seed": plan.seed,
        "prefix_share": plan.prefix_share,
        "max_concurrency": plan.pace.max_concurrency,
        "request_rate": plan.pace.request_rate if isfinite(plan.pace.request_rate) else "inf",  # JSON has no infinity
        "open_loop": plan.pace.open_loop,
    }


def _cold(phase: Phase) -> Row:
    """The excluded warm-up: its first turns met an empty cache."""
    ttfts = [record.ttft_s for record in phase.records if record.asked.turn == 0]
    times = {
        f"{name}_ttft_ms": 1e3 * value for name, value in spread(ttfts).items() if name in ("mean", "median", "max")
    }
    return {"num_requests": len(phase.records), "num_first_turns": len(ttfts), **times}


def _curves(phase: Phase) -> Row:
    values = samples(phase.records)
    return {"curves": {"ttft_ms": curve(values["ttft"]), "itl_ms": curve(values["itl"])}}
