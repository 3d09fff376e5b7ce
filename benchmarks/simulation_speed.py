"""How fast clusters are simulated: requests per minute of one core, with jumps and without, and how the cost grows.

python benchmarks/simulation_speed.py conversation_div8.jsonl --out bench-out/simulation-speed
"""

import argparse
import json
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from numpy.typing import NDArray

from headstart.bench.machine import machine_facts
from headstart.bench.trace import TraceRequest, read_trace
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.plan.deployment import deployment_of
from headstart.plan.options import ClusterOptions, CostOptions, DeploymentOptions, WorkerOptions
from headstart.sim.cluster import SimCluster
from headstart.sim.gc_tuning import rare_collections
from headstart.sim.spec import ClusterSpec

WARM_S = 2.0
TOKEN_BITS = 14
NUM_AT_ONCE = 16
"""Requests that are made together, which takes less of the time that is measured."""
BLOCK_FACTOR, BLOCK_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)
TOKEN_FACTOR, TOKEN_SHIFT = np.uint32(0x85EBCA6B), np.uint32(32 - TOKEN_BITS)
GROWTH_WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
GROWTH_REQUESTS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)


@dataclass(frozen=True, slots=True)
class Result:
    """One run. `running` is rows per decode step, `cpu_us` of one request."""

    num_workers: int
    num_requests: int
    jumps: bool
    running: float
    wall_s: float
    cpu_s: float
    virtual_s: float
    per_minute: float
    peak_rss_mb: float


class Traffic:
    """A trace's requests, its times divided by `speed`, again and again with other tokens. Blocks have one size."""

    def __init__(self, trace: list[TraceRequest], speed: float) -> None:
        self._trace = trace
        self._blocks = [np.array(row.hash_ids, dtype=np.uint64) for row in trace]
        (self._block_size,) = {row.block_size for row in trace}
        self._speed = speed
        self._length_s = (trace[-1].at_s - trace[0].at_s) / speed

    def __call__(self, num_requests: int) -> Iterator[tuple[float, Request]]:
        for first in range(0, num_requests, NUM_AT_ONCE):
            yield from self._some(range(first, min(first + NUM_AT_ONCE, num_requests)))

    def _some(self, numbers: range) -> Iterator[tuple[float, Request]]:
        places = [divmod(number, len(self._trace)) for number in numbers]
        blocks = [self._blocks[index] + np.uint64(turn << 32) for turn, index in places]
        tokens, first = tokens_of(np.concatenate(blocks), self._block_size).ravel(), 0
        for number, (turn, index), ids in zip(numbers, places, blocks, strict=True):
            row = self._trace[index]
            at_s = turn * self._length_s + (row.at_s - self._trace[0].at_s) / self._speed
            last = first + len(ids) * self._block_size
            yield at_s, self._request(number, row, tokens[first:last][: row.input_len].copy())
            first = last

    def _request(self, number: int, row: TraceRequest, prompt: NDArray[np.int32]) -> Request:
        if (num_own := row.input_len - len(prompt)) > 0:
            own = np.array([(1 << 62) + number], dtype=np.uint64)
            prompt = np.concatenate((prompt, tokens_of(own, num_own).ravel()))
        prompt.setflags(write=False)
        stop = StopCriteria(row.output_len)
        return Request(ChoiceRef(f"r{number}"), prompt, SamplingParams(seed=number), stop, b"", 36_000.0)


def tokens_of(blocks: NDArray[np.uint64], block_size: int) -> NDArray[np.int32]:
    """[num_blocks, block_size]: equal ids are equal tokens."""
    keys = ((blocks * BLOCK_FACTOR) >> BLOCK_SHIFT).astype(np.uint32)
    mixed = keys[:, None] ^ np.arange(block_size, dtype=np.uint32)
    mixed *= TOKEN_FACTOR
    mixed >>= TOKEN_SHIFT
    return mixed.view(np.int32)


