"""Decode steps as captured CUDA graphs, one for each number of rows and tile of the attention kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)

Body = Callable[[int, int], torch.Tensor]
"""(rows, rows of the tile) -> logits [rows, vocabulary]. Reads all that changes from fixed addresses."""


def graph_sizes(most: int) -> tuple[int, ...]:
    """Rows that graphs are captured for: up to `most`, which is one of them."""
    return tuple(sorted({size for size in SIZES if size < most} | ({most} if most else set())))


@dataclass(frozen=True, slots=True)
class CapturedStep:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


class DecodeGraphs:
    """Captured steps by (rows, rows of the tile). All share one pool of memory: they run one after another."""

    def __init__(self, sizes: tuple[int, ...], body: Body) -> None:
        self.sizes = sizes
        self._body = body
        self._steps: dict[tuple[int, int], CapturedStep] = {}
        self._pool: tuple[int, int] | None = None

    def size_for(self, num_rows: int) -> int | None:
        """The smallest captured number of rows that holds `num_rows`; None if none does."""
        return next((size for size in self.sizes if size >= num_rows), None)

    def run(self, size: int, tile_rows: int) -> torch.Tensor:
        """Logits [size, vocabulary]; valid until the next step. Captures the step if it was not captured before."""
        step = self._steps.get((size, tile_rows))
        if step is None:
            step = self.capture(size, tile_rows)
        return step.replay()

    def capture(self, size: int, tile_rows: int) -> CapturedStep:
        """Record the step; the device is idle for it. Runs it once first, so that kernels are compiled."""
        self._body(size, tile_rows)
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._body(size, tile_rows)
        step = self._steps[size, tile_rows] = CapturedStep(graph, logits)
        return step
