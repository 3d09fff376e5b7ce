"""Does the simulator tell what this machine will do? Fits a cost model to some loads and predicts two others.

    python benchmarks/validate_simulation.py [--quick] [--out bench-out/validation]

1. Serves the demo model, one prefill and one decode worker, and plays the calibration loads.
2. Plays two loads that are not among them, five equal times each.
3. Fits the costs as `headstart simulate --calibrate OUT/calibration.json --chunked-prefill-size 256` does, simulates the
   two loads, and prints predicted against measured with the spread of the five runs: (largest - smallest) / mean. The
   loads that were fitted are predicted too, to show how far the model itself is off.
4. Serves again with --record, plays the first load once, and replays the logs: every decision must be made again.

Goals: mean TPOT off by at most 3 % or the spread, mean TTFT by at most 10 % or the spread, decisions identical. About
17 minutes on 2 cores, 2 with --quick (whose numbers mean little). Keep the machine quiet: a busy one is another machine
from run to run.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from deployment import Deployment, Running, running

from headstart.bench.client import PerfClock
from headstart.bench.errors import BenchError
from headstart.bench.load_generator import Pace
from headstart.bench.machine import commit, machine_facts
from headstart.bench.measure import ReportRow, RunEnvironment, RunSpec, measure
from headstart.bench.report import save
from headstart.bench.run_specs import Shape, described
from headstart.bench.target import Address, connect, open_http
from headstart.bench.workload import Length, MultiTurn, NoReuse, SharedPrefix, TokenSource
from headstart.config.errors import ConfigError
from headstart.plan.calibrate import Calibration, calibrate
from headstart.plan.cost import save_model
from headstart.plan.deployment import Deployment as Simulated
from headstart.plan.deployment import Hardware, cluster_spec
from headstart.plan.options import ClusterOptions, DeploymentOptions, LimitOptions
from headstart.plan.simulate_command import simulated_row
from headstart.sim.decision_report import report
from headstart.sim.replay import replay
from headstart.worker.decision_log import SUFFIX, read_decision_log

POOL_TOKENS, CHUNK, LOCAL = 32_768, 256, 16
FLAGS = (
    *("--max-total-tokens", str(POOL_TOKENS), "--page-size", "16"),
    *("--chunked-prefill-size", str(CHUNK), "--local-prefill-tokens", str(LOCAL)),
)
SOURCE = TokenSource(1000, 30_000)
GOALS = {"tpot": 0.03, "ttft": 0.10}


@dataclass(frozen=True)
class Load:
    name: str
    shape: Shape
    concurrency: int


def calibration_loads(quick: bool) -> list[Load]:
    """Prompts alone; rows on long shared prefixes, then with much that is their own; both workers busy at once."""
    num, out = (4, Length(16, 0.5)) if quick else (12, Length(56, 0.4))
    return [
        Load("one at a time", NoReuse(2 * num, Length(1200, 0.05), Length(12)), 1),
        Load("4 on 2 prefixes", SharedPrefix(2, num, Length(900), Length(24), out), 4),
        Load("12 on 2 prefixes", SharedPrefix(2, num, Length(500), Length(24), out), 12),
        Load("6 on 4 prefixes", SharedPrefix(4, num // 2, Length(400), Length(120, 0.7), out), 6),
        Load("3 conversations", MultiTurn(num // 2, 4, Length(300, 0.2), Length(60, 0.1), out), 3),
        Load("4 new prompts", NoReuse(num, Length(600, 0.3), out), 4),
    ]


def judged_loads(quick: bool) -> list[Load]:
    num, out = (4, Length(16, 0.5)) if quick else (12, Length(64, 0.5))
    return [
        Load("6 conversations", MultiTurn(num // 2, 5, Length(400, 0.3), Length(100, 0.3), out), 6),
        Load("8 on 3 prefixes", SharedPrefix(3, num, Length(700), Length(60, 0.5), out), 8),
    ]


# ---- measured --------------------------------------------------------------------------------------------------------


async def play(server: Running, loads: Sequence[tuple[Load, int]]) -> list[ReportRow]:
    """One row for each (load, seed), with every request."""
    clock, code = PerfClock(), commit()
    address = Address(server.base_url)
    rows = []
    async with open_http(address) as http:
        target = await connect(address, http, clock)
        for load, seed in loads:
            note(f"{load.name}, seed {seed}")
            row = await measure(
                run_spec_of(load, seed, code), target, RunEnvironment(SOURCE, clock, keeps_requests=True)
            )
            rows.append(row | {"name": load.name})
    return rows


def run_spec_of(load: Load, seed: int, code: str = "") -> RunSpec:
    return RunSpec(load.shape.build(seed), described(load.shape), Pace(load.concurrency), seed, commit=code)


def spread(values: Sequence[float]) -> float:
    return float((max(values) - min(values)) / np.mean(values))


# ---- predicted -------------------------------------------------------------------------------------------------------


def predicted(load: Load, seed: int, found: Calibration) -> ReportRow:
    options = DeploymentOptions(
        cluster=ClusterOptions(page_size=found.page_size),
        limits=LimitOptions(chunked_prefill_size=CHUNK, local_prefill_tokens=LOCAL),
    )
    hardware = Hardware(found.costs, POOL_TOKENS, found.context_len)
    return simulated_row(
        run_spec_of(load, seed), Simulated(found.costs, cluster_spec(hardware, options)), load.name, SOURCE
    )


@dataclass(frozen=True)
class Line:
    """One load's mean of one latency, in milliseconds."""

    load: str
    latency: str
    measured: tuple[float, ...]
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / float(np.mean(self.measured)) - 1

    @property
    def bound(self) -> float:
        return max(GOALS[self.latency], spread(self.measured))

    @property
    def holds(self) -> bool:
        return abs(self.error) <= self.bound


