"""Steps as captured CUDA graphs: by number of decode rows, tile of the attention kernel, and tokens of chunks.

A graph reads and writes fixed addresses; all that changes from step to step is uploaded before its replay. One that is
made for more rows or tokens than a step has leaves the rest empty.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
CHUNK_SIZES = (256, 512, 1024, 2048)
"""Tokens of chunks that steps are captured for. Longer ones keep the device busy for longer than their launch takes."""
MIXED_ROWS = 32
"""Decode rows beside chunks that steps are captured for, apart from the most."""


class StepSize(NamedTuple):
    """What a step is captured for."""

    num_rows: int
    tile_rows: int
    num_chunk_tokens: int = 0  # 0: decode rows alone


class StepResult(NamedTuple):
    """By place: what is drawn from, and the tokens that were given. Valid until the next step."""

    logits: torch.Tensor  # [places, vocabulary]
    inputs: torch.Tensor  # int64 [places]


Body = Callable[[StepSize], StepResult]


def graph_sizes(most: int) -> tuple[int, ...]:
    """Rows that graphs are captured for: up to `most`, which is one of them."""
    return tuple(sorted({size for size in SIZES if size < most} | ({most} if most else set())))


def mixed_sizes(most: int) -> tuple[int, ...]:
    """Decode rows that graphs with chunks are captured for."""
    return tuple(sorted({min(MIXED_ROWS, most), most})) if most else ()


def fitting(sizes: tuple[int, ...], wanted: int) -> int | None:
    """The smallest of the ascending `sizes` that holds `wanted`; None if none does."""
    return next((size for size in sizes if size >= wanted), None)


class StepGraphs:
    """Captured steps by size. All share one pool of memory: they run one after another."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._steps: dict[StepSize, tuple[torch.cuda.CUDAGraph, StepResult]] = {}
        self._pool: tuple[int, int] | None = None

    def run(self, size: StepSize) -> StepResult:
        """Replay the step; run its body where it was not captured, which takes the host longer."""
        if size not in self._steps:
            return self._body(size)
        graph, result = self._steps[size]
        graph.replay()
        return result

    def capture(self, size: StepSize) -> None:
        """Record the step; the device is idle for it. Runs it once first, so that kernels are compiled."""
        self._body(size)
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._body(size)
        self._steps[size] = (graph, result)
