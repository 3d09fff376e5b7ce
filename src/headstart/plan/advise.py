"""`headstart plan`: how many prefill and decode workers a number of cards should become, and what keeps them from more."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean

from headstart.bench.command import num_requests
from headstart.bench.errors import BenchError
from headstart.bench.lazy_matplotlib import check_drawable
from headstart.bench.measure import RunSpec
from headstart.bench.run_specs import run_specs
from headstart.bench.workload import TokenSource
from headstart.config.errors import ConfigError, require
from headstart.plan.capacity import Capacity, Estimate, OfferedLoad, Split, Worker
from headstart.plan.cost import save_model
from headstart.plan.deployment import Deployment, deployment_of
from headstart.plan.figure import draw
from headstart.plan.options import PlanOptions
from headstart.plan.report import Advice, heading, panel, save, told
from headstart.plan.search import choose
from headstart.plan.simulated_split import SimulatedSplit, SplitSimulator
from headstart.plan.slo import misses
from headstart.plan.workload_stats import planned_requests

MAX_WORKERS = 64
"""Most workers that --cards auto considers."""
MAX_SIZES = 4
"""Numbers of cards that --cards auto simulates."""


def run(options: PlanOptions) -> int:
    """The command. Returns the exit status: 1 where there is no result, or where no split meets the targets."""
    try:
        if options.figure:
            check_drawable("--figure")
        deployment = deployment_of(options.deployment)
        if options.cost.save_sheet:
            save_model(deployment.costs, Path(options.cost.save_sheet))
        loads = [*_run_specs(options, deployment)]
        print("\n".join(heading(options, deployment)), flush=True)
        advices = []
        for run_spec in loads:
            advices.append(advise(run_spec, deployment, options))
            print("\n".join(told(advices[-1], options, deployment)), flush=True)
        if options.output_file:
            save(Path(options.output_file), advices, options, deployment)
        if options.figure:
            draw([panel(advice) for advice in advices], Path(options.figure))
    except BenchError as error:
        print(f"headstart plan: {error}", file=sys.stderr)
        return 1
    return int(any(misses(advice.best.latencies, options.targets) for advice in advices))


def advise(run_spec: RunSpec, deployment: Deployment, options: PlanOptions) -> Advice:
    """Raises ConfigError where the cards make no pair of workers, BenchError where a simulated request fails."""
    offered, worker = offered_of(run_spec), worker_of(deployment)
    tightest_ms = options.targets.tightest_itl_ms
    capacity = Capacity(offered, worker, None if tightest_ms is None else tightest_ms / 1e3)
    adviser = Adviser(capacity, offered, worker.max_running, options, run_spec, deployment)
    if options.cards != "auto":
        return adviser.of(options.cards)
    if not options.targets.are_given:
        raise ConfigError("--cards auto needs a target: give --ttft-p99-ms or another")
    return adviser.fewest()


@dataclass(frozen=True, slots=True)
class Adviser:
    """About one load on one kind of worker, for any number of cards."""

    capacity: Capacity
    offered: OfferedLoad
    max_running: int
    options: PlanOptions
    run_spec: RunSpec
    deployment: Deployment

    def of(self, cards: int) -> Advice:
        return self._simulated(cards, self._estimates(cards))

    def fewest(self) -> Advice:
        """The fewest cards whose simulation meets the targets, from the first on that could by the closed form. Where a
        few more than those do not, either, the last that was tried."""
        tried: list[Advice] = []
        for num_workers in range(2, MAX_WORKERS + 1):
            cards = num_workers * self.options.cost.tp
            estimates = self._estimates(cards)
            if not tried and num_workers < MAX_WORKERS and not any(map(self._promises, estimates)):
                continue
            tried.append(self._simulated(cards, estimates))
            if len(tried) == MAX_SIZES or not misses(tried[-1].best.latencies, self.options.targets):
                break
        return tried[-1]

    def _estimates(self, cards: int) -> list[Estimate]:
        return [*map(self.capacity.of, splits_of(cards, self.options.cost.tp))]

    def _promises(self, found: Estimate) -> bool:
        """Whether the targets could be met, and an offered load be served whole."""
        targets, rate = self.options.targets, self.offered.rate
        in_time = targets.ttft_ms is None or 1e3 * found.ttft_s <= targets.ttft_ms
        in_pace = targets.itl_ms is None or 1e3 * found.itl_s <= targets.itl_ms
        return in_time and in_pace and (rate is None or found.throughput >= rate)

    def _simulated(self, cards: int, estimates: list[Estimate]) -> Advice:
        source = TokenSource(*self.options.traffic.load.token_ids)
        trials = SplitSimulator(self.run_spec, self.deployment, self.options.targets, source)
        load = described(self.run_spec, self.offered)

        def simulate(split: Split, max_running: int) -> SimulatedSplit:
            num = num_requests(self.run_spec.workload)
            print(f"simulating {num} requests on {split}, {max_running} running at most ...", file=sys.stderr)
            return trials.simulate(split, max_running)

        ordered = choose(estimates, self.options.targets, self.max_running, simulate)
        return Advice(load, cards, tuple(estimates), tuple(ordered), self.max_running)


def splits_of(cards: int, tp: int) -> list[Split]:
    """Every way to make prefill and decode workers of `tp` cards."""
    num_workers = cards // tp
    require(num_workers >= 2, f"--cards {cards} with --tp {tp}: a prefill and a decode worker need {2 * tp}")
    return [Split(number, num_workers - number) for number in range(1, num_workers)]


def worker_of(deployment: Deployment) -> Worker:
    spec = deployment.spec
    return Worker(
        deployment.costs,
        spec.decode_pages * spec.page_size,
        spec.prefill.chunked_prefill_size,
        spec.decode.max_running_requests,
        deployment.caches_on_decode,
    )


def offered_of(run_spec: RunSpec) -> OfferedLoad:
    """Clients that wait for answers, or requests that come at recorded times or at a rate of sessions. Raises BenchError."""
    workload, pace = run_spec.workload, run_spec.pace
    requests, warm = tuple(planned_requests(workload.measured)), tuple(planned_requests(workload.warmup))
    rate = _rate_of(run_spec)
    if rate is None:
        return OfferedLoad(requests, warm, num_clients=pace.max_concurrency or len(workload.measured))
    if pace.max_concurrency is not None:
        raise BenchError(
            "a plan for a rate of requests needs --max-concurrency 0: waiting clients would hide what is not served"
        )
    return OfferedLoad(requests, warm, rate=rate)


def _rate_of(run_spec: RunSpec) -> float | None:
    """Requests per second; None where clients wait for answers."""
    workload, pace = run_spec.workload, run_spec.pace
    turns = [turn for session in workload.measured for turn in session.turns]
    if pace.open_loop:
        last_s = max(turn.due_s or 0.0 for turn in turns)
        if last_s <= 0:
            raise BenchError("--open-loop needs a trace with more than one time stamp")
        return len(turns) * pace.speed / last_s
    return pace.request_rate * len(turns) / len(workload.measured) if isfinite(pace.request_rate) else None


def _run_specs(options: PlanOptions, deployment: Deployment) -> Iterator[RunSpec]:
    traffic = options.traffic
    if traffic.load.num_seeds > 1 or len(traffic.order.prefix_share) > 1:
        raise ConfigError(
            "headstart plan takes one seed and one --prefix-share; --max-concurrency may have several values"
        )
    return run_specs(options.bench, deployment.spec.decode.context_len)


def described(run_spec: RunSpec, offered: OfferedLoad) -> str:
    prompt_len = fmean(request.prompt_len for request in offered.requests)
    whom = f"{offered.num_clients} clients" if offered.rate is None else f"{offered.rate:.4g} requests/s"
    return (
        f"{run_spec.workload.name}, seed {run_spec.seed}: {len(offered.requests)} requests of {prompt_len:.0f} prompt and "
        f"{offered.output_len:.0f} output tokens on average, {whom}"
    )
