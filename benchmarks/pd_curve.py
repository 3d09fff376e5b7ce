"""The P:D curve of SGLang #19746's workload, with and without prefix-shared decode: what each split of the workers gives.

python benchmarks/pd_curve.py [--workers 8] [--clients 256] [--requests 1000] [--out docs/figures/pd-19746]

Decode kernels read memory as fast as #19746's did; only what they read differs. Writes PNG and SVG, prints a table.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from published import SGLANG_19746
from source_tables import SEED, TOKENS, Assumed, Case, kernel_share, options

from headstart.bench.load_generator import Pace
from headstart.bench.measure import RunSpec
from headstart.bench.workload import Workload
from headstart.plan.advise import offered_of, worker_of
from headstart.plan.capacity import Capacity, Estimate, Split
from headstart.plan.deployment import deployment_of
from headstart.plan.figure import Curve, Panel, draw
from headstart.plan.simulated_split import SimulatedSplit, SplitSimulator
from headstart.plan.slo import Targets

TARGETS = Targets(ttft_p99_ms=15_000.0, itl_p99_ms=50.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", default="docs/figures/pd-19746")
    arguments = parser.parse_args()
    splits = [Split(number, arguments.workers - number) for number in range(1, arguments.workers)]
    found: dict[str, Found] = {}
    for case in cases():
        trials = trials_of(case, arguments.clients, arguments.requests)
        offered, worker = offered_of(trials.run_spec), worker_of(trials.deployment)
        estimates = [*map(Capacity(offered, worker).of, splits)]
        simulated = []
        for split in splits:
            simulated.append(trials.simulate(split, worker.max_running))
            print(line(case.name, simulated[-1]), flush=True)
        found[case.name] = Found(simulated, estimates)
    draw(panels(found, arguments.clients), Path(arguments.out))


@dataclass(frozen=True)
class Found:
    """Of one deployment, by split."""

    trials: list[SimulatedSplit]
    estimates: list[Estimate]


def cases() -> list[Case]:
    assumed = Assumed(kernel_share(SGLANG_19746, SGLANG_19746.decode_cache))
    return [
        Case("no cache on decode", assumed, False, False),
        Case("decode cache, every row reads its prefix", assumed, True, False),
        Case("decode cache, a shared prefix is read once", assumed, True, True),
    ]


def trials_of(case: Case, num_clients: int, num_requests: int) -> SplitSimulator:
    workload = SGLANG_19746.workload.build(SEED)
    run_spec = RunSpec(Workload(workload.name, (), workload.measured[:num_requests]), {}, Pace(num_clients), SEED)
    return SplitSimulator(run_spec, deployment_of(options(SGLANG_19746, case)), TARGETS, TOKENS)


def panels(found: dict[str, Found], num_clients: int) -> list[Panel]:
    where = f"Qwen3-32B on pairs of B200, 20 prefixes of 50,000 tokens, {num_clients} clients"
    targets = f"{TARGETS.ttft_p99_ms / 1e3:g} s to the first token and {TARGETS.itl_p99_ms:g} ms a token"  # type: ignore[operator]
    throughput, goodput = [], []
    for style, (name, one) in enumerate(found.items()):
        estimated = tuple((e.split, e.throughput) for e in one.estimates)
        throughput.append(Curve(name, tuple((t.split, t.throughput) for t in one.trials), style=style))
        throughput.append(Curve("  the same, closed form", estimated, is_estimate=True, style=style))
        goodput.append(Curve(name, tuple((t.split, t.goodput) for t in one.trials), style=style))
    return [
        Panel(f"Throughput: {where}", tuple(throughput), "throughput (requests/s)"),
        Panel(f"Goodput: requests within {targets}", tuple(goodput)),
    ]


def line(name: str, trial: SimulatedSplit) -> str:
    late = trial.latencies
    return (
        f"{name:<44} {trial.split!s:<6} {trial.throughput:>6.2f} requests/s, {trial.goodput:>6.2f} good, TTFT p50 "
        f"{late.ttft_p50_ms / 1e3:>6.1f} s, ITL p50 {late.itl_p50_ms:>6.1f} ms, running {trial.running:>6.1f}, "
        f"pool {trial.pool_share:.2f}"
    )


if __name__ == "__main__":
    main()
