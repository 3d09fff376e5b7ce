"""Everything `make bench` measures: the real system on the demo model, and what its parts cost.

    python benchmarks/suite.py [--quick] [--out bench-out] [--only serve|parts]

Writes OUT/suite.json (runs of `headstart bench` with machine facts, and the parts' own JSON) and prints tables. About
15 minutes on 2 cores, 3 with --quick. Keep the machine quiet: with fewer free cores than compute processes only ratios
between rows of one run mean something.
"""

import argparse
import asyncio
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployment import Deployment, Running, running
from rich.console import Console
from tables import comparison_table, serving_table

from headstart.bench.client import PerfClock
from headstart.bench.errors import BenchError
from headstart.bench.load_generator import Pace
from headstart.bench.machine import commit, machine_facts
from headstart.bench.measure import ReportRow, RunEnvironment, RunSpec, measure
from headstart.bench.plots import draw
from headstart.bench.report import SCHEMA
from headstart.bench.run_specs import Shape, described
from headstart.bench.target import Address, connect, open_http
from headstart.bench.workload import Length, MultiTurn, NoReuse, SharedPrefix, TokenSource

HERE = Path(__file__).parent
DEPLOYMENTS = (
    Deployment("split", 1, cache=True),
    Deployment("split, cache off", 1, cache=False),
    Deployment("unified", 0, cache=True),
    Deployment("unified, cache off", 0, cache=False),
)
PARTS: dict[str, tuple[str, ...]] = {
    "radix_match": ("radix_match.py", "--json"),
    "host_step": ("host_step.py",),
    "cpu_attention": ("cpu_attention.py",),
}
"""Name in the report -> script and arguments. What is no JSON is kept as lines."""
PART_S = 300.0

Load = tuple[str, Shape, int]
"""What the row is called, what is sent, and how many at once."""


def workloads(quick: bool) -> list[Load]:
    """For all four deployments."""
    num, output = (2, Length(16)) if quick else (4, Length(48))
    shared = SharedPrefix(2, num, Length(512), Length(48), output)
    return [
        ("shared-prefix", shared, 4),
        ("multi-turn", MultiTurn(num, 3 if quick else 6, Length(256), Length(48), output), 4),
        ("no-reuse", NoReuse(num, Length(512), output), 4),
    ]


def comparison_rows(quick: bool) -> list[Load]:
    """What was measured with another server on 2 cores (docs/benchmarks.md)."""
    output = Length(32 if quick else 128)
    return [
        ("one stream", NoReuse(1, Length(128), output), 1),
        ("cold prefill 4096", NoReuse(1 if quick else 3, Length(4096), Length(1)), 1),
        ("8 streams, prefix 2048", SharedPrefix(1, 8, Length(2048), Length(32), output), 8),
        ("16 streams, prefix 6144", SharedPrefix(1, 16, Length(6144), Length(32), output), 16),
    ]


async def measure_loads(
    server: Running, label: str, loads: list[Load], seeds: range, note: Callable[[str], None]
) -> list[ReportRow]:
    rows = []
    clock = PerfClock()
    async with open_http(Address(server.base_url, label)) as http:
        target = await connect(Address(server.base_url, label), http, clock)
        run_env = RunEnvironment(TokenSource(1000, 30_000), clock)
        for name, shape, concurrency in loads:
            for seed in seeds:
                note(f"{label}: {name}, seed {seed}")
                pace = Pace(concurrency, math.inf)
                run_spec = RunSpec(shape.build(seed), described(shape), pace, seed, commit=commit())
                row = await measure(run_spec, target, run_env)
                rows.append(row | {"name": name, "ready_s": round(server.ready_s, 2)})
    return rows


def measure_deployments(args: argparse.Namespace, note: Callable[[str], None]) -> list[ReportRow]:
    rows: list[ReportRow] = []
    for deployment in DEPLOYMENTS:
        note(f"starting {deployment.label}")
        with running(deployment) as server:
            seeds = range(1, 2 if args.quick else 4)
            rows += asyncio.run(measure_loads(server, deployment.label, workloads(args.quick), seeds, note))
            if deployment.cache:
                rows += asyncio.run(
                    measure_loads(server, deployment.label, comparison_rows(args.quick), range(1, 2), note)
                )
    return rows


def measure_part(name: str, note: Callable[[str], None]) -> Any:
    """The script's JSON, or what it said instead."""
    script, *arguments = PARTS[name]
    if not (HERE / script).exists():
        return {"error": f"benchmarks/{script} is not there"}
    note(f"running benchmarks/{script}")
    command = [sys.executable, str(HERE / script), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PART_S, check=False)
    except subprocess.TimeoutExpired as error:
        return {"error": str(error)}
    if done.returncode:
        return {"error": done.stderr[-1000:]}
    try:
        return json.loads(done.stdout)
    except ValueError:
        return done.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter outputs and one seed")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for results")
    parser.add_argument("--only", choices=("serve", "parts"), help="only the served system, or only its parts")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are stopped too
    console = Console(stderr=True)
    began = time.perf_counter()
    machine = machine_facts()

    def note(what: str) -> None:
        console.print(f"{time.perf_counter() - began:4.0f} s  {what}", markup=False, highlight=False)

    parts = {} if args.only == "serve" else {name: measure_part(name, note) for name in PARTS}
    try:
        runs = [] if args.only == "parts" else measure_deployments(args, note)
    except (BenchError, RuntimeError) as error:
        console.print(f"benchmark failed: {error}", markup=False)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"schema": SCHEMA, "machine": machine, "runs": runs, "parts": parts}
    (args.out / "suite.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(machine))
    if runs:
        print(serving_table(runs))
        print(comparison_table(runs))
        draw([run for run in runs if run["name"] in ("shared-prefix", "multi-turn")], args.out)
    for name, result in parts.items():
        print(f"\n{name}\n{json.dumps(result, indent=1)}")
    failed = [name for name, result in parts.items() if isinstance(result, dict) and "error" in result]
    print(f"\n{time.perf_counter() - began:.0f} s; everything is in {args.out}/suite.json")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
