"""Speed of one executor on this machine: decode and prefill tokens per second, and what the products alone would allow.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/executor_speed.py [--threads 1 2] [--dtype auto] [--json FILE]

Every number is the best of several steps, so that neighbours on the machine disturb little; quote ratios of one run.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
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
from headstart.model.linear import Float16Linear
from headstart.model.source import DEMO_MODEL, WeightSource, resolve_model

GREEDY = SamplingParams(temperature=0.0)
PAGE_SIZE = 16


class Bench:
    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self._step_id = 0

    def step_s(self, rows: list[Row]) -> float:
        self._step_id += 1
        self._executor.launch(Batch(self._step_id, tuple(rows)))
        while (output := self._executor.poll()) is None:
            time.sleep(0.0002)
        return output.elapsed_s

    def prefill_s(self, num_tokens: int, chunk: int) -> float:
        """A cold prompt through the first pages, in chunks."""
        pages = int32_array(range(pages_for(num_tokens, PAGE_SIZE)))
        starts = range(0, num_tokens, chunk)
        tokens = int32_array(np.arange(chunk) % 1000)
        return sum(self.step_s([Row(0, tokens[: num_tokens - start], start, pages)]) for start in starts)

    def decode_s(self, batch: int, shared: int, private: int, steps: int) -> float:
        """Best step of `batch` rows that have `shared` tokens in common and `private` tokens each."""
        common = list(range(shared // PAGE_SIZE))
        own = pages_for(private + steps + 1, PAGE_SIZE)
        context = np.arange(shared + private + steps + 1) % 1000
        best = np.inf
        for step in range(steps):
            rows = []
            for i in range(batch):
                start = shared + private + step
                first = len(common) + i * own
                pages = int32_array([*common, *range(first, first + own)])
                tokens = int32_array(context[: start + 1] + i * (np.arange(start + 1) >= shared))
                rows.append(Row(i, tokens[-1:], start, pages, SampleSpec(GREEDY, 0, step, tokens, start + 1)))
            best = min(best, self.step_s(rows))
        return best


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
        seconds = bench.decode_s(batch, shared, private, steps=8)
        products = products_s(executor, batch)
        case = f"decode {batch} x (shared {shared} + {private})"
        rows.append({"threads": threads, "case": case, "s": seconds, "tok_s": batch / seconds, "products_s": products})
    seconds = bench.prefill_s(num_prompt, 512)
    products = products_s(executor, 512) * num_prompt / 512
    case = f"prefill {num_prompt} in chunks of 512"
    rows.append({"threads": threads, "case": case, "s": seconds, "tok_s": num_prompt / seconds, "products_s": products})
    executor.close()
    return rows


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
    for row in results:
        speed = f"{row['tok_s']:8.1f} tok/s" if "tok_s" in row else " " * 14
        share = f"  products alone {row['products_s'] / row['s']:.0%}" if "products_s" in row else ""
        print(f"{row['threads']} threads  {row['case']:36} {row['s'] * 1e3:9.1f} ms {speed}{share}")
    if args.json:
        args.json.write_text(json.dumps({"facts": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
