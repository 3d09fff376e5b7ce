"""Two published tables out of the simulator: baseline, decode cache, and what prefix-shared decode attention would give.

python benchmarks/source_tables.py sglang-19746 [--vary] [--requests N] [--json FILE]
python benchmarks/source_tables.py sglang-22234

Prints Markdown, the same for the same arguments. What is put in: lengths, limits, sizes and rates of data sheets, and how
fast the decode kernels were (see `kernel_share`). What comes out: residency, throughput and latencies, with the error of
each published cell. --vary repeats the first two rows with one assumption changed at a time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published import SOURCES, Observed, Source

from headstart.bench.load_generator import Pace
from headstart.bench.measure import RunSpec
from headstart.bench.workload import TokenSource, Workload
from headstart.plan.cost import CostModel
from headstart.plan.deployment import deployment_of
from headstart.plan.gpu_specs import card_named
from headstart.plan.models import model_named
from headstart.plan.options import ClusterOptions, CostOptions, DeploymentOptions, SheetOptions
from headstart.plan.roofline import Assumptions, sheet_model
from headstart.plan.simulate_command import simulated_row
from headstart.sim.cost import StepShape

Row = dict[str, Any]

SEED = 42
TOKENS = TokenSource(1_000, 30_000)
MEM_FRACTION = 0.9
LARGE = 0.1
"""Errors above this are followed to the assumption that carries them."""
SLOW_PREFILL = 0.2
"""Of the arithmetic rate: a long cold start, as #19746's times to first token suggest."""
LABELS = {
    "request_throughput": "requests/s",
    "input_throughput": "input tokens/s",
    "output_throughput": "output tokens/s",
    "max_output_tokens_per_s": "peak output tokens/s",
    "total_input_tokens": "input tokens",
    "total_output_tokens": "output tokens",
    "duration": "duration (s)",
    "concurrency": "concurrency",
    "mean_tpot_ms": "TPOT mean (ms)",
}


@dataclass(frozen=True)
class Assumed:
    """What is put in besides the source's own numbers."""

    kernel_share: float
    """Of the memory's rate, when decode reads weights and KV."""
    compute_share: float | None = None
    """Of the arithmetic rate, in prefill. None: what large matrix products reach."""
    card_bytes: float | None = None
    """None: what the driver reports."""


