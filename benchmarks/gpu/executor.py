"""How long is a step of the whole executor, host included: two steps in flight, tokens from step to step on the card?

Random weights, fp8 KV, greedy rows unless said otherwise. `step` is the time from one step's end to the next one's on
the clock; `graph` the captured step alone, replayed back to back; what is between them is the host's doing.
"""

import argparse
import cProfile
import io
import json
import pstats
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common import Card, print_table, save
from msgspec.structs import replace

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.batch import Batch, PendingToken, Row, SampleSpec
from headstart.core.layout import pages_for
from headstart.core.request import SamplingParams
from headstart.executor.build import CardLimits, ExecutorConfig, make_executor
from headstart.executor.cuda.executor import CudaExecutor
from headstart.executor.cuda.graphs import StepSize, fitting
from headstart.model.source import WeightSource

PAGE = 64
ROOM_FOR_ALL = 130e9  # bytes of a card that holds 20 prefixes of 50,000 tokens of the 1.7B model
MODELS = {
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "tie_word_embeddings": False},
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0)


def write_model(name: str, folder: Path) -> WeightSource:
    config = MODELS[name] | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return WeightSource(folder, "dummy")


@dataclass
class Line:
    """One running request."""

    table: Int32Array
    kv_len: int  # tokens with KV
    params: SamplingParams
    num_drawn: int = 0
    waits_for: PendingToken | None = None


