"""The receiving half of a transfer: which of our pages a peer may still write, until its word or the proof of its end.

    open ──all pages noticed──► received ──Done──► closed
      │  ──Done──► done ──all pages noticed──► closed
      │              └──notices missing──► closed: the attempt failed
      │  ──Failed──► closed
      └──cancel──► cancelling ──Done | Failed | TicketClosed──► closed
    any of them ──proof of the writer's end──► closed

open        its owner waits for it; the writer may write its missing pages
received    every page is noticed, so nothing is open; kept so that Done is expected
done        the writer's handles have ended; the notices are still on their way
cancelling  nobody waits for it; Cancel is repeated until answered

A page of a ticket is open for the writer from `add` until its notice, or until the ticket is closed. Time never closes
one. If pages are verified, a notice whose pages do not have its checksums proves nothing: their data may still come.

Either role may own a table: it knows neither what its pages are for nor who its writers are. `sender` is the other half.
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
from headstart.core.messages import CancelTicket, ChunkNotice, KillRequest, Send, TicketRef, WorkerRef
from headstart.kv.cache import PrefixCache
from headstart.scheduler.checksums import page_checksums
from headstart.scheduler.stuck_peers import Stuck, StuckPeers
from headstart.transfer.contract import PageDigests

FIRST_REPEAT_S = 0.2
LAST_REPEAT_S = 1.0
NOTICE_GRACE_S = 1.0
NOTICE_GRACE_POLLS = 3
RECEIVED_KEPT_S = 5.0
COMING_S = 2.0


class Phase(Enum):
    OPEN = "open"
    RECEIVED = "received"
    DONE = "done"
    CANCELLING = "cancelling"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Repeat:
    """When a message is sent again. `since` is when it was sent first."""

    since: float
    next_at: float
    interval: float = FIRST_REPEAT_S


@dataclass(slots=True, eq=False)
class Grace:
    """How long, and for how many polls, the notices of a writer that is done have been missing."""

    since: float
    num_polls: int = 0

    def is_over(self, now: float) -> bool:
        return now >= self.since + NOTICE_GRACE_S and self.num_polls > NOTICE_GRACE_POLLS


@dataclass(slots=True, eq=False)
class Ticket:
    """The right of one writer to write to some of our pages in one attempt. `pages[k]` receives positions
    [start + k * page_size, ...) of `[start, end)`."""

    ref: TicketRef
    worker: WorkerRef
    start: int
    tokens: Int32Array  # all whose KV is needed, from position 0
    pages: Int32Array
    missing: NDArray[np.bool_] = field(init=False)  # [len(pages)]: not noticed
    num_missing: int = field(init=False)
    phase: Phase = Phase.OPEN
    prefix_len: int = 0  # tokens that the writer found in its own cache, as notices and Done say
    num_seen: int = 0  # noticed pages at the last check for progress

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

    def has_progressed(self) -> bool:
        """Whether more pages have arrived since the last check."""
        before, self.num_seen = self.num_seen, len(self.pages) - self.num_missing
        return self.num_seen > before

    @property
    def is_complete(self) -> bool:
        return not self.num_missing

    def receive(self, first: int, last: int) -> None:
        """Pages [first, last), all of them missing until now, are noticed."""
        self.missing[first:last] = False
        self.num_missing -= last - first


class TicketTable:
    """Every ticket whose writer may still act on it. `digests` of our pool; None: pages are accepted unverified."""

    def __init__(
        self, cache: PrefixCache, clock: Clock, send: Send, counters: Counter[str], digests: PageDigests | None
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._send = send
        self._counters = counters
        self._digests = digests
        self._tickets: dict[TicketRef, Ticket] = {}
        self._received: dict[TicketRef, float] = {}  # since when; each phase in the order in which they came to it
        self._done: dict[TicketRef, Grace] = {}
        self._repeats: dict[TicketRef, Repeat] = {}  # of the Cancels
        self._stuck_peers = StuckPeers(cache.num_pages)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(tuple(self._tickets.values()))

    def __len__(self) -> int:
        return len(self._tickets)

    def get(self, ref: TicketRef) -> Ticket | None:
        return self._tickets.get(ref)

    def add(self, ticket: Ticket) -> None:
        """Open its pages for its writer."""
        self._cache.open_write(ticket.pages)
        self._tickets[ticket.ref] = ticket

    def usage(self, worker: WorkerRef) -> tuple[int, int]:
        """How many tickets `worker` may still work on, and their tokens: what they use of its credit."""
        num_tickets = num_tokens = 0
        for ticket in self._tickets.values():
            if ticket.phase in (Phase.OPEN, Phase.CANCELLING) and ticket.worker == worker:
                num_tickets += 1
                num_tokens += ticket.end
        return num_tickets, num_tokens

    def of(self, worker: WorkerRef) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.worker == worker]

    @property
    def verifies(self) -> bool:
        """Whether notices must carry checksums."""
        return self._digests is not None

    def expected(self, notice: ChunkNotice) -> Ticket | None:
        """The ticket of a notice. None for a notice that is late, foreign, repeated or out of range."""
        ticket = self._tickets.get(notice.ref)
        last = notice.first + notice.count
        known = ticket is not None and ticket.worker == notice.writer and 0 <= notice.first < last <= len(ticket.pages)
        known = known and ticket is not None and 0 <= notice.prefix_len <= ticket.end
        if ticket is None or not known or not ticket.missing[notice.first : last].all():
            self._counters["stray_notices"] += 1
            return None
        return ticket

    def is_intact(self, ticket: Ticket, notice: ChunkNotice) -> bool:
        """Whether the pages of an expected notice have its checksums."""
        if self._digests is None:
            return True
        digests = self._digests.digest(ticket.pages[notice.first : notice.first + notice.count])
        size = self._cache.page_size
        return page_checksums(digests, ticket.tokens, ticket.start + notice.first * size, size) == notice.checksums

    def receive(self, ticket: Ticket, notice: ChunkNotice) -> None:
        """Close the pages of an expected notice."""
        last = notice.first + notice.count
        self._cache.close_write(ticket.pages[notice.first : last])
        ticket.receive(notice.first, last)
        ticket.prefix_len = notice.prefix_len
        if ticket.is_complete:
            if ticket.phase is Phase.OPEN:
                ticket.phase = Phase.RECEIVED
                self._received[ticket.ref] = self._clock.now()
            else:
                self._forget(ticket)

    def close(self, ticket: Ticket) -> None:
        """The writer will not write any more: by its word, or by proof of its end."""
        self._close_missing(ticket)
        self._forget(ticket)

    def done(self, ticket: Ticket) -> None:
        """The writer's handles have ended. What it wrote is trusted once noticed."""
        if ticket.phase is Phase.OPEN:
            ticket.phase = Phase.DONE
            self._done[ticket.ref] = Grace(self._clock.now())
        else:
            self.close(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Its owner left: send Cancel to the writer until it answers. A writer that can write no more is not asked."""
        if ticket.phase in (Phase.DONE, Phase.RECEIVED):
            self.close(ticket)
        elif ticket.phase is Phase.OPEN:
            now = self._clock.now()
            ticket.phase = Phase.CANCELLING
            self._repeats[ticket.ref] = Repeat(now, now + FIRST_REPEAT_S)
            self._counters["cancelled_calls"] += 1
            self._send(str(ticket.worker), CancelTicket(ticket.ref))

    def advance(self, now: float) -> list[Ticket]:
        """Repeat Cancels; returns the tickets that were done a second ago and lack notices."""
        if not self._tickets:
            return []
        for ref, repeat in self._repeats.items():
            if now >= repeat.next_at:
                self._send(str(self._tickets[ref].worker), CancelTicket(ref))
                self._counters["repeated_cancels"] += 1
                repeat.interval = min(2 * repeat.interval, LAST_REPEAT_S)
                repeat.next_at = now + repeat.interval
        for ref in [ref for ref, since in self._received.items() if now >= since + RECEIVED_KEPT_S]:
            self._forget(self._tickets[ref])
        for grace in self._done.values():
            grace.num_polls += 1
        return [self._tickets[ref] for ref, grace in self._done.items() if grace.is_over(now)]

    def wakeup(self, now: float) -> float:
        """When `advance` is due."""
        wakeup = next(iter(self._received.values()), inf) + RECEIVED_KEPT_S
        for grace in self._done.values():
            wakeup = min(wakeup, max(grace.since + NOTICE_GRACE_S, now + 0.01 * NOTICE_GRACE_S))
        for repeat in self._repeats.values():
            wakeup = min(wakeup, repeat.next_at)
        return wakeup

    @property
    def are_watched(self) -> bool:
        """Whether any is done or cancelling, so that each pass may matter to it."""
        return bool(self._done or self._repeats)

    def num_open_pages(self) -> int:
        return sum(ticket.num_missing for ticket in self._tickets.values())

    def num_coming(self) -> int:
        """Pages whose writer was asked to stop a moment ago, so that they are expected back soon."""
        now = self._clock.now()
        return sum(
            self._tickets[ref].num_missing for ref, repeat in self._repeats.items() if now < repeat.since + COMING_S
        )

    def num_overdue(self) -> int:
        """Pages of cancelling tickets."""
        return sum(self._tickets[ref].num_missing for ref in self._repeats)

    @property
    def is_stuck(self) -> bool:
        """Whether cancelling tickets cover more of the pool than it can spare."""
        return bool(self._repeats) and self._stuck_peers.hold_too_much(self.num_overdue())

    def kill_requests(self, kill_after_s: float) -> list[KillRequest]:
        """For the writers that leave Cancel unanswered, if their pages are more than the pool can spare."""
        stuck: dict[WorkerRef, Stuck] = {}
        for ref, repeat in self._repeats.items():
            ticket = self._tickets[ref]
            since, num_pages = stuck.get(ticket.worker, Stuck(repeat.since, 0))
            stuck[ticket.worker] = Stuck(min(since, repeat.since), num_pages + ticket.num_missing)
        reason = f"leaves Cancel unanswered for {kill_after_s:g} s and may still write our pages"
        workers = self._stuck_peers.to_kill(stuck, kill_after_s, self._clock.now())
        return [KillRequest(worker, f"{worker} {reason}") for worker in workers]

    def must_restart(self, after_s: float) -> bool:
        """Whether the end of a writer was requested `after_s` ago and no proof of it came: then the end of our own process
        is the only proof left."""
        return self._stuck_peers.any_asked_before(self._clock.now() - after_s)

    def check(self) -> None:
        """Raise InvariantError unless what is kept of tickets is what counting anew would give."""
        for ticket in self:
            if ticket.num_missing != int(np.count_nonzero(ticket.missing)):
                raise InvariantError(f"{ticket.ref} counts {ticket.num_missing} missing pages")
        for phase, table in (
            (Phase.RECEIVED, self._received),
            (Phase.DONE, self._done),
            (Phase.CANCELLING, self._repeats),
        ):
            if table.keys() != {ticket.ref for ticket in self if ticket.phase is phase}:
                raise InvariantError(f"not exactly the tickets that are {phase.value} are known as such")

    def _close_missing(self, ticket: Ticket) -> None:
        if ticket.num_missing:
            self._cache.close_write(ticket.pages[ticket.missing])

    def _forget(self, ticket: Ticket) -> None:
        ticket.phase = Phase.CLOSED
        del self._tickets[ticket.ref]
        for table in (self._received, self._done, self._repeats):
            table.pop(ticket.ref, None)
        if not any(self._tickets[ref].worker == ticket.worker for ref in self._repeats):
            self._stuck_peers.forget(ticket.worker)
