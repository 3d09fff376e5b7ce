"""When open choices have to be looked at: each has one alarm, which is set again when it has rung.

Deadlines wait in a heap, the earliest first and of the same time the oldest choice's. Those of choices that have ended are
dropped when they surface, or when they may outnumber the rest.
"""

import heapq
from collections.abc import Callable, Collection, Iterator
from math import inf

from headstart.core.errors import InvariantError
from headstart.core.request import ChoiceRef
from headstart.scheduler.decode.states import Choice

_MIN_COMPACTION = 64


class Deadlines:
    """`find`: the open choice of a ref, None once it has ended."""

    def __init__(self, find: Callable[[ChoiceRef], Choice | None]) -> None:
        self._find = find
        self._heap: list[tuple[float, int, ChoiceRef]] = []  # (time, order of the choice, its ref)
        self._compact_at = _MIN_COMPACTION
        self.next_at = inf  # the earliest alarm's time

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, choice: Choice, at: float) -> None:
        """It must have none that is to ring yet."""
        heapq.heappush(self._heap, (at, choice.order, choice.ref))
        if len(self._heap) >= self._compact_at:
            self._compact()
        self.next_at = self._heap[0][0]

    def due(self, now: float) -> Iterator[Choice]:
        """Take the alarms up to `now`: whose they are, one after the other. More may be set meanwhile."""
        while self.next_at <= now:
            entry = heapq.heappop(self._heap)
            self.next_at = self._heap[0][0] if self._heap else inf
            choice = self._open(entry)
            if choice is not None:
                yield choice

    def check(self, refs: Collection[ChoiceRef]) -> None:
        """Raise InvariantError unless each of these, which are all open choices, has one alarm."""
        alarmed = [entry[2] for entry in self._heap if self._open(entry) is not None]
        if len(alarmed) != len(refs) or set(alarmed) != set(refs):
            raise InvariantError(f"{len(alarmed)} alarms for {len(refs)} open choices")

    def _open(self, entry: tuple[float, int, ChoiceRef]) -> Choice | None:
        _, order, ref = entry
        choice = self._find(ref)
        return choice if choice is not None and choice.order == order else None

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._open(entry) is not None]
        heapq.heapify(self._heap)
        self._compact_at = _MIN_COMPACTION + 2 * len(self._heap)
