"""How long to wait for what a busy machine may delay, and an event loop on whose clock nobody is late because of that."""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from math import inf
from typing import Any, TypeVar

Result = TypeVar("Result")
PATIENCE_S = 60.0
"""What should come at once may come so late, where other work has the cores."""
PATIENCE_MS = int(1000 * PATIENCE_S)
STEP_S = 0.02
"""The most that passes between two looks at the clock, beside what the loop meant to wait."""


class NotingSelector(selectors.DefaultSelector):
    """Remembers for how long it was told to wait."""

    meant_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.meant_s += inf if timeout is None else max(0.0, timeout)
        return super().select(timeout)


class SteadyLoop(asyncio.SelectorEventLoop):
    """Its clock leaves out the time in which this process stood still: timers at both ends of a socket then fire as they
    would have."""

    def __init__(self) -> None:
        self._noting = NotingSelector()
        self._now = self._looked_at = time.monotonic()
        super().__init__(self._noting)

    def time(self) -> float:
        now = time.monotonic()
        self._now += min(now - self._looked_at, self._noting.meant_s + STEP_S)
        self._looked_at, self._noting.meant_s = now, 0.0
        return self._now


def run_steadily(work: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run does."""
    with asyncio.Runner(loop_factory=SteadyLoop) as runner:
        return runner.run(work)
