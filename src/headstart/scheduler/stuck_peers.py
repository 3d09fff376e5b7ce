"""Which peers to ask the launcher to kill: those whose transfers keep pages of our pool unusable past their deadline.

A page that a peer may still write, or that an open write may still read, is not reusable before the peer's word or the
proof of its end. So once such pages exceed a share of the pool, the end of each peer that has been stuck for long enough
is requested, and requested again after as long. Either half of a transfer reports its stuck peers here.
"""

from collections.abc import Mapping
from typing import NamedTuple

from headstart.core.messages import WorkerRef

MAX_STUCK_SHARE = 0.1
"""Share of the pool that stuck peers may keep unusable before the end of one is requested."""


class Stuck(NamedTuple):
    since: float
    num_pages: int


class StuckPeers:
    """Remembers whose end was requested, and when."""

    def __init__(self, num_pages: int) -> None:
        self._max_pages = MAX_STUCK_SHARE * num_pages
        self._first_asked: dict[WorkerRef, float] = {}
        self._last_asked: dict[WorkerRef, float] = {}

    def hold_too_much(self, num_pages: int) -> bool:
        """Whether `num_pages` stuck pages are more than the pool can spare."""
        return num_pages > self._max_pages

    def to_kill(self, stuck: Mapping[WorkerRef, Stuck], kill_after_s: float, now: float) -> list[WorkerRef]:
        """The peers whose end is to be requested now."""
        if not self.hold_too_much(sum(peer.num_pages for peer in stuck.values())):
            return []
        due = [
            worker for worker, peer in stuck.items() if now >= self._last_asked.get(worker, peer.since) + kill_after_s
        ]
        for worker in due:
            self._first_asked.setdefault(worker, now)
            self._last_asked[worker] = now
        return sorted(due, key=str)

    def any_asked_before(self, time: float) -> bool:
        """Whether a peer's end was requested at `time` or earlier, and the peer is still stuck."""
        return any(asked <= time for asked in self._first_asked.values())

    def forget(self, worker: WorkerRef) -> None:
        """This peer is no longer stuck, or its process has ended."""
        self._first_asked.pop(worker, None)
        self._last_asked.pop(worker, None)
