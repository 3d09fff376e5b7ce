"""What the GPU benchmarks share: the card's own ceilings, a decode workload over a real pool, and paired timing.

Every script prints the card, its copy bandwidth and matrix rate, then a short table, and writes JSON. `--smoke` runs
tiny shapes wherever Triton can (also its interpreter), to check the script and not the card.
"""

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstart.attention.device_plan import DevicePlan
from headstart.attention.plan import Plan, Tiling, build_plan
from headstart.attention.triton_attention import (
    HeadShape,
    LayerKV,
    Partials,
    PlannedAttention,
    RowTables,
    TileShape,
    UngroupedDecode,
    decode_tiling,
)

NO_SHARING = 1 << 30


@dataclass(frozen=True)
class Card:
    """Measured in this process: the ceilings that every figure is a fraction of."""

    name: str
    device: str
    num_sms: int
    copy_bytes_per_s: float  # read + written
    matmul_flop_per_s: float

    @classmethod
    def measure(cls, smoke: bool) -> "Card":
        if smoke:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            return cls("smoke", device, 2, 1e12, 1e12)
        props = torch.cuda.get_device_properties(0)
        copy_s, matmul_s = copy_seconds(1 << 30), matmul_seconds(8192)
        card = cls(props.name, "cuda", props.multi_processor_count, 8 * (1 << 30) / copy_s, 2 * 8192**3 / matmul_s)
        print(f"# {card.name}: copy {card.copy_bytes_per_s / 1e12:.3f} TB/s, "
              f"8192^3 bf16 {card.matmul_flop_per_s / 1e12:.0f} TFLOP/s, torch {torch.__version__}")  # fmt: skip
        return card


def copy_seconds(num_floats: int) -> float:
    source = torch.randn(num_floats, device="cuda")
    target = torch.empty_like(source)
    return float(np.median(time_calls([lambda: target.copy_(source)])[0]))


def matmul_seconds(size: int) -> float:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return float(np.median(time_calls([lambda: a @ b])[0]))


def arguments(description: str | None, short: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    if short:
        parser.add_argument("--short", action="store_true", help="fewer shapes")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the JSON result")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, timings mean nothing")
    return parser.parse_args()


