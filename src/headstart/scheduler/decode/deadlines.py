"""One heap of all times at which the scheduler has to look again: each open choice's deadline, and two timers.

Setting a time replaces the owner's former one. What is outdated in the heap is dropped when it surfaces, or when it may
outnumber the rest. Of the same time the oldest choice comes first.
"""

import heapq
from collections.abc import Collection, Iterator
from enum import Enum
from itertools import count
from math import inf

from headstart.core.errors import InvariantError
from headstart.scheduler.decode.states import Choice

_MIN_COMPACTION = 64


class Timer(Enum):
    """What has a deadline besides choices."""

    PEERS = "peers"  # something came in, or Hello, Prefill or Cancel is to be repeated, or a wait for a worker ends
    GATEWAYS = "gateways"  # one has been silent for too long


Owner = Choice | Timer


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Owner]] = []  # (time, order of the choice, tie, owner)
        self._times: dict[Owner, float] = {}
        self._ties = count()
        self._compact_at = _MIN_COMPACTION
        self.next_at = inf  # the earliest time, that of an outdated entry included

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, owner: Owner, at: float) -> None:
        if at == inf:
            self.drop(owner)
        elif self._times.get(owner) != at:
            self._times[owner] = at
            order = owner.order if isinstance(owner, Choice) else 0
            heapq.heappush(self._heap, (at, order, next(self._ties), owner))
            if len(self._heap) >= self._compact_at:
                self._compact()
            self.next_at = self._heap[0][0]

    def drop(self, owner: Owner) -> None:
        """The owner waits for no time any more."""
        self._times.pop(owner, None)

    def expire(self, now: float) -> Iterator[Owner]:
        """Take the times up to `now`: whose they are, one after the other. More may be set meanwhile."""
        while self.next_at <= now:
            entry = heapq.heappop(self._heap)
            self.next_at = self._heap[0][0] if self._heap else inf
            if self._is_current(entry):
                del self._times[entry[-1]]
                yield entry[-1]

    def check(self, choices: Collection[Choice]) -> None:
        """Raise InvariantError unless exactly the open choices have a deadline, and all that have one are in the heap."""
        if {owner for owner in self._times if isinstance(owner, Choice)} != set(choices):
            raise InvariantError(f"not exactly the {len(choices)} open choices have a deadline")
        if {entry[-1] for entry in self._heap if self._is_current(entry)} != self._times.keys():
            raise InvariantError("a deadline was lost")

    def _is_current(self, entry: tuple[float, int, int, Owner]) -> bool:
        return self._times.get(entry[-1]) == entry[0]

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_current(entry)]
        heapq.heapify(self._heap)
        self._compact_at = _MIN_COMPACTION + 2 * len(self._heap)
