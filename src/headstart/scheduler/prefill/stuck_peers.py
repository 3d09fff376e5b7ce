"""When a prefill worker asks for the end of a decode worker that stalls writes: their pages are pinned until it is gone.

Only where overdue writes pin more than a share of the pool, `kill_after_s` past the first deadline, and again after as long.
"""

from collections import Counter

from headstart.core.messages import KillRequest
from headstart.scheduler.prefill.decode_workers import DecodeWorkers
from headstart.scheduler.prefill.sender import Sender, Write
from headstart.scheduler.protocol import Send

OVERDUE_SHARE = 0.1
"""Share of the pool that overdue writes may pin before the end of a peer is asked for."""


class StuckPeers:
    def __init__(self, num_pages: int, kill_after_s: float, writes: Sender, peers: DecodeWorkers) -> None:
        self._max_overdue_pages = OVERDUE_SHARE * num_pages
        self._kill_after_s = kill_after_s
        self._writes = writes
        self._peers = peers
        self._asked_at: dict[str, float] = {}

    def ask(self, now: float, send: Send, counters: Counter[str]) -> None:
        """Ask for what is due."""
        if not (overdue := self._writes.overdue(now)):
            return
        num_pages = {name: sum(len(write.pages) for write in writes) for name, writes in overdue.items()}
        if sum(num_pages.values()) <= self._max_overdue_pages:
            return
        for name, writes in overdue.items():
            worker = self._peers.worker(name)
            if worker is not None and now >= self._due_at(name, writes):
                self._asked_at[name] = now
                counters["kill_requests"] += 1
                send(
                    "gateway", KillRequest(worker, f"{num_pages[name]} pages are pinned by writes past their deadline")
                )

    def forget(self, name: str) -> None:
        """This peer has ended."""
        self._asked_at.pop(name, None)

    def _due_at(self, name: str, writes: list[Write]) -> float:
        since = self._asked_at.get(name, min(write.run.call.deadline for write in writes))
        return since + self._kill_after_s
