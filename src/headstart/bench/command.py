"""`headstart bench`: measure one server or two, print tables, write the report and its pictures."""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headstart.bench.client import PerfClock
from headstart.bench.compare import compare, render
from headstart.bench.errors import BenchError
from headstart.bench.lazy_matplotlib import check_drawable
from headstart.bench.machine import machine_facts
from headstart.bench.measure import ReportRow, RunEnvironment, RunSpec, measure
from headstart.bench.options import Options, ReportOptions
from headstart.bench.plots import draw
from headstart.bench.records import RequestRecord
from headstart.bench.report import SCHEMA, load, save, table
from headstart.bench.run_specs import addresses, run_specs
from headstart.bench.target import ServerTarget, connect, open_http
from headstart.bench.workload import TokenSource, Workload


def run(options: Options) -> int:
    """The command. Returns the exit status: 1 with a message where there is no result."""
    try:
        if options.output.compare:
            compare_files(options.output.compare)
        else:
            if options.output.plots:
                check_drawable("--plots")
            _report(options, asyncio.run(measure_all(options, Console(stderr=True))))
    except BenchError as error:
        print(f"headstart bench: {error}", file=sys.stderr)
        return 1
    return 0


async def measure_all(options: Options, console: Console) -> list[ReportRow]:
    """Every combination of prefix share, concurrency and seed, on each server in turns. Raises BenchError."""
    clock = PerfClock()
    async with AsyncExitStack() as stack:
        targets = []
        for address in addresses(options.target):
            http = await stack.enter_async_context(open_http(address))
            targets.append(await connect(address, http, clock))
        if len({target.label for target in targets}) < len(targets):
            raise BenchError("both servers would be called the same; give --label and --against-label")
        progress = stack.enter_context(progress_bar(console))
        rows = []
        known = [length for target in targets if (length := target.facts["max_model_len"])]
        for number, run_spec in enumerate(run_specs(options, min(known, default=None))):
            for target in targets[::-1] if number % 2 else targets:
                rows.append(await _measure_one(options, run_spec, target, progress))
    return sorted(rows, key=lambda row: [target.label for target in targets].index(row["label"]))


async def _measure_one(options: Options, run_spec: RunSpec, target: ServerTarget, progress: Progress) -> ReportRow:
    name = f"{target.label}: {run_spec.workload.name}, concurrency {run_spec.pace.max_concurrency or 'unlimited'}, seed {run_spec.seed}"
    num = num_requests(run_spec.workload)
    task = progress.add_task(name, total=num + 1)
    announce(progress.console, f"{name}: sending {num} requests ...")

    def advance(record: RequestRecord) -> None:
        progress.advance(task)

    run_env = RunEnvironment(
        TokenSource(*options.load.token_ids),
        PerfClock(),
        options.load.prompt_format == "text",
        advance,
        keeps_requests=options.output.details,
    )
    return await measure(run_spec, target, run_env)


def num_requests(workload: Workload) -> int:
    """The warm-up's included."""
    return sum(len(session.turns) for session in (*workload.warmup, *workload.measured))


def announce(console: Console, line: str) -> None:
    """Say what begins where no bar is drawn that moves."""
    if not console.is_terminal:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _report(options: Options, rows: list[ReportRow]) -> None:
    for row in rows:
        print_row(row)
    machine = machine_facts()
    keep(rows, options.output, machine)
    if options.target.against:
        first = rows[0]["label"]
        sides = ([row for row in rows if (row["label"] == first) is mine] for mine in (True, False))
        a, b = ({"schema": SCHEMA, "machine": machine, "runs": side} for side in sides)
        print(f"\nA is {first}, B is {b['runs'][0]['label']}")  # type: ignore[index]
        print(render(*compare(a, b)))


def print_row(row: ReportRow) -> None:
    share = "" if row["prefix_share"] is None else f", prefix share {row['prefix_share']}"
    print(f"\n{row['label']}: {row['dataset_name']}, seed {row['seed']}{share}")
    print(table(row))


def keep(rows: list[ReportRow], output: ReportOptions, machine: dict[str, Any]) -> None:
    """Write the report and its pictures, where they were asked for."""
    if output.output_file:
        save(Path(output.output_file), machine, rows, append=output.append)
    if output.plots:
        for path in draw(rows, Path(output.plots)):
            print(f"drew {path}")


def compare_files(paths: tuple[str, ...]) -> None:
    if len(paths) != 2:
        raise BenchError(f"--compare needs two reports, got {len(paths)}")
    print(f"A is {paths[0]}, B is {paths[1]}")
    print(render(*compare(*(load(Path(path)) for path in paths))))
