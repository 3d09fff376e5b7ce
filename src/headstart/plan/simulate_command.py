"""`headstart simulate`: bench's workloads, rows and tables, on a cluster that exists in virtual time only."""

import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from headstart.bench.command import announce, compare_files, keep, num_requests, print_row, progress_bar
from headstart.bench.errors import BenchError
from headstart.bench.lazy_matplotlib import check_drawable
from headstart.bench.machine import commit, version_of
from headstart.bench.measure import ReportRow, RunEnvironment, RunSpec, measure
from headstart.bench.records import RequestRecord
from headstart.bench.run_specs import run_specs
from headstart.bench.workload import TokenSource
from headstart.plan.contention import SharedMachine
from headstart.plan.cost import save_model
from headstart.plan.deployment import Deployment, deployment_of
from headstart.plan.options import SimulateOptions
from headstart.plan.target import SimClient, SimTarget, facts_of
from headstart.plan.utilisation import Watch, workers_table
from headstart.plan.virtual import VirtualTime
from headstart.sim.cluster import SimCluster
from headstart.sim.gc_tuning import rare_collections

WARM_S = 1.0
"""Virtual seconds in which workers join and connect before the first request."""


def run(options: SimulateOptions) -> int:
    """The command. Returns the exit status: 1 with a message where there is no result."""
    try:
        if options.output.compare:
            compare_files(options.output.compare)
        else:
            _simulate(options)
    except BenchError as error:
        print(f"headstart simulate: {error}", file=sys.stderr)
        return 1
    return 0


def simulated_rows(options: SimulateOptions, deployment: Deployment, progress: Progress) -> Iterator[ReportRow]:
    """Every combination of prefix share, concurrency and seed, each on a fresh cluster. Raises BenchError."""
    label = options.label or f"{deployment.spec.num_prefill}P{deployment.spec.num_decode}D"
    for run_spec in run_specs(options.bench, deployment.spec.decode.context_len):
        pace, seed = run_spec.pace.max_concurrency or "unlimited", run_spec.seed
        name, num = f"{label}: concurrency {pace}, seed {seed}", num_requests(run_spec.workload)
        task = progress.add_task(name, total=num + 1)
        announce(progress.console, f"{name}: simulating {num} requests ...")

        def advance(record: RequestRecord, task: TaskID = task) -> None:
            progress.advance(task)

        source, details = TokenSource(*options.traffic.load.token_ids), options.output.details
        yield simulated_row(run_spec, deployment, label, source, advance, keeps_requests=details)


@rare_collections()
def simulated_row(
    run_spec: RunSpec,
    deployment: Deployment,
    label: str,
    source: TokenSource,
    on_record: Callable[[RequestRecord], None] = lambda record: None,
    keeps_requests: bool = False,
) -> ReportRow:
    """One run: bench's row, with `workers` added. The same arguments give the same row."""
    machine = SharedMachine(deployment.costs)
    spec = machine.spec(deployment.spec) if machine.is_felt(deployment.spec) else deployment.spec
    cluster = SimCluster(spec, run_spec.seed)
    if spec is not deployment.spec:
        prefill, decode = (cluster.workers[name].organs.executor for name in ("prefill-0", "decode-0"))
        machine.attach(cluster.clock, prefill, decode)
    cluster.run_for(WARM_S)
    watch, time = Watch(cluster), VirtualTime(cluster, cluster.clock)
    watch.start()
    target = SimTarget(label, SimClient(cluster, time, deployment), facts_of(deployment))
    run_env = RunEnvironment(source, time, on_record=on_record, sleep=time.sleep, keeps_requests=keeps_requests)
    row = time.run(measure(run_spec, target, run_env))
    ended_s = cluster.clock.now()
    return {**row, "workers": watch.between(ended_s - row["duration"], ended_s)}


def stepping(deployment: Deployment) -> Deployment:
    """The same without jumps."""
    spec = deployment.spec
    return replace(deployment, spec=replace(spec, modelling=replace(spec.modelling, jumps=False)))


def simulated_machine() -> dict[str, Any]:
    """In place of a machine's facts. Nothing in it changes from run to run."""
    facts = {"cpu": "virtual time", "cores": None, "memory_gib": None, "torch": ""}
    return {**facts, "headstart": version_of("headstart"), "commit": commit()}


def _simulate(options: SimulateOptions) -> None:
    began_s = perf_counter()
    if options.output.plots:
        check_drawable("--plots")
    deployment = deployment_of(options.deployment)
    if options.stepping:
        deployment = stepping(deployment)
    if options.deployment.cost.save_sheet:
        save_model(deployment.costs, Path(options.deployment.cost.save_sheet))
    print(f"simulated: {deployment.costs.name}")
    for note in deployment.costs.notes:
        print(f"  {note}")
    sys.stdout.flush()
    with progress_bar(Console(stderr=True)) as progress:
        rows = list(simulated_rows(options, deployment, progress))
    for row in rows:
        print_row(row)
        print(workers_table(row["workers"]))
    keep(rows, options.output, simulated_machine())
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"took {perf_counter() - began_s:.1f} s and {peak_mb:.0f} MB at most", file=sys.stderr)
