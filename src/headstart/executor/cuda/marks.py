"""Points on a stream: passed when all that was launched before them is done."""

import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A `torch.cuda.Event`, or the clock where work is done as it is launched."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Has the device come this far?"""
        ...

    def synchronize(self) -> None: ...


class HostMark:
    """Work on the CPU is done when its launch returns."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def new_mark(device: torch.device) -> Mark:
    """To be recorded on the current stream. A thread that waits for it sleeps."""
    if device.type == "cuda":
        return torch.cuda.Event(enable_timing=True, blocking=True)
    return HostMark()


def seconds_between(began: Mark, ended: Mark) -> float:
    """Both have been passed."""
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return float(began.elapsed_time(ended)) / 1e3
    assert isinstance(began, HostMark)
    assert isinstance(ended, HostMark)
    return ended.at - began.at
