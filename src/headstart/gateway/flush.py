"""Flush of every worker's cache: ask all, wait for all, answer once.

(start) ─► open: workers still to answer ─► done: every answer was yes | one was no, or time ran out
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headstart.core.messages import Flush, Flushed, Message, WorkerRef

FlushDone = Callable[[bool, int], None]
"""(every worker flushed, pages freed); called exactly once."""


@dataclass(slots=True)
class _Flush:
    done: FlushDone
    deadline: float
    waiting: set[str] = field(default_factory=set)
    ok: bool = True
    num_pages: int = 0


class Flushes:
    """Open flushes by id. A worker that dies has nothing left to flush."""

    def __init__(self, send: Callable[[str, Message], None], timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._flushes: dict[int, _Flush] = {}
        self._next_id = 1

    @property
    def is_open(self) -> bool:
        return bool(self._flushes)

    def start(self, workers: Iterable[WorkerRef], now: float, done: FlushDone) -> None:
        flush_id, self._next_id = self._next_id, self._next_id + 1
        flush = _Flush(done, now + self._timeout_s, {str(worker) for worker in workers})
        self._flushes[flush_id] = flush
        for name in sorted(flush.waiting):
            self._send(name, Flush(flush_id))
        self._settle(flush_id)

    def answered(self, sender: str, message: Flushed) -> None:
        flush = self._flushes.get(message.flush_id)
        if flush is None or sender not in flush.waiting:
            return
        flush.waiting.remove(sender)
        flush.ok = flush.ok and message.ok
        flush.num_pages += message.num_pages
        self._settle(message.flush_id)

    def lost(self, name: str) -> None:
        for flush_id, flush in list(self._flushes.items()):
            flush.waiting.discard(name)
            self._settle(flush_id)

    def expire(self, now: float) -> None:
        for flush_id, flush in list(self._flushes.items()):
            if now >= flush.deadline:
                flush.ok = False
                flush.waiting.clear()
                self._settle(flush_id)

    def _settle(self, flush_id: int) -> None:
        flush = self._flushes[flush_id]
        if not flush.waiting:
            del self._flushes[flush_id]
            flush.done(flush.ok, flush.num_pages)
