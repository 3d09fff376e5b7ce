"""Pinned memory for what every step uploads and brings back: as many blocks as steps may be on their way, and one more."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.executor.cuda.columns import BLOCK_WIDTH

NUM_BLOCKS = 3


class StepStaging:
    """The step block on the host and on the device, int64 [max_places, BLOCK_WIDTH]."""

    def __init__(self, max_places: int, device: torch.device) -> None:
        on_card = device.type == "cuda"
        shape = (max_places, BLOCK_WIDTH)
        self.block = torch.zeros(shape, dtype=torch.int64, device=device)
        self._hosts = [torch.zeros(shape, dtype=torch.int64, pin_memory=on_card) for _ in range(NUM_BLOCKS)]
        self._copied = [torch.cuda.Event() if on_card else None for _ in range(NUM_BLOCKS)]
        self._turn = 0

    @contextmanager
    def filled(self, num_places: int) -> Iterator[NDArray[np.int64]]:
        """A zeroed host block [num_places, BLOCK_WIDTH] to fill; on leaving it is copied to the device, behind what was
        launched there before."""
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()  # the copy that last read this block, NUM_BLOCKS steps ago
        view: NDArray[np.int64] = host[:num_places].numpy()
        view[:] = 0
        yield view
        self.block[:num_places].copy_(host[:num_places], non_blocking=True)
        if copied is not None:
            copied.record()
        self._turn = (self._turn + 1) % NUM_BLOCKS


class Outbox:
    """Pinned copies of what steps drew, int64 [2, max_places] each."""

    def __init__(self, max_places: int, on_card: bool) -> None:
        self._hosts = [torch.zeros(2, max_places, dtype=torch.int64, pin_memory=on_card) for _ in range(NUM_BLOCKS)]
        self._turn = 0

    def fetch(self, drawn: torch.Tensor) -> torch.Tensor:
        """Memory that holds `drawn` once the stream has come this far, until NUM_BLOCKS - 1 fetches later."""
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % NUM_BLOCKS
        return host.copy_(drawn, non_blocking=True)
