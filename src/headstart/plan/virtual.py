"""Runs coroutines over a cluster's virtual time: bench's own code plays against a simulated cluster.

The event loop asks its selector to wait whenever no task can run. Here that means: let the cluster take steps until one of
them wakes a task. Nothing ever waits for real time, so tasks must sleep with `VirtualTime.sleep`, not with asyncio's.
"""

import asyncio
from collections.abc import Callable, Coroutine
from selectors import SelectorKey, SelectSelector
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
STEPS_PER_WAIT = 1024
"""SimCluster steps before the loop looks at its file descriptors again: that is how Ctrl-C gets through."""


class Steps(Protocol):
    """What SimCluster does, as far as time needs it."""

    def step(self) -> None: ...

    def at(self, time_s: float, action: Callable[[], None]) -> None: ...


class Now(Protocol):
    def now(self) -> float: ...


class VirtualTime:
    """One cluster's time for the tasks of one event loop. Satisfies core's Clock."""

    def __init__(self, cluster: Steps, clock: Now) -> None:
        self._cluster = cluster
        self._clock = clock
        self._has_woken = False

    def now(self) -> float:
        return self._clock.now()

    async def sleep(self, duration_s: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cluster.at(self.now() + duration_s, lambda: self.wake(over, None))
        await over

    def wake(self, waiting: "asyncio.Future[T]", result: T) -> None:
        """To be called from inside a step, with what a task awaits."""
        self._has_woken = True
        if not waiting.done():
            waiting.set_result(result)

    def pass_on(self) -> None:
        """Step the cluster until a task is woken."""
        for _ in range(STEPS_PER_WAIT):
            if self._has_woken:
                break
            self._cluster.step()
        self._has_woken = False

    def run(self, task: Coroutine[Any, Any, T]) -> T:
        """Run `task` to its end. What a step raises ends it."""

        def new_loop() -> asyncio.AbstractEventLoop:
            return asyncio.SelectorEventLoop(_Waits(self))

        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(task)


class _Waits(SelectSelector):
    """A selector for whose caller waiting is passing virtual time."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self._time = time

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._time.pass_on()
        return super().select(0)
