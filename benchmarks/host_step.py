"""Host time of one decode step: advance + schedule + update of the decode scheduler, with an executor that costs nothing.

    python benchmarks/host_step.py [--running 128] [--prompt 2048] [--page-size 16] [--steps 400] [--in-flight 1] [--record]

Every request has its own tail on one of 8 shared prefixes; outputs fill pages as they would in service. With --record the
scheduler is recorded, as under `headstart serve --record`, and the log's bytes per step are told. Prints the distribution
of the three calls' sum over the steps, garbage collection included, as one line of JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, BatchOutput, Sampled
from headstart.core.clock import MonotonicClock
from headstart.core.identity import PROTOCOL_VERSION, KVSpec, cache_namespace
from headstart.core.kv_layout import KVLayout
from headstart.core.messages import Message, Submit, WorkerRef
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.protocol import Scheduler
from headstart.transfer.digest import HostDigests
from headstart.worker.decision_log import DecisionLog
from headstart.worker.recorder import record_scheduler
from headstart.worker.schedulers import DecodeSpec, SchedulerPorts, make_scheduler

NUM_PREFIXES = 8


class NoTransport:
    """Satisfies `transfer.contract.Transport` for a scheduler that calls no peer."""

    def descriptor(self) -> bytes:
        return b""

    def connect(self, peer: str, descriptor: bytes) -> None:
        raise NotImplementedError

    disconnect = write = poll = connect

    def close(self) -> None:
        pass


def build(args: argparse.Namespace, sent: Counter[str], log_folder: Path) -> Scheduler:
    pages_each = -(-(args.prompt + args.steps + 64) // args.page_size)
    limits = DecodeLimits(args.running, 4 * args.running, 1 << 20, 1 << 20, 1 << 20, 128, gateway_silence_s=1e9)
    kv_spec = KVSpec(PROTOCOL_VERSION, "none", "none", KVLayout.full(args.page_size, 1, 1, 1, "bfloat16"))
    spec = DecodeSpec(WorkerRef("decode-0", 1), kv_spec, limits, args.running * pages_each, b"", 1)
    digests = HostDigests(np.zeros((1, 1), dtype=np.uint8))
    ports = SchedulerPorts(
        NoTransport(), digests, MonotonicClock(), lambda to, message: sent.update([type(message).__name__])
    )
    if not args.record:
        return make_scheduler(spec, ports)
    return record_scheduler(spec, ports, DecisionLog.create(log_folder, "decode", spec, 1 << 30))


def submit(scheduler: Scheduler, args: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    num_shared = args.prompt * 7 // 8
    prefixes = rng.integers(0, 50_000, (NUM_PREFIXES, num_shared))
    stop = StopCriteria(args.steps + 32)
    for number in range(args.running):
        tail = rng.integers(0, 50_000, args.prompt - num_shared)
        prompt = int32_array(np.concatenate((prefixes[number % NUM_PREFIXES], tail)))
        request = Request(ChoiceRef(str(number)), prompt, SamplingParams(), stop, cache_namespace(), 3600.0)
        message: Message = Submit(request)
        scheduler.handle("gateway", message)


def answer(batch: Batch) -> BatchOutput:
    rows = [row for row in batch.rows if row.sample is not None]
    return BatchOutput(batch.step_id, tuple(Sampled(row.row_id, ((row.start * 7919 + 1) % 50_000,)) for row in rows))


def one_step(scheduler: Scheduler, in_flight: deque[Batch], max_in_flight: int) -> dict[str, float]:
    """Launch one step, end the oldest if as many are in flight as may be. Seconds of each call."""
    t0 = time.perf_counter()
    scheduler.advance()
    t1 = time.perf_counter()
    batch = scheduler.schedule()
    t2 = time.perf_counter()
    assert batch is not None
    in_flight.append(batch)
    if len(in_flight) < max_in_flight:
        return {"advance": t1 - t0, "schedule": t2 - t1, "update": 0.0}
    output = answer(in_flight.popleft())
    t3 = time.perf_counter()
    scheduler.update(output)
    t4 = time.perf_counter()
    return {"advance": t1 - t0, "schedule": t2 - t1, "update": t4 - t3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--in-flight", type=int, default=1, choices=[1, 2], help="steps in flight")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headstart-decisions-") as folder:
        print(json.dumps(measure(args, Path(folder))))


def measure(args: argparse.Namespace, log_folder: Path) -> dict[str, Any]:
    sent: Counter[str] = Counter()
    scheduler = build(args, sent, log_folder)
    submit(scheduler, args)
    in_flight: deque[Batch] = deque()
    while scheduler.load().counters.get("output_tokens", 0) < args.running:
        one_step(scheduler, in_flight, args.in_flight)
    num_bytes = log_bytes(log_folder)
    parts = [one_step(scheduler, in_flight, args.in_flight) for _ in range(args.steps)]
    sums = sorted(1e3 * sum(part.values()) for part in parts)
    return {
        "running": args.running,
        "prompt": args.prompt,
        "page_size": args.page_size,
        "steps": args.steps,
        "in_flight": args.in_flight,
        "load_average": os.getloadavg()[0],
        "ms_p10": round(sums[len(sums) // 10], 3),
        "ms_median": round(statistics.median(sums), 3),
        "ms_mean": round(statistics.fmean(sums), 3),
        "ms_p99": round(sums[int(0.99 * len(sums))], 3),
        **{f"ms_mean_{name}": round(1e3 * statistics.fmean(p[name] for p in parts), 3) for name in parts[0]},
        "log_bytes_per_step": round((log_bytes(log_folder) - num_bytes) / args.steps),
        "messages": dict(sent),
    }


def log_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    main()