def cluster_spec(num_workers: int, *, jumps: bool) -> ClusterSpec:
    """H100 cards with Qwen3-8B, half of them for prefill."""
    options = DeploymentOptions(
        cost=CostOptions(card="H100", model="Qwen3-8B"),
        workers=WorkerOptions(num_workers // 2, num_workers - num_workers // 2),
        cluster=ClusterOptions(),
    )
    spec = deployment_of(options).spec
    return replace(spec, modelling=replace(spec.modelling, jumps=jumps))


@rare_collections()
def simulate(spec: ClusterSpec, arrivals: Iterator[tuple[float, Request]], num_requests: int) -> Result:
    cluster = SimCluster(spec)
    cluster.run_for(WARM_S)
    began_s, wall_s, cpu_s = cluster.clock.now(), perf_counter(), process_time()
    num_asked = num_finished = 0

    def look_back() -> None:
        """Forget what has ended, prompts and all."""
        nonlocal num_finished
        num_finished += sum(handle.finished is not None for handle in cluster.handles)
        cluster.handles = [handle for handle in cluster.handles if not handle.is_done]

    def ask_next() -> None:
        """Only the next few requests exist before their time."""
        asked = next(arrivals, None)
        if asked is not None:
            cluster.at(began_s + asked[0], partial(ask, asked[1]))

    def ask(request: Request) -> None:
        nonlocal num_asked
        num_asked += 1
        cluster.submit(request)
        if num_asked % 500 == 0:
            look_back()
        ask_next()

    ask_next()
    while num_asked < num_requests:
        cluster.step()
    while any(not handle.is_done for handle in cluster.handles):
        cluster.run_for(0.1)
    wall_s, cpu_s = perf_counter() - wall_s, process_time() - cpu_s
    look_back()
    if num_finished < num_requests:
        raise SystemExit(f"{num_requests - num_finished} of {num_requests} requests did not finish")
    loads = [worker.load().counters for name, worker in cluster.workers.items() if name.startswith("decode")]
    rows = sum(load.get("output_tokens", 0) for load in loads) / max(1, sum(load.get("steps", 0) for load in loads))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    virtual_s, jumps = cluster.clock.now() - began_s, spec.modelling.jumps
    num_workers = spec.num_prefill + spec.num_decode
    per_minute = 60 * num_requests / wall_s
    return Result(num_workers, num_requests, jumps, rows, wall_s, cpu_s, virtual_s, per_minute, peak_mb)


def measured(trace: Path, speed: float, num_workers: int, num_requests: int, jumps: bool) -> Result:
    """One run, in a process of its own: what others left in memory would count."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (trace, speed, num_workers, num_requests, jumps))


def _measured(trace: Path, speed: float, num_workers: int, num_requests: int, jumps: bool) -> Result:
    traffic = Traffic(read_trace(trace), speed)
    return simulate(cluster_spec(num_workers, jumps=jumps), traffic(num_requests), num_requests)


def table(results: list[Result]) -> str:
    head = f"{'workers':>8} {'requests':>9} {'jumps':>6} {'running':>8} {'wall s':>8} {'CPU us/request':>15} {'requests/minute':>16} {'peak MB':>8}"
    rows = [
        f"{r.num_workers:>8} {r.num_requests:>9} {'yes' if r.jumps else 'no':>6} {r.running:>8.1f} {r.wall_s:>8.1f} "
        f"{1e6 * r.cpu_s / r.num_requests:>15.0f} {r.per_minute:>16.0f} {r.peak_rss_mb:>8.0f}"
        for r in results
    ]
    return "\n".join([head, *rows])


def draw(over_workers: list[Result], over_requests: list[Result], folder: Path) -> None:
    """Cost of a request and memory, over workers at the same load each, and over requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    panels = (
        (over_workers, "num_workers", "workers, half of them prefill"),
        (over_requests, "num_requests", "requests"),
    )
    for axes, (results, key, label) in zip(all_axes, panels, strict=True):
        for jumps, name in ((True, "CPU time, with jumps"), (False, "CPU time, step by step")):
            shown = [result for result in results if result.jumps is jumps]
            if shown:
                costs = [1e3 * result.cpu_s / result.num_requests for result in shown]
                axes.plot([getattr(result, key) for result in shown], costs, "o-" if jumps else "s--", label=name)
        axes.set(xlabel=label, ylabel="CPU time of a request (ms)", xscale="log")
        ticks = sorted({getattr(result, key) for result in results})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
        axes.minorticks_off()
        memory = axes.twinx()
        shown = [result for result in results if result.jumps]
        memory.plot(
            [getattr(r, key) for r in shown], [r.peak_rss_mb for r in shown], "^:", color="grey", label="memory"
        )
        memory.set(ylabel="peak resident memory (MB)")
        for scale in (axes, memory):
            scale.set_ylim(0, 1.35 * scale.get_ylim()[1])
        axes.grid(alpha=0.3)
        lines = [*axes.get_lines(), *memory.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=8, loc="upper left")
    for kind in ("png", "svg"):
        figure.savefig(folder / f"simulation-speed.{kind}", dpi=150)


def grown(options: argparse.Namespace) -> tuple[list[Result], list[Result]]:
    """Results over workers, each with the same load, and over requests."""
    over_workers, over_requests = [], []
    for num_workers in options.growth_workers:
        speed = options.speed * num_workers / options.workers
        for jumps in (True, False):
            num_requests = options.requests if jumps else options.stepping_requests
            over_workers.append(measured(options.trace, speed, num_workers, num_requests, jumps))
            print(table(over_workers[-1:]).splitlines()[1], flush=True)
    for num_requests in options.growth_requests:
        over_requests.append(measured(options.trace, options.speed, options.workers, num_requests, True))
        print(table(over_requests[-1:]).splitlines()[1], flush=True)
    return over_workers, over_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="Mooncake format")
    parser.add_argument("--workers", type=int, default=64, help="half of them for prefill")
    parser.add_argument("--requests", type=int, default=5719, help="beyond the trace's length it begins again")
    parser.add_argument("--stepping-requests", type=int, default=1500, help="of runs without jumps")
    parser.add_argument("--speed", type=float, default=120.0, help="times of the trace are divided by this")
    parser.add_argument("--growth", action="store_true", help="also measure how the cost grows, and draw it")
    parser.add_argument("--growth-workers", type=int, nargs="*", default=GROWTH_WORKERS)
    parser.add_argument("--growth-requests", type=int, nargs="*", default=GROWTH_REQUESTS)
    parser.add_argument("--out", type=Path, default=Path("bench-out/simulation-speed"))
    options = parser.parse_args()
    args = options.trace, options.speed, options.workers
    results = [measured(*args, options.requests, True), measured(*args, options.stepping_requests, False)]
    print(table(results), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    over_workers, over_requests = grown(options) if options.growth else ([], [])
    if options.growth:
        draw(over_workers, over_requests, options.out)
    report = {
        "machine": machine_facts(),
        "results": [asdict(r) for r in (*results, *over_workers, *over_requests)],
    }
    (options.out / "simulation-speed.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
