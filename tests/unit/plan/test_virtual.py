"""Coroutines over virtual time."""

import asyncio
from collections.abc import Callable

import pytest

from headstart.plan.virtual import VirtualTime
from headstart.sim.clock import NEVER, Agenda, VirtualClock


class Steps:
    """A cluster in which nothing happens but what is put on its agenda."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._agenda = Agenda()
        self.at: Callable[[float, Callable[[], None]], None] = self._agenda.add

    def step(self) -> None:
        next_time = self._agenda.next_time()
        assert next_time < NEVER, "nothing will ever happen again"
        self.clock.advance_to(next_time)
        self._agenda.run_due(next_time)


def test_tasks_wake_in_the_order_of_virtual_time() -> None:
    steps = Steps()
    time, woken = VirtualTime(steps, steps.clock), []

    async def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            await time.sleep(nap)
            woken.append((name, time.now()))

    async def all_of_them() -> None:
        await asyncio.gather(sleeper("a", 3600.0, 1.0), sleeper("b", 1800.0), sleeper("c", 0.0, 7200.0))

    time.run(all_of_them())
    assert woken == [("c", 0.0), ("b", 1800.0), ("a", 3600.0), ("a", 3601.0), ("c", 7200.0)]


def test_a_task_gets_what_a_step_hands_it() -> None:
    steps = Steps()
    time = VirtualTime(steps, steps.clock)

    async def waiter() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        steps.at(5.0, lambda: time.wake(answer, "done"))
        return await answer

    assert time.run(waiter()) == "done"
    assert time.now() == 5.0


def test_what_a_step_raises_ends_the_run() -> None:
    steps = Steps()
    time = VirtualTime(steps, steps.clock)

    async def waiter() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(AssertionError, match="nothing will ever happen again"):
        time.run(waiter())
