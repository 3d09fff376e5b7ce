"""The steps that a simulated device has taken in and not handed out yet.

    (none) ──start──► one runs until its end, the next waits ──take_ended──► the next runs from there

A step starts when it is launched or when the one before it ends, whichever is later.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from headstart.core.clock import Clock
from headstart.core.errors import InvariantError

Work = TypeVar("Work")


@dataclass(slots=True, eq=False)
class Step(Generic[Work]):
    """What a device does from `started_at` to `finish_at`."""

    work: Work
    started_at: float
    finish_at: float


class StepsInFlight(Generic[Work]):
    def __init__(self, clock: Clock, max_steps: int) -> None:
        self.max_steps = max_steps
        self._clock = clock
        self._steps: deque[Step[Work]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> Step[Work] | None:
        return self._steps[0] if self._steps else None

    @property
    def finish_at(self) -> float | None:
        """When the oldest step ends."""
        return self._steps[0].finish_at if self._steps else None

    @finish_at.setter
    def finish_at(self, at: float | None) -> None:
        """Stretch or shrink the step that runs, as a neighbour on the same machine does."""
        if at is not None:
            self._steps[0].finish_at = at

    def works(self) -> list[Work]:
        """What the steps do, the oldest first."""
        return [step.work for step in self._steps]

    def check_room(self) -> None:
        if len(self._steps) >= self.max_steps:
            raise InvariantError(f"a step is launched with {len(self._steps)} in flight")

    def start(self, work: Work, duration_s: float) -> Step[Work]:
        self.check_room()
        started_at = self._clock.now()
        if self._steps and self._steps[-1].finish_at > started_at:
            started_at = self._steps[-1].finish_at
        step = Step(work, started_at, started_at + duration_s)
        self._steps.append(step)
        return step

    def take_ended(self) -> Step[Work] | None:
        """The oldest step, if it has ended."""
        if not self._steps or self._clock.now() < self._steps[0].finish_at:
            return None
        return self._steps.popleft()

    def clear(self) -> None:
        self._steps.clear()
