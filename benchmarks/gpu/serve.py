"""`headstart serve` on one card under load: the tables of a GPU's users, beside SGLang's on the same shapes.

    python benchmarks/gpu/serve.py qwen3-1.7b --loads source-128 plain-128 plain-1 --out OUT

Random weights by shape, fp8 KV, pages of 64. Loads: `source-N`: 20 prefixes, each sent once before, then requests that
continue them, N clients in a closed loop, lengths scaled to what the card's memory holds (on an H200: 49,984 + 4,500 for
the 1.7B, 34,816 + 3,134 for the 8B); `plain-N`: 1,024 +- 100 tokens in, 256 out, nothing shared. The load's process has
cores of its own. The middle rate counts the answers that ended in the middle half of all.
"""

import argparse
import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from deployment import Deployment, running
from model_folder import make_folder

from headstart.bench.client import PerfClock
from headstart.bench.load_generator import Pace
from headstart.bench.measure import ReportRow, RunEnvironment, RunSpec, measure
from headstart.bench.target import Address, connect, open_http
from headstart.bench.workload import Length, NoReuse, SharedPrefix, TokenSource, Workload

LOAD_CORES = 3
SOURCE_LENGTHS = {"qwen3-1.7b": (49_984, 4_500), "qwen3-8b": (34_816, 3_134), "tiny": (512, 64)}
"""Prefix and suffix that fill an H200, by model."""
NUM_GROUPS = 20


@dataclass(frozen=True)
class Load:
    kind: str  # source or plain
    concurrency: int
    scale: float
    num_requests: int

    def workload(self, model: str, seed: int) -> Workload:
        if self.kind == "plain":
            return NoReuse(self.num_requests, Length(1_024, sd=100), Length(256)).build(seed)
        prefix, suffix = (int(length * self.scale) for length in SOURCE_LENGTHS[model])
        each = max(1, self.num_requests // NUM_GROUPS)
        question = Length(suffix, sd=suffix / 9)
        return SharedPrefix(NUM_GROUPS, each, Length(prefix), question, Length(350, sd=100)).build(seed)


def load_of(name: str, args: argparse.Namespace) -> Load:
    kind, _, concurrency = name.partition("-")
    count = int(concurrency)
    wanted = {1: 8, 16: 80, 32: 320, 128: 400}.get(count, 2 * count) if kind == "source" else max(12, 8 * count)
    return Load(kind, count, args.scale, args.requests or wanted)


async def play(url: str, load: Load, model: str, seed: int) -> ReportRow:
    async with open_http(Address(url, "headstart", "auto", "", "", 1.0)) as http:
        clock = PerfClock()
        target = await connect(Address(url, "headstart", "auto", "", "", 1.0), http, clock)
        run_spec = RunSpec(load.workload(model, seed), {}, Pace(load.concurrency), seed)
        row = await measure(run_spec, target, RunEnvironment(TokenSource(1_000, 150_000), clock, keeps_requests=True))
    row["middle_request_throughput"] = middle_rate(row["requests"])
    return row


def middle_rate(requests: Any) -> float:
    """Answers a second over the middle half of all answers, in the order of their ends."""
    ends = sorted(each["arrivals"][-1][0] for each in requests if each["phase"] == "sample" and each["arrivals"])
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / max(1e-9, ends[last] - ends[first])


def line(model: str, name: str, row: ReportRow) -> str:
    value = lambda key: f"{row[key]:.2f}"  # noqa: E731
    return (
        f"{model:12} {name:11} {row['request_throughput']:.2f} / {row['middle_request_throughput']:.2f} req/s  "
        f"TTFT p50 {row['median_ttft_ms'] / 1e3:.3f} s  TPOT p50 {value('median_tpot_ms')} ms  "
        f"ITL p50 {value('median_itl_ms')} p99 {value('p99_itl_ms')} ms  out {row['output_throughput']:.0f} tok/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--loads", nargs="+", default=["source-128"])
    parser.add_argument("--scale", type=float, default=1.0, help="of prefix and suffix: the pool's size over an H200's")
    parser.add_argument("--requests", type=int, default=0, help="measured requests of each load; 0: by concurrency")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--flags", default="", help="more flags for headstart serve, separated by spaces")
    parser.add_argument("--num-prefill", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/headstart-models"))
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = make_folder(args.model, args.folder)
    flags = ["--device", args.device, "--load-format", "dummy", str(folder), *args.flags.split()]
    if args.device == "cuda" and "--kv-cache-dtype" not in flags:
        flags += ["--kv-cache-dtype", "fp8_e4m3"]
    cores = sorted(os.sched_getaffinity(0))
    apart = cores[-LOAD_CORES:] if len(cores) > 2 * LOAD_CORES else cores
    os.sched_setaffinity(0, set(cores) - set(apart) or set(cores))  # the server's, inherited
    report: dict[str, Any] = {"model": args.model, "flags": flags, "runs": {}}
    path = args.out / f"serve-{args.model}-{os.getpid()}.json"
    with running(Deployment("gpu", args.num_prefill, cache=True, flags=tuple(flags))) as server:
        print(f"ready in {server.ready_s:.1f} s", flush=True)
        report["ready_s"] = server.ready_s
        os.sched_setaffinity(0, set(apart))
        for name in args.loads:
            row = asyncio.run(play(server.base_url, load_of(name, args), args.model, args.seed))
            print(line(args.model, name, row), flush=True)
            row.pop("requests")
            report["runs"][name] = row
            report["cluster"] = httpx.get(f"{server.base_url}/cluster", timeout=10).json()
            path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