def save(args: argparse.Namespace, name: str, card: Card, rows: list[dict]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    slug = card.name.lower().replace(" ", "-")
    path = args.out / f"{slug}_{name}.json"
    path.write_text(json.dumps({"card": asdict(card), "rows": rows}, indent=1) + "\n")


def print_table(rows: list[dict]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def time_calls(calls: list[Callable[[], object]], repeats: int = 30, warmups: int = 5) -> list[np.ndarray]:
    """Seconds of each call, `repeats` times, in the order A B .. B A so that drift falls on all alike."""
    if not torch.cuda.is_available():
        times = []
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(np.array([time.perf_counter() - start]))
        return times
    for call in calls:
        for _ in range(warmups):
            call()
    order = list(range(len(calls)))
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(repeats // 2):
        for i in order + order[::-1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[i]()
            end.record()
            marks[i].append((start, end))
    torch.cuda.synchronize()
    return [np.array([start.elapsed_time(end) / 1e3 for start, end in pairs]) for pairs in marks]


def in_graph(call: Callable[[], object]) -> Callable[[], object]:
    """`call` captured once; on a CPU the call itself. Keeps alive what the call holds: the graph reads its memory."""
    if not torch.cuda.is_available():
        return call
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(graph: torch.cuda.CUDAGraph = graph, holds: Callable[[], object] = call) -> None:
        graph.replay()

    return replay


@dataclass(frozen=True)
class Spread:
    median_s: float
    p10_s: float
    p90_s: float

    @classmethod
    def of(cls, times: np.ndarray) -> "Spread":
        return cls(*(float(np.percentile(times, q)) for q in (50, 10, 90)))


@dataclass(frozen=True)
class Workload:
    """`rows` decode rows over `groups` shared prefixes, each row with private tokens of its own."""

    rows: int
    groups: int
    prefix: int
    private: int
    kv_heads: int = 8
    group: int = 2  # query heads per KV head
    head_dim: int = 128
    page: int = 64
    fp8: bool = False
    layers: int = 3

    def small(self) -> "Workload":
        fields = asdict(self) | {"rows": 5, "groups": min(self.groups, 2), "prefix": 4 * self.page, "private": 70}
        return Workload(**fields | {"kv_heads": 2, "layers": 1, "page": 16, "head_dim": 64})

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.kv_heads * self.group, self.kv_heads, self.head_dim, self.head_dim**-0.5)

    @property
    def token_bytes(self) -> int:
        """KV of one token and layer."""
        return 2 * self.kv_heads * self.head_dim * (1 if self.fp8 else 2)


@dataclass(frozen=True)
class Scene:
    """A workload laid out in a pool of shuffled pages."""

    work: Workload
    device: str
    pool: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor]
    tables: list[np.ndarray]
    kv_lens: np.ndarray
    rows: RowTables
    q: torch.Tensor

    @classmethod
    def lay_out(cls, work: Workload, device: str, seed: int = 0) -> "Scene":
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        prefix_pages = work.prefix // work.page
        jitter = work.private // 10
        kv_lens = prefix_pages * work.page + work.private + rng.integers(-jitter, jitter + 1, work.rows)
        own = -(-kv_lens // work.page) - prefix_pages
        num_pages = work.groups * prefix_pages + int(own.sum()) + 1
        ids = rng.permutation(np.arange(1, num_pages, dtype=np.int32))
        prefixes = ids[: work.groups * prefix_pages].reshape(work.groups, prefix_pages)
        ends = work.groups * prefix_pages + np.cumsum(own)
        tables = [
            np.concatenate([prefixes[r % work.groups], ids[end - n : end]])
            for r, (end, n) in enumerate(zip(ends, own, strict=True))
        ]
        width = max(len(table) for table in tables)
        padded = np.zeros((work.rows, width), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        heads = work.heads
        return cls(
            work,
            device,
            random_pool((num_pages, work.kv_heads, work.layers, 2, work.page, work.head_dim), work.fp8, device),
            (torch.full((work.kv_heads,), 0.7, device=device), torch.full((work.kv_heads,), 1.3, device=device)),
            tables,
            kv_lens,
            RowTables(torch.from_numpy(padded).to(device), torch.from_numpy(kv_lens.astype(np.int32)).to(device)),
            torch.randn(work.rows, heads.num_q_heads, heads.head_dim, device=device).to(query_dtype(device)),
        )

    def kv(self, layer: int) -> LayerKV:
        return LayerKV.of_pool(self.pool, layer, self.scales if self.work.fp8 else None)

    @property
    def unique_tokens(self) -> int:
        prefix = self.work.prefix // self.work.page * self.work.page
        return int(self.kv_lens.sum()) - (self.work.rows - self.work.groups) * prefix

    def plan(self, tiling: Tiling) -> Plan:
        return build_plan(self.tables, self.kv_lens - 1, np.ones(self.work.rows, np.int64), tiling)

    def decode(self, card: Card, tile: TileShape, tiling: Tiling) -> Callable[[], object]:
        """All layers' planned attention, captured."""
        plan = self.plan(tiling)
        device_plan = DevicePlan(self.work.rows, len(plan.items), self.device)
        device_plan.upload(plan)
        partials = Partials.empty(self.work.heads, plan.num_slots, self.device)
        attention = PlannedAttention(self.work.heads, tile, partials, card.num_sms, causal=False)
        out = torch.empty_like(self.q)
        layers = [self.kv(layer) for layer in range(self.work.layers)]
        return in_graph(lambda: [attention(self.q, kv, self.rows, device_plan, out) for kv in layers])

    def ungrouped(self, tile: TileShape, chunk: int) -> Callable[[], object]:
        """All layers' plain split-KV attention, captured."""
        splits = -(-int(self.kv_lens.max()) // chunk)
        partials = Partials.empty(self.work.heads, splits * self.work.rows, self.device)
        attention = UngroupedDecode(self.work.heads, tile, partials, splits, chunk)
        out = torch.empty_like(self.q)
        layers = [self.kv(layer) for layer in range(self.work.layers)]
        return in_graph(lambda: [attention(self.q, kv, self.rows, out) for kv in layers])


def precompile(job: Callable[[Any], object], arguments: list[Any]) -> list[bool]:
    """Run each job in one of several processes, so that Triton's cache holds what it compiles. -> did it run?"""
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_Attempt(job), arguments))


@dataclass(frozen=True)
class _Attempt:
    job: Callable[[Any], object]

    def __call__(self, argument: Any) -> bool:
        try:
            self.job(argument)
            torch.cuda.synchronize()
        except Exception as error:  # a tile that does not fit the card
            print(f"{argument}: {type(error).__name__}: {str(error)[:100]}")
            return False
        return True


@dataclass(frozen=True)
class _Warm:
    arms_of: Callable[["Scene", Card], dict[str, Callable[[], object]]]

    def __call__(self, work: "Workload") -> None:
        """Every arm of a small workload that compiles to the same kernels."""
        small = replace(work, rows=2, groups=1, prefix=1024, private=300)
        for call in self.arms_of(Scene.lay_out(small, "cuda"), Card("", "cuda", 132, 1, 1)).values():
            call()


def warm_arms(
    arms_of: Callable[["Scene", Card], dict[str, Callable[[], object]]], works: list["Workload"], smoke: bool
) -> None:
    """Compile what the arms of `works` need, in parallel."""
    kinds = {(work.group, work.fp8, work.page, work.rows // work.groups): work for work in works}
    if not smoke:
        precompile(_Warm(arms_of), list(kinds.values()))


def compare(arms: dict[str, Callable[[], object]], repeats: int = 30) -> dict[str, Spread]:
    """Spread of each arm, timed in alternation."""
    return {name: Spread.of(times) for name, times in zip(arms, time_calls(list(arms.values()), repeats), strict=True)}


def query_dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float16


def random_pool(shape: tuple[int, ...], fp8: bool, device: str) -> torch.Tensor:
    dtype = torch.float8_e4m3fn if fp8 else query_dtype(device)
    pool = torch.empty(shape, dtype=dtype, device=device)
    step = max(1, (1 << 28) // int(np.prod(shape[1:])))
    for first in range(0, shape[0], step):
        part = pool[first : first + step]
        part.copy_(torch.randn(part.shape, device=device, dtype=torch.float16).to(dtype))
    return pool


def tiling_for(card: Card, work: Workload, tile: TileShape, **changes: Any) -> Tiling:
    """The decode tiling, without its bound on slots."""
    tiling = decode_tiling(work.heads, tile, work.page, card.num_sms, work.fp8)
    return replace(tiling, **{"max_slots": 1 << 20} | changes)
