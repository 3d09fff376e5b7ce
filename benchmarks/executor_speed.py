"""Speed of one executor on this machine: decode and prefill tokens per second, and what the products alone would allow.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/executor_speed.py [--threads 1 2] [--dtype auto] [--json FILE]

Every number is the best of several steps, so that neighbours on the machine disturb little; quote ratios of one run.
Processor time stands beside the clock: on a busy machine, processor time over threads is what an idle one would take
at best (its serial parts do not shrink with threads).
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, Row, SampleSpec
from headstart.core.layout import pages_for
from headstart.core.request import SamplingParams
from headstart.executor.build import ExecutorConfig, choose_dtype, make_executor
from headstart.executor.runner import TorchExecutor
from headstart.model.fp16_linear import Float16Linear
from headstart.model.source import DEMO_MODEL, WeightSource, resolve_model

GREEDY = SamplingParams(temperature=0.0)
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Cost:
    wall_s: float
    cpu_s: float  # of the whole process


class Bench:
    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self._step_id = 0

    def step(self, rows: list[Row]) -> Cost:
        self._step_id += 1
        began_cpu_s = time.process_time()
        self._executor.launch(Batch(self._step_id, tuple(rows)))
        while (output := self._executor.poll()) is None:
            time.sleep(0.0002)
        return Cost(output.elapsed_s, time.process_time() - began_cpu_s)

    def prefill(self, num_tokens: int, chunk: int) -> Cost:
        """A cold prompt through the first pages, in chunks."""
        pages = int32_array(range(pages_for(num_tokens, PAGE_SIZE)))
        starts = range(0, num_tokens, chunk)
        tokens = int32_array(np.arange(chunk) % 1000)
        costs = [self.step([Row(0, tokens[: num_tokens - start], start, pages)]) for start in starts]
        return Cost(sum(cost.wall_s for cost in costs), sum(cost.cpu_s for cost in costs))

    def decode(self, batch: int, shared: int, private: int, steps: int) -> Cost:
        """Best step of `batch` rows that have `shared` tokens in common and `private` tokens each."""
        common = list(range(shared // PAGE_SIZE))
        own = pages_for(private + steps + 1, PAGE_SIZE)
        context = np.arange(shared + private + steps + 1) % 1000
        costs = []
        for step in range(steps):
            rows = []
            for i in range(batch):
                start = shared + private + step
                first = len(common) + i * own
                pages = int32_array([*common, *range(first, first + own)])
                tokens = int32_array(context[: start + 1] + i * (np.arange(start + 1) >= shared))
                rows.append(Row(i, tokens[-1:], start, pages, SampleSpec(GREEDY, 0, step, tokens, start + 1)))
            costs.append(self.step(rows))
        return Cost(min(cost.wall_s for cost in costs), min(cost.cpu_s for cost in costs))


def products_s(executor: TorchExecutor, rows: int) -> float:
    """One step's matrix products and nothing else."""
    linears = [one for one in executor.model.modules() if isinstance(one, Float16Linear | torch.nn.Linear)]
    dtype = executor.model.dtype
    inputs = {one.in_features: torch.randn(rows, one.in_features, dtype=dtype) for one in linears}
    return best_of(lambda: [one(inputs[one.in_features]) for one in linears])


def best_of(work: Callable[[], object], times: int = 7) -> float:
    with torch.inference_mode():
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure(threads: int, dtype: str, num_prompt: int) -> list[dict[str, Any]]:
    source = WeightSource(resolve_model(DEMO_MODEL))
    began = time.perf_counter()
    executor = make_executor(ExecutorConfig(source, PAGE_SIZE, dtype=dtype, num_pages=2048, num_threads=threads))
    executor.warm_up()
    loaded_s = time.perf_counter() - began
    executor.pool.data.normal_()
    bench = Bench(executor)
    rows: list[dict[str, Any]] = [{"threads": threads, "case": "load and warm up", "s": loaded_s}]
    for batch, shared, private in ((1, 0, 128), (1, 0, 2048), (8, 0, 128), (16, 0, 128), (8, 2048, 64), (16, 6144, 64)):
        cost = bench.decode(batch, shared, private, steps=8)
        case = f"decode {batch} x (shared {shared} + {private})"
        rows.append(row(threads, case, batch, cost, products_s(executor, batch)))
    cost = bench.prefill(num_prompt, 512)
    products = products_s(executor, 512) * num_prompt / 512
    rows.append(row(threads, f"prefill {num_prompt} in chunks of 512", num_prompt, cost, products))
    executor.close()
    return rows


def row(threads: int, case: str, tokens: int, cost: Cost, products: float) -> dict[str, Any]:
    return {
        "threads": threads,
        "case": case,
        "s": cost.wall_s,
        "cpu_s": cost.cpu_s,
        "tok_s": tokens / cost.wall_s,
        "cpu_tok_s": tokens * threads / cost.cpu_s,
        "products_s": products,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "dtype": choose_dtype(args.dtype, "cpu"),
    }
    print(facts)
    results = [row for threads in args.threads for row in measure(threads, args.dtype, args.prompt)]
    for one in results:
        speed = ""
        if "tok_s" in one:
            speed = (
                f"{one['tok_s']:8.1f} tok/s; processor {one['cpu_s'] * 1e3:9.1f} ms {one['cpu_tok_s']:8.1f} tok/s; "
                f"products alone {one['products_s'] / one['s']:.0%}; load {one['load']:.1f}"
            )
        print(f"{one['threads']} threads  {one['case']:36} {one['s'] * 1e3:9.1f} ms {speed}")
    if args.json:
        args.json.write_text(json.dumps({"facts": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