def compare(load: Load, rows: list[ReportRow], prediction: ReportRow) -> Iterator[Line]:
    for latency in GOALS:
        key = f"mean_{latency}_ms"
        yield Line(load.name, latency, tuple(row[key] for row in rows), prediction[key])


def predictions(loads: list[Load], seed: int, rows: list[ReportRow], found: Calibration) -> list[Line]:
    lines: list[Line] = []
    for load in loads:
        note(f"simulating {load.name}")
        lines += compare(load, [row for row in rows if row["name"] == load.name], predicted(load, seed, found))
    return lines


def table(lines: list[Line], is_judged: bool = True) -> str:
    out = [f"{'load':<18}{'mean of':<9}{'measured ms':>12}{'spread':>9}{'predicted ms':>14}{'error':>9}{'goal':>9}"]
    for line in lines:
        verdict = "" if line.holds or not is_judged else "  missed"
        out.append(
            f"{line.load:<18}{line.latency.upper():<9}{np.mean(line.measured):>12.2f}{spread(line.measured):>9.1%}"
            f"{line.predicted:>14.2f}{line.error:>+9.1%}{line.bound:>9.1%}{verdict}"
        )
    return "\n".join(out)


# ---- replayed --------------------------------------------------------------------------------------------------------


def replayed(load: Load, seed: int) -> tuple[bool, list[str]]:
    """Whether every log of a recorded run gave the same decisions, and a line each."""
    with tempfile.TemporaryDirectory(prefix="headstart-logs-") as folder:
        with running(Deployment("recorded", 1, cache=True, flags=(*FLAGS, "--record", folder))) as server:
            asyncio.run(play(server, [(load, seed)]))
        same, lines = True, []
        for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
            verdict = replay(*read_decision_log(path))
            same &= verdict.difference is None
            lines.append(f"{path.name.split('.')[0]}: " + "\n  ".join(report(verdict)))
        return same and len(lines) == 3, lines


# ---- the command -----------------------------------------------------------------------------------------------------

BEGAN = time.perf_counter()


def note(what: str) -> None:
    print(f"{time.perf_counter() - BEGAN:4.0f} s  {what}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and short requests: to see that it works")
    parser.add_argument("--out", type=Path, default=Path("bench-out/validation"), help="folder for reports")
    args = parser.parse_args()
    try:
        return validate(args.quick, args.out)
    except (BenchError, ConfigError, RuntimeError) as error:
        print(f"validation failed: {error}", file=sys.stderr)
        return 1


def validate(quick: bool, out: Path) -> int:
    judged, num_equal = judged_loads(quick), 2 if quick else 5
    with running(Deployment("split", 1, cache=True, flags=FLAGS)) as server:
        seeds = (1,) if quick else (1, 2)
        fitted_rows = asyncio.run(play(server, [(load, seed) for load in calibration_loads(quick) for seed in seeds]))
        rows = asyncio.run(play(server, [(load, 7) for _ in range(num_equal) for load in judged]))
    machine = machine_facts()
    save(out / "calibration.json", machine, fitted_rows)
    save(out / "measured.json", machine, rows)
    found = calibrate(out / "calibration.json", CHUNK)
    save_model(found.costs, out / "costs.json")
    lines = predictions(judged, 7, rows, found)
    in_sample = predictions(calibration_loads(quick), 1, [row for row in fitted_rows if row["seed"] == 1], found)
    same, verdicts = replayed(judged[0], 7)
    result: dict[str, Any] = {
        "machine": machine,
        "load_average": os.getloadavg(),
        "fitted": [vars(line) | {"error": line.error} for line in in_sample],
        "predicted": [vars(line) | {"error": line.error, "spread": spread(line.measured)} for line in lines],
        "replayed": verdicts,
    }
    (out / "validation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(machine))
    for part in ("decode", "prefill", "link", "front", "contention"):
        print(f"{part}: {getattr(found.costs, part)}")
    print("\n".join(found.costs.notes))
    print(f"\nloads that were fitted, once each\n{table(in_sample, is_judged=False)}")
    print(f"\nloads that were not, {num_equal} equal times each\n{table(lines)}\n\n" + "\n".join(verdicts))
    return 0 if same and all(line.holds for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