@dataclass
class Load:
    """Decode rows on shared prefixes, driven with two steps in flight."""

    executor: CudaExecutor
    lines: list[Line]
    free: list[int]
    step_id: int = 0
    host_s: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls, executor: CudaExecutor, rows: int, groups: int, prefix: int, private: int, params: SamplingParams = GREEDY
    ) -> "Load":
        rng = np.random.default_rng(0)
        free = rng.permutation(executor.pool.num_pages).tolist()
        prefixes = [[free.pop() for _ in range(prefix // PAGE)] for _ in range(groups)]
        lines = []
        for row in range(rows):
            own = private + int(rng.integers(-private // 10, private // 10 + 1))
            shared = prefixes[row % groups] if groups else []
            pages = shared + [free.pop() for _ in range(pages_for(own + 1, PAGE))]
            lines.append(Line(int32_array(pages), len(shared) * PAGE + own, replace(params, seed=params.seed + row)))
        return cls(executor, lines, free, step_id=int(time.monotonic() * 1000))

    def launch(self, chunk: Row | None = None) -> None:
        self.step_id += 1
        rows = []
        for row_id, line in enumerate(self.lines):
            if line.kv_len >= len(line.table) * PAGE:
                line.table = int32_array([*line.table, self.free.pop()])
            context = CONTEXT[: 64 + line.num_drawn - (line.waits_for is not None)]
            spec = SampleSpec(line.params, 0, line.num_drawn, context, 64)
            tokens = EMPTY if line.waits_for else CONTEXT[:1]
            rows.append(Row(row_id, tokens, line.kv_len, line.table, spec, pending=line.waits_for))
            line.kv_len += 1
            line.num_drawn += 1
            line.waits_for = PendingToken(self.step_id, row_id)
        if chunk is not None:
            rows.append(chunk)
        batch = Batch(self.step_id, tuple(rows))
        made = time.perf_counter()
        self.executor.launch(batch)
        self.host_s.append(time.perf_counter() - made)

    def finish(self) -> float:
        """-> seconds in the poll that hands the output out."""
        while True:
            began = time.perf_counter()
            if self.executor.poll() is not None:
                return time.perf_counter() - began

    def measure(self, steps: int = 100) -> dict[str, float]:
        for _ in range(12):
            self.launch()
            self.finish()
        self.host_s.clear()
        self.launch()
        ends, polls = [], []
        for _ in range(steps):
            self.launch()
            polls.append(self.finish())
            ends.append(time.perf_counter())
        self.finish()
        for line in self.lines:
            line.waits_for = None
        return {
            "step ms": float(np.median(np.diff(ends))) * 1e3,
            "p90": float(np.percentile(np.diff(ends), 90)) * 1e3,
            "launch ms": float(np.median(self.host_s)) * 1e3,
            "launch p99": float(np.percentile(self.host_s, 99)) * 1e3,
            "poll ms": float(np.median(polls)) * 1e3,
        }

    def graph_ms(self, repeats: int = 40) -> float:
        """The captured step of these rows alone, as the last step left the buffers."""
        launcher = self.executor._launcher
        size = StepSize(fitting(launcher._sizes, len(self.lines)), launcher._rows.plans._rows)
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(repeats):
            launcher.graphs.run(size)
        ended.record()
        torch.cuda.synchronize()
        return began.elapsed_time(ended) / repeats

    def profile(self, chunk: Row | None = None, steps: int = 100) -> None:
        """Print where the host's time goes."""
        profiler = cProfile.Profile()
        for _ in range(steps):
            profiler.enable()
            self.launch(chunk)
            profiler.disable()
            for line in self.lines:
                line.waits_for = None
            self.finish()
        out = io.StringIO()
        pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(14)
        print(f"{steps} steps", "\n".join(out.getvalue().splitlines()[2:]), flush=True)

    def beside_chunk(self, num_new: int, cached: int) -> float:
        """Seconds of a step in which a chunk runs beside the rows, one step in flight."""
        pages = int32_array(self.free[: pages_for(cached + num_new, PAGE)])
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            spec = SampleSpec(GREEDY, 0, 0, CONTEXT[:64], 64)
            self.launch(Row(len(self.lines), int32_array(np.zeros(num_new)), cached, pages, spec))
            for line in self.lines:
                line.waits_for = None
            self.finish()
            times.append(time.perf_counter() - began)
        return min(times[1:])


CONTEXT = int32_array(np.arange(4096))
EMPTY = int32_array([])


def fill(pool: torch.Tensor) -> None:
    """Random KV, without an infinity or NaN."""
    flat = pool.view(-1)
    for first in range(0, len(flat), 1 << 29):
        part = flat[first : first + (1 << 29)]
        part.copy_(torch.randn(part.shape, device=pool.device, dtype=torch.float16).to(pool.dtype))


def run(name: str, large: bool, profile: bool, results: list[dict]) -> None:
    prefix, private = (50_000, 4_675) if large else (27_520, 2_482)
    cases = [
        ("alone", 1, 0, 0, 1024, GREEDY), ("plain", 16, 0, 0, 1024, GREEDY), ("plain", 128, 0, 0, 1024, GREEDY),
        ("plain, temperature", 128, 0, 0, 1024, SamplingParams(temperature=0.8, seed=1)),
        ("plain, top-p", 1, 0, 0, 1024, SamplingParams(temperature=0.8, top_p=0.95, top_k=20, seed=1)),
        ("plain, top-p", 128, 0, 0, 1024, SamplingParams(temperature=0.8, top_p=0.95, top_k=20, seed=1)),
        ("plain, penalties", 128, 0, 0, 1024, SamplingParams(temperature=0.8, presence_penalty=0.5, seed=1)),
        ("long", 1, 1, prefix, 300, GREEDY),
    ]  # fmt: skip
    tokens = 400_000
    if name == "1.7B":
        cases.append(("source shape", 128, 20, prefix, private, GREEDY))
        tokens = int(20 * prefix + 128 * private * 1.15) + 40_000
    with tempfile.TemporaryDirectory() as folder:
        source = write_model(name, Path(folder))
        began = time.perf_counter()
        config = ExecutorConfig(
            source, PAGE, tokens // PAGE, "cuda", kv_dtype="fp8_e4m3", self_test=False,
            card=CardLimits(128, 128, 65_536),
        )  # fmt: skip
        executor = make_executor(config)
        loaded = time.perf_counter()
        executor.warm_up()
        warm = time.perf_counter()
    print(f"{name}: loaded in {loaded - began:.1f} s, warm in {warm - loaded:.1f} s", flush=True)
    assert isinstance(executor, CudaExecutor)
    fill(executor.pool.data)
    for label, rows, groups, shared, own, params in cases:
        load = Load.of(executor, rows, groups, shared, own, params)
        found = {"model": name, "case": label, "rows": rows, "row": shared + own, **load.measure()}
        found["graph ms"] = load.graph_ms()
        results.append(found)
        print(found, flush=True)
    if profile:
        Load.of(executor, 128, 0, 0, 1024).profile()
        Load.of(executor, 128, 0, 0, 1024, SamplingParams(presence_penalty=0.5)).profile()
    for rows, num_new, cached in (
        (16, 200, 0), (16, 512, 0), (128, 512, 0), (16, 1024, 0), (16, 2048, 0), (128, 2048, 0), (16, 8192, 0),
        (16, 4096, 16_384), (1, 200, 16_384),
    ):  # fmt: skip
        load = Load.of(executor, rows, 0, 0, 1024)
        ms = load.beside_chunk(num_new, cached) * 1e3
        results.append({"model": name, "case": f"chunk of {num_new} over {cached}", "rows": rows, "step ms": ms})
    results.append({"model": name, "case": "load s / warm-up s", "step ms": loaded - began, "graph ms": warm - loaded})
    executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--models", nargs="+", default=["1.7B"])
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes")
    args = parser.parse_args()
    card = Card.measure(smoke=False)
    large = torch.cuda.get_device_properties(0).total_memory > ROOM_FOR_ALL
    results: list[dict] = []
    for name in args.models:
        run(name, large, args.profile, results)
        torch.cuda.empty_cache()
    print_table(results)
    save(args, "executor", card, results)


if __name__ == "__main__":
    main()