@dataclass(frozen=True)
class Case:
    name: str
    assumed: Assumed
    caches_on_decode: bool
    prefix_shared: bool
    observed: Observed | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("--vary", action="store_true", help="also with one assumption changed at a time")
    parser.add_argument("--requests", type=int, default=0, help="only the first so many: a trial of the command itself")
    parser.add_argument("--json", help="write every row to this file")
    arguments = parser.parse_args()
    source = SOURCES[arguments.source]
    rows: dict[str, Row] = {}
    for case in cases(source):
        print(f"simulating: {case.name}", file=sys.stderr)
        rows[case.name] = simulated(source, case, arguments.requests)
    print("\n".join(table(source, rows)), flush=True)
    if arguments.vary:
        for case in cases(source):
            if case.observed is not None:
                print("\n".join(varied(source, case, rows[case.name], arguments.requests)), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


def cases(source: Source) -> list[Case]:
    """The two published rows with the kernels they had, then sharing with such kernels, and at the data sheet's rates."""
    base, cache = (kernel_share(source, observed) for observed in (source.baseline, source.decode_cache))
    return [
        Case("baseline", Assumed(base), False, False, source.baseline),
        Case("decode cache", Assumed(cache), True, False, source.decode_cache),
        Case("prefix-shared decode, their kernels", Assumed(cache), True, True),
        Case("prefix-shared decode, at the bound", Assumed(1.0), True, True),
    ]


def kernel_share(source: Source, observed: Observed) -> float:
    """The share of the memory's rate that explains the measured ITL at the measured batch, every row reading all of its
    context."""
    bound = bound_model(source, prefix_shared=False)
    fixed_s = bound.decode.fixed_s
    return (step_bound_s(source, bound, observed.running) - fixed_s) / (observed.itl_ms / 1e3 - fixed_s)


def bound_model(source: Source, *, prefix_shared: bool) -> CostModel:
    """Steps at the data sheet's rates. All-reduces alone are not free."""
    ideal = Assumptions(bandwidth_share=1.0, flops_share=1.0, step_overhead_s=0.0, request_overhead_s=0.0)
    return sheet_model(card_named(source.card), model_named(source.model), source.sharding, ideal, prefix_shared)


def step_bound_s(source: Source, costs: CostModel, running: float) -> float:
    """Seconds of a decode step of so many requests."""
    rows = round(running)
    each, unique = (round(source.load.read_tokens(running, shared=shared)) for shared in (False, True))
    return costs.decode_time(StepShape(rows, rows, each, unique, each))


def simulated(source: Source, case: Case, num_requests: int) -> Row:
    workload = source.workload.build(SEED)
    measured = workload.measured[: num_requests or None]
    warmup = tuple(short(session) for session in measured[: source.num_warmup])
    run_spec = RunSpec(Workload(workload.name, warmup, measured), {}, Pace(source.num_clients), SEED)
    return simulated_row(run_spec, deployment_of(options(source, case)), case.name, TOKENS)


def short(session: Any) -> Any:
    """bench_serving's warm-up: the first request, of at most 32 output tokens."""
    turns = tuple(replace(turn, output_len=min(turn.output_len, 32)) for turn in session.turns)
    return replace(session, name=f"warmup-{session.name}", turns=turns)


def options(source: Source, case: Case) -> DeploymentOptions:
    sharding, assumed = source.sharding, case.assumed
    return DeploymentOptions(
        CostOptions(
            card=source.card,
            model=source.model,
            tp=sharding.tp,
            weight_dtype=sharding.weight_dtype,
            kv_dtype=sharding.kv_dtype,
        ),
        SheetOptions(
            bandwidth_share=assumed.kernel_share,
            compute_share=assumed.compute_share or "auto",
            step_overhead_ms=0.0,
            request_overhead_us=0.0,
        ),
        source.workers,
        ClusterOptions(
            pool_tokens=pool_tokens(source, assumed),
            page_size=64,
            cache="both" if case.caches_on_decode else "prefill",
            naive_attention=not case.prefix_shared,
        ),
        source.limits,
    )


def pool_tokens(source: Source, assumed: Assumed) -> int:
    """What the static memory fraction leaves beside the weights."""
    model, sharding = model_named(source.model), source.sharding
    weight_bytes = model.weights.total * (1 if sharding.weight_dtype == "fp8" else 2)
    memory = sharding.tp * MEM_FRACTION * (assumed.card_bytes or source.card_bytes)
    return int((memory - weight_bytes) / model.kv_bytes_per_token(sharding.kv_dtype))


def table(source: Source, rows: dict[str, Row]) -> Iterator[str]:
    yield f"### {source.name}\n"
    for case in cases(source):
        share = f"decode reads memory at {100 * case.assumed.kernel_share:.0f} % of the data sheet's rate"
        yield f"- **{case.name}**: {share}, pool of {pool_tokens(source, case.assumed):,} tokens"
    yield "\n| cell | " + " | ".join(heads(source)) + " |"
    yield "|---" * (len(heads(source)) + 1) + "|"
    yield "| running, median (most) | " + " | ".join(parts(source, rows, "running", running)) + " |"
    yield "| pool in use, median (most) | " + " | ".join(parts(source, rows, "pool", pool_usage)) + " |"
    for key in source.baseline.cells:
        yield f"| {label(key)} | " + " | ".join(cells(source, rows, key)) + " |"
    bounds = []
    for case in cases(source):
        bound = bound_model(source, prefix_shared=case.prefix_shared)
        bound_s = step_bound_s(source, bound, rows[case.name]["workers"][-1]["running"]["median"])
        bounds += ["", f"{1e3 * bound_s:.1f}", ""] if case.observed else [f"{1e3 * bound_s:.1f}"]
    yield "| bound of a step at that batch (ms) | " + " | ".join(bounds) + " |\n"


def heads(source: Source) -> list[str]:
    """One column for a case without published numbers, three for one with."""
    names = []
    for case in cases(source):
        names += [f"{case.name}: published", "simulated", "error"] if case.observed else [f"{case.name}: simulated"]
    return names


def parts(source: Source, rows: dict[str, Row], said: str, value: Callable[[Row], str]) -> Iterator[str]:
    for case in cases(source):
        if case.observed:
            yield case.observed.residency[said]
        yield value(rows[case.name]["workers"][-1])
        if case.observed:
            yield ""


def running(worker: Row) -> str:
    return f"{worker['running']['median']:.0f} ({worker['running']['max']:.0f})"


def pool_usage(worker: Row) -> str:
    return f"{worker['pool_usage']['median']:.2f} ({worker['pool_usage']['max']:.2f})"


def cells(source: Source, rows: dict[str, Row], key: str) -> Iterator[str]:
    for case in cases(source):
        row = rows[case.name]
        if case.observed:
            yield shown(key, case.observed.cells[key])
        yield shown(key, row[key])
        if case.observed:
            yield f"{error(key, row, case.observed):+.1%}"


def error(key: str, row: Row, observed: Observed) -> float:
    relative: float = row[key] / observed.cells[key] - 1
    return relative


def label(key: str) -> str:
    if key in LABELS:
        return LABELS[key]
    statistic, name = key.removesuffix("_ms").split("_", 1)
    names = {"e2e_latency": ("latency", "s"), "ttft": ("TTFT", "s"), "tpot": ("TPOT", "ms"), "itl": ("ITL", "ms")}
    return "{0} {2} ({1})".format(*names[name], statistic)


def shown(key: str, value: float) -> str:
    if key.endswith(("e2e_latency_ms", "ttft_ms")):
        return f"{value / 1e3:.1f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def varied(source: Source, case: Case, row: Row, num_requests: int) -> Iterator[str]:
    """The cells with a large error as above or under a changed assumption, and the batch."""
    assert case.observed is not None
    others = {name: simulated(source, replace(case, assumed=a), num_requests) for name, a in changes(source, case)}
    all_rows = (row, *others.values())
    yield f"### {case.name}: errors above {LARGE:.0%}, with one assumption changed\n"
    yield f"| cell | as above | {' | '.join(others)} |"
    yield "|---" * (len(others) + 2) + "|"
    yield "| running, median (most) | " + " | ".join(running(one["workers"][-1]) for one in all_rows) + " |"
    for key in case.observed.cells:
        errors = [error(key, one, case.observed) for one in all_rows]
        if max(map(abs, errors)) > LARGE:
            yield f"| {label(key)} | " + " | ".join(f"{value:+.0%}" for value in errors) + " |"
    yield ""


def changes(source: Source, case: Case) -> Iterator[tuple[str, Assumed]]:
    """#19746's batch was read off log lines of its busiest time; its mean, as throughput and TPOT give it, is smaller."""
    assert case.observed is not None
    for share in (0.4, SLOW_PREFILL, 0.12):
        yield f"prefill at {share:.0%} of the arithmetic rate", replace(case.assumed, compute_share=share)
    mean_running = case.observed.cells["output_throughput"] * case.observed.itl_ms / 1e3
    if round(mean_running) != round(case.observed.running):
        share = kernel_share(source, replace(case.observed, running=mean_running))
        slower = replace(case.assumed, kernel_share=share)
        name = f"decode at {share:.0%}, which a batch of {mean_running:.0f} gives"
        yield name, slower
        yield f"{name}, and prefill at {SLOW_PREFILL:.0%}", replace(slower, compute_share=SLOW_PREFILL)
    nominal = card_named(source.card).memory_bytes
    yield f"cards of {nominal / 1e9:.0f} GB", replace(case.assumed, card_bytes=nominal)


if __name__ == "__main__":
    main()
