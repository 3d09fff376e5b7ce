"""Open calls to prefill workers: which pages a peer may still write, until its word or the proof of its end.

    open ──all noticed──► filled ──Done──► gone
      │  ──Done──► done ──all noticed──► gone
      │              └──notices missing──► gone: the attempt failed
      │  ──Failed──► gone
      └──cut──► loose ──Done | Failed | TicketClosed──► gone
    any of them ──proof of the writer's end──► gone

open    owned by a Preparing entry; the writer may write its missing pages
filled  every page is noticed, so nothing is open; kept so that Done is expected
done    the writer says that its handles ended; the notices are still on their way
loose   nobody's; Cancel is repeated until answered

A page of a call is open for the writer from `add` until its notice, or until the call is gone. Time never closes one.
Where pages are verified, a notice whose pages do not hold what it says is no word about them: its data may still come.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array
from headstart.core.clock import Clock
from headstart.core.errors import InvariantError
from headstart.core.messages import CancelTicket, ChunkNotice, KillRequest, TicketRef, WorkerRef
from headstart.kv.cache import PrefixCache
from headstart.scheduler.checksums import seal
from headstart.scheduler.decode.metrics import RequestMetrics
from headstart.scheduler.protocol import Send
from headstart.transfer.contract import PageDigests

FIRST_REPEAT_S = 0.2
LAST_REPEAT_S = 1.0
NOTICE_GRACE_S = 1.0
NOTICE_GRACE_POLLS = 3
FILLED_KEPT_S = 5.0
OVERDUE_SHARE = 0.1
COMING_S = 2.0


class Phase(Enum):
    OPEN = "open"
    FILLED = "filled"
    DONE = "done"
    LOOSE = "loose"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Repeat:
    """When something is said again. `since` is when it was said first."""

    since: float
    next_at: float
    interval: float = FIRST_REPEAT_S


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """One attempt of one ticket. `pages[k]` receives positions [start + k * page_size, ...) of `[start, end)`."""

    ref: TicketRef
    worker: WorkerRef
    start: int
    tokens: Int32Array  # all whose KV is needed, from position 0
    pages: Int32Array
    record: RequestMetrics
    missing: NDArray[np.bool_] = field(init=False)  # [len(pages)]: not noticed
    num_missing: int = field(init=False)
    phase: Phase = Phase.OPEN
    since: float = 0.0  # when it was filled or done
    num_polls: int = 0  # since then
    prefix_len: int = 0  # tokens that the writer found in its own cache, as notices and Done say
    num_seen: int = 0  # noticed pages when somebody last looked whether it gets on

    def __post_init__(self) -> None:
        self.num_missing = len(self.pages)
        self.missing = np.ones(self.num_missing, dtype=bool)

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def num_arrived(self) -> int:
        """Noticed pages before the first missing one."""
        return int(self.missing.argmax()) if self.num_missing else len(self.pages)

    def gets_on(self) -> bool:
        """Whether more has arrived since this was last asked."""
        before, self.num_seen = self.num_seen, len(self.pages) - self.num_missing
        return self.num_seen > before

    @property
    def is_complete(self) -> bool:
        return not self.num_missing

    def arrived(self, first: int, last: int) -> None:
        """Pages [first, last), all of them missing until now, are noticed."""
        self.missing[first:last] = False
        self.num_missing -= last - first


class RemotePrefills:
    """Every call whose writer has not had its last word. `digests` of our pool; None: pages are taken as they come."""

    def __init__(
        self, cache: PrefixCache, clock: Clock, send: Send, counters: Counter[str], digests: PageDigests | None
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._send = send
        self._counters = counters
        self._digests = digests
        self._calls: dict[TicketRef, RemotePrefill] = {}
        self._filled: dict[TicketRef, RemotePrefill] = {}  # by phase, in the order in which they came to it
        self._done: dict[TicketRef, RemotePrefill] = {}
        self._repeats: dict[TicketRef, Repeat] = {}  # of the loose ones
        self._kill_asked: dict[WorkerRef, Repeat] = {}

    def __iter__(self) -> Iterator[RemotePrefill]:
        return iter(tuple(self._calls.values()))

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, ref: TicketRef) -> RemotePrefill | None:
        return self._calls.get(ref)

    def add(self, call: RemotePrefill) -> None:
        """Its pages belong to its writer from now on."""
        self._cache.open_write(call.pages)
        self._calls[call.ref] = call

    def usage(self, worker: WorkerRef) -> tuple[int, int]:
        """How many calls `worker` still works on, and their prompt tokens."""
        num_calls = num_tokens = 0
        for call in self._calls.values():
            if call.phase in (Phase.OPEN, Phase.LOOSE) and call.worker == worker:
                num_calls += 1
                num_tokens += call.end
        return num_calls, num_tokens

    def of(self, worker: WorkerRef) -> list[RemotePrefill]:
        return [call for call in self._calls.values() if call.worker == worker]

    @property
    def verifies(self) -> bool:
        """Whether notices must carry seals."""
        return self._digests is not None

    def expected(self, notice: ChunkNotice) -> RemotePrefill | None:
        """The call that a notice is of. None for one that is late, foreign, repeated or out of range."""
        call = self._calls.get(notice.ref)
        last = notice.first + notice.count
        known = call is not None and call.worker == notice.writer and 0 <= notice.first < last <= len(call.pages)
        known = known and call is not None and 0 <= notice.prefix_len <= call.end
        if call is None or not known or not call.missing[notice.first : last].all():
            self._counters["stray_notices"] += 1
            return None
        return call

    def is_intact(self, call: RemotePrefill, notice: ChunkNotice) -> bool:
        """Whether the pages of an expected notice hold what their writer sealed."""
        if self._digests is None:
            return True
        digests = self._digests.digest(call.pages[notice.first : notice.first + notice.count])
        size = self._cache.page_size
        return seal(digests, call.tokens, call.start + notice.first * size, size) == notice.seals

    def arrived(self, call: RemotePrefill, notice: ChunkNotice) -> None:
        """Close the pages of an expected notice."""
        last = notice.first + notice.count
        self._cache.close_write(call.pages[notice.first : last])
        call.arrived(notice.first, last)
        call.prefix_len = notice.prefix_len
        if call.is_complete:
            if call.phase is Phase.OPEN:
                call.phase = Phase.FILLED
                call.since = self._clock.now()
                self._filled[call.ref] = call
            else:
                self._forget(call)

    def end(self, call: RemotePrefill) -> None:
        """The writer's word, or proof of its end, that it writes no more."""
        self._close_missing(call)
        self._forget(call)

    def done(self, call: RemotePrefill) -> None:
        """The writer's handles ended. What it wrote is trusted once noticed."""
        if call.phase is Phase.OPEN:
            call.phase = Phase.DONE
            call.since = self._clock.now()
            self._done[call.ref] = call
        else:
            self.end(call)

    def cut(self, call: RemotePrefill) -> None:
        """Its request left: ask the writer to stop until it answers. Nothing to do where it has nothing open."""
        if call.phase in (Phase.DONE, Phase.FILLED):
            self.end(call)
        elif call.phase is Phase.OPEN:
            now = self._clock.now()
            call.phase = Phase.LOOSE
            self._repeats[call.ref] = Repeat(now, now + FIRST_REPEAT_S)
            self._counters["cancelled_calls"] += 1
            self._send(str(call.worker), CancelTicket(call.ref))

    def advance(self, now: float) -> list[RemotePrefill]:
        """Repeat Cancels; returns the calls that were done a second ago and lack notices."""
        if not self._calls:
            return []
        for ref, repeat in self._repeats.items():
            if now >= repeat.next_at:
                self._send(str(self._calls[ref].worker), CancelTicket(ref))
                self._counters["repeated_cancels"] += 1
                repeat.interval = min(2 * repeat.interval, LAST_REPEAT_S)
                repeat.next_at = now + repeat.interval
        while self._filled and now >= _first(self._filled).since + FILLED_KEPT_S:
            self._forget(_first(self._filled))
        unnoticed: list[RemotePrefill] = []
        for call in self._done.values():
            call.num_polls += 1
            if now >= call.since + NOTICE_GRACE_S and call.num_polls > NOTICE_GRACE_POLLS:
                unnoticed.append(call)
        return unnoticed

    def wakeup(self, now: float) -> float:
        """When `advance` has something to do."""
        wakeup = _first(self._filled).since + FILLED_KEPT_S if self._filled else inf
        if self._done:
            wakeup = min(wakeup, max(_first(self._done).since + NOTICE_GRACE_S, now + 0.01 * NOTICE_GRACE_S))
        for repeat in self._repeats.values():
            wakeup = min(wakeup, repeat.next_at)
        return wakeup

    @property
    def are_watched(self) -> bool:
        """Whether any is done or loose, so that each pass may matter to it."""
        return bool(self._done or self._repeats)

    def num_open_pages(self) -> int:
        return sum(call.num_missing for call in self._calls.values())

    def num_coming(self) -> int:
        """Pages whose writer was asked to stop a moment ago: they are expected back soon."""
        now = self._clock.now()
        return sum(
            self._calls[ref].num_missing for ref, repeat in self._repeats.items() if now < repeat.since + COMING_S
        )

    def num_overdue(self) -> int:
        """Pages of loose calls."""
        return sum(self._calls[ref].num_missing for ref in self._repeats)

    @property
    def covers_too_much(self) -> bool:
        """Whether loose calls do, of the pool."""
        return bool(self._repeats) and self.num_overdue() > OVERDUE_SHARE * self._cache.num_pages

    def overdue(self, kill_after_s: float) -> list[KillRequest]:
        """Whose end to ask for where loose calls cover too much: their writers do not answer."""
        now = self._clock.now()
        silent = {self._calls[ref].worker for ref, r in self._repeats.items() if now >= r.since + kill_after_s}
        asked: list[KillRequest] = []
        for worker in sorted(silent, key=str):
            asked_before = self._kill_asked.setdefault(worker, Repeat(now, now, kill_after_s))
            if now >= asked_before.next_at:
                asked_before.next_at = now + kill_after_s
                reason = f"{worker} leaves Cancel unanswered for {kill_after_s:g} s and may still write our pages"
                asked.append(KillRequest(worker, reason))
        return asked

    def are_given_up(self, give_up_after_s: float) -> bool:
        """Where loose calls cover too much: whether the end of a writer was asked for long ago and no proof of it came.
        The end of our own process is the one proof left."""
        now = self._clock.now()
        return any(now >= asked.since + give_up_after_s for asked in self._kill_asked.values())

    def check(self) -> None:
        """Raise InvariantError unless what is kept of calls is what counting anew would give."""
        for call in self:
            if call.num_missing != int(np.count_nonzero(call.missing)):
                raise InvariantError(f"{call.ref} counts {call.num_missing} missing pages")
        for phase, table in ((Phase.FILLED, self._filled), (Phase.DONE, self._done), (Phase.LOOSE, self._repeats)):
            if table.keys() != {call.ref for call in self if call.phase is phase}:
                raise InvariantError(f"not exactly the calls that are {phase.value} are known as such")

    def _close_missing(self, call: RemotePrefill) -> None:
        if call.num_missing:
            self._cache.close_write(call.pages[call.missing])

    def _forget(self, call: RemotePrefill) -> None:
        call.phase = Phase.GONE
        del self._calls[call.ref]
        for table in (self._filled, self._done, self._repeats):
            table.pop(call.ref, None)
        if self._kill_asked and not any(other.worker == call.worker for other in self._calls.values()):
            self._kill_asked.pop(call.worker, None)


def _first(calls: dict[TicketRef, RemotePrefill]) -> RemotePrefill:
    return next(iter(calls.values()))
