"""Virtual time: a clock that moves when told, and the events it moves between."""

import heapq
import itertools
from collections.abc import Callable, Sequence

NEVER = float("inf")


class VirtualClock:
    def __init__(self) -> None:
        self._now = 0.0
        self._arrivals: Sequence[float] | None = None

    def now(self) -> float:
        return self._now

    def advance_to(self, time_s: float) -> float:
        """Returns what time it is then: times in the past leave the clock where it is."""
        if time_s > self._now:
            self._now = time_s
        return self._now

    def as_of(self, arrivals: Sequence[float], act: Callable[[], None]) -> None:
        """Act as at the last of these times: something that arrived at them is only handed out now."""
        before, self._now, self._arrivals = self._now, arrivals[-1], arrivals
        try:
            act()
        finally:
            self._now, self._arrivals = before, None

    def arrivals(self, count: int) -> list[float]:
        """When each of the `count` tokens that are handed out arrived."""
        return [self._now] * count if self._arrivals is None else list(self._arrivals)


class Agenda:
    """What happens when. Actions of one time run in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def add(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time_s, next(self._order), action))

    def next_time(self) -> float:
        """NEVER where nothing is to happen."""
        return self._heap[0][0] if self._heap else NEVER

    def run_due(self, now: float) -> None:
        """Run everything due by `now`."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            heapq.heappop(heap)[2]()
