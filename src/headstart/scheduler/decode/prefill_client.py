"""Preparing entries: a prefill worker is asked for the delta, which arrives page by page, and another one if it fails.

A failed attempt keeps what has arrived. The rest goes onto new pages, since the writer may still write the old ones
unless it said otherwise, and another worker is asked for it; if none is left it is computed here; if pages or credit
are short the choice goes back to the waiting line.

A Prefill without an answer is repeated under the same ref: the writer ignores a repeat, and one that ended the attempt
says so. Either the question or the answer was lost with a connection, though both processes live.

Silence is no death: a worker that was lost may live, and counts as dead once its process is proven to have ended.
"""

from collections import Counter
from math import inf

from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode
from headstart.core.layout import pages_for
from headstart.core.messages import (
    ChunkNotice,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Send,
    TicketClosed,
    TicketRef,
    WorkerRef,
)
from headstart.kv.cache import PageLease
from headstart.scheduler.decode.prefill_workers import LATER, Local, Placement, PrefillPeer
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Abort, Choice, PrefillFault, Preparing, Waiting
from headstart.scheduler.tickets import Phase, Repeat, Ticket, TicketTable

MAX_DEATHS = 2
"""A choice that this many workers died with is not tried on another: it may be the killer."""
MAX_FORGIVEN_MISMATCHES = 1
"""A choice's damaged transfers after which their worker is still called: one may be an accident of the way."""
FIRST_REPEAT_S = 2.0
LAST_REPEAT_S = 16.0


class PrefillClient:
    def __init__(
        self,
        queues: DecodeQueues,
        tickets: TicketTable,
        placement: Placement,
        clock: Clock,
        send: Send,
        counters: Counter[str],
    ) -> None:
        self._queues = queues
        self._tickets = tickets
        self._placement = placement
        self._workers = placement.workers
        self._clock = clock
        self._send = send
        self._counters = counters
        self._last_ticket = 0
        self._repeats: dict[TicketRef, Repeat] = {}
        self.next_at = inf  # when `advance` has something to repeat at the earliest

    def begin(self, choice: Choice, lease: PageLease, hit_pages: int, peer: PrefillPeer) -> None:
        """Ask `peer` for everything that has no KV yet, but the last token."""
        self._last_ticket += 1
        self._request(choice, lease, hit_pages, TicketRef(self._last_ticket, 0), peer)

    def _request(self, choice: Choice, lease: PageLease, hit_pages: int, ref: TicketRef, peer: PrefillPeer) -> None:
        sequence, size = choice.sequence, self._queues.page_size
        start, end = sequence.num_computed, len(sequence) - 1
        pages = lease.pages[start // size : pages_for(end, size)]
        ticket = Ticket(ref, peer.worker, start, sequence.span(0, end), pages)
        entry = self._queues.prepare(choice, lease, ticket, hit_pages)
        self._counters["prefill_calls"] += 1
        now = self._clock.now()
        repeat = self._repeats[ref] = Repeat(now, now + FIRST_REPEAT_S, FIRST_REPEAT_S)
        self.next_at = min(self.next_at, repeat.next_at)
        self._send_prefill(entry)

    def _send_prefill(self, entry: Preparing) -> None:
        ticket, request = entry.ticket, entry.choice.request
        remaining_s = entry.choice.deadline - self._clock.now()
        message = Prefill(
            ticket.ref,
            ticket.tokens,
            ticket.start,
            ticket.pages,
            request.namespace,
            remaining_s,
            request.cacheable,
            verify=self._tickets.verifies,
        )
        self._send(str(ticket.worker), message)

    def _repeat(self, now: float) -> None:
        """Send those again that were not answered, and forget those that are over."""
        preparing = self._queues.preparing
        self._repeats = {ref: repeat for ref, repeat in self._repeats.items() if ref in preparing}
        for ref, repeat in self._repeats.items():
            if now < repeat.next_at:
                continue
            if preparing[ref].ticket.phase is Phase.OPEN:
                self._counters["repeated_calls"] += 1
                self._send_prefill(preparing[ref])
            repeat.interval = min(2 * repeat.interval, LAST_REPEAT_S)
            repeat.next_at = now + repeat.interval
        self.next_at = min((repeat.next_at for repeat in self._repeats.values()), default=inf)

    # ---- the writer's messages ---------------------------------------------------------------------------------------

    def on_notice(self, notice: ChunkNotice) -> None:
        ticket = self._tickets.expected(notice)
        if ticket is None:
            return
        entry = self._queues.preparing.get(notice.ref)
        if not self._tickets.is_intact(ticket, notice):
            self._on_mismatch(ticket, entry)
            return
        self._tickets.receive(ticket, notice)
        self._counters["pages_moved"] += notice.count
        if ticket.is_complete:
            self._queues.request_admission()
        if entry is None:
            self._counters["pages_moved_in_vain"] += notice.count
        else:
            self._on_pages(entry, notice)

    def _on_pages(self, entry: Preparing, notice: ChunkNotice) -> None:
        choice, ticket, now = entry.choice, entry.ticket, self._clock.now()
        repeat = self._repeats[notice.ref]
        repeat.next_at = now + repeat.interval
        num_computed = min(ticket.start + ticket.num_arrived * self._queues.page_size, ticket.end)
        choice.sequence.num_computed = num_computed
        choice.metrics.moved(notice.count, notice.prefix_len)
        if num_computed > ticket.start:
            choice.metrics.computed(ticket.prefix_len, num_computed)
        self._queues.commit(entry)
        if ticket.is_complete:
            self._queues.detach(entry)
            self._queues.make_ready(choice, entry.lease, entry.hit_pages, False, now)

    def _on_mismatch(self, ticket: Ticket, entry: Preparing | None) -> None:
        """What is in our pool does not have the writer's checksums. The request goes on without that ticket, whose pages
        wait for the writer's last word: the right bytes may still be on their way."""
        self._counters["digest_mismatches"] += 1
        if entry is None:
            return
        self._tickets.cancel(ticket)
        self._queues.request_admission()
        metrics = entry.choice.metrics
        metrics.num_mismatches += 1
        self._retry(entry, PrefillFault.FAILED if metrics.num_mismatches > MAX_FORGIVEN_MISMATCHES else None)

    def on_done(self, sender: str, message: PrefillDone) -> None:
        ticket = self._known(sender, message.ref)
        if ticket is None:
            return
        if ticket.phase is Phase.DONE:
            self._counters["stray_messages"] += 1
            return
        self._counters["prefill_tokens"] += message.num_computed
        self._queues.request_admission()
        self._tickets.done(ticket)

    def on_failed(self, sender: str, message: PrefillFailed) -> None:
        ticket = self._known(sender, message.ref)
        if ticket is None:
            return
        entry = self._close(ticket)
        if entry is None:
            return
        self._counters[f"prefill_failed_{message.code.value}"] += 1
        match message.code:
            case ErrorCode.BUSY:
                self._workers.on_busy(ticket.worker, self._clock.now())
                self._queues.send_back(entry)
            case ErrorCode.INVALID | ErrorCode.MISMATCH:
                if message.code is ErrorCode.MISMATCH:
                    self._workers.on_mismatch(ticket.worker)
                self._queues.end(entry.choice, Abort(message.code, f"{ticket.worker}: {message.message}"))
            case ErrorCode.UNAVAILABLE:
                self._workers.greet_again(ticket.worker, self._clock.now())
                self._retry(entry, PrefillFault.FAILED)
            case _:
                self._retry(entry, PrefillFault.FAILED)

    def on_closed(self, sender: str, message: TicketClosed) -> None:
        ticket = self._known(sender, message.ref)
        if ticket is None:
            return
        entry = self._close(ticket)
        if entry is not None:
            self._retry(entry, PrefillFault.FAILED)

    def _known(self, sender: str, ref: TicketRef) -> Ticket | None:
        ticket = self._tickets.get(ref)
        if ticket is None or str(ticket.worker) != sender:
            self._counters["stray_messages"] += 1
            return None
        return ticket

    def _close(self, ticket: Ticket) -> Preparing | None:
        """Nothing is written under it any more. Returns the entry that waits for it."""
        entry = self._queues.preparing.get(ticket.ref)
        self._tickets.close(ticket)
        self._queues.request_admission()
        return entry

    # ---- ends of workers ---------------------------------------------------------------------------------------------

    def on_lost(self, worker: WorkerRef) -> None:
        """Dead for requests: they go elsewhere. Its pages wait for its answer or the proof of its end."""
        for ticket in self._tickets.of(worker):
            if ticket.phase is Phase.OPEN:
                self._tickets.cancel(ticket)
                entry = self._queues.preparing.get(ticket.ref)
                if entry is not None:
                    self._retry(entry, PrefillFault.LOST)

    def on_ended(self, worker: WorkerRef) -> None:
        """Its end is proven: nothing that it posted can land any more, and what was lost with it died with it."""
        for entry in tuple(self._queues.entries.values()):
            choice = entry.choice
            if choice.failed_on.get(worker) is PrefillFault.LOST:
                choice.failed_on[worker] = PrefillFault.DIED
                if isinstance(entry, Waiting | Preparing):
                    self._end_if_killer(choice)
        for ticket in self._tickets.of(worker):
            waiting = self._close(ticket)
            if waiting is not None:
                self._retry(waiting, PrefillFault.DIED)

    # ---- time --------------------------------------------------------------------------------------------------------

    def check_progress(self, entry: Preparing) -> bool:
        """Half the time is gone. True if pages still arrive; else the request goes on without this writer."""
        if entry.ticket.has_progressed():
            return True
        self._counters["stalled_calls"] += 1
        self._tickets.cancel(entry.ticket)
        self._retry(entry, PrefillFault.FAILED)
        return False

    def advance(self, now: float) -> None:
        if now >= self.next_at:
            self._repeat(now)
        for ticket in self._tickets.advance(now):
            self._counters["lost_notices"] += 1
            entry = self._queues.preparing[ticket.ref]
            self._tickets.close(ticket)
            self._retry(entry, PrefillFault.FAILED)

    def _end_if_killer(self, choice: Choice) -> bool:
        """End a choice that so many prefill workers died with that it may be the reason."""
        is_killer = choice.num_deaths >= MAX_DEATHS
        if is_killer:
            message = f"{MAX_DEATHS} workers died while they prefilled this"
            self._queues.end(choice, Abort(ErrorCode.WORKER_LOST, message))
        return is_killer

    # ---- down the ladder ---------------------------------------------------------------------------------------------

    def _retry(self, entry: Preparing, fault: PrefillFault | None) -> None:
        """The entry's ticket is closed or cancelled, and something is missing. A worker at fault is not called again."""
        queues, choice, ticket, now = self._queues, entry.choice, entry.ticket, self._clock.now()
        if fault is not None:
            choice.failed_on[ticket.worker] = fault
        self._counters["prefill_retries"] += 1
        if self._end_if_killer(choice):
            return
        place = self._placement.pick(choice, choice.sequence.num_computed, {}, now)
        if place is LATER or not queues.try_renew(entry):
            queues.send_back(entry)
        elif isinstance(place, PrefillPeer):
            ref = TicketRef(ticket.ref.ticket, ticket.ref.attempt + 1)
            self._request(choice, entry.lease, entry.hit_pages, ref, place)
        else:
            queues.make_ready(choice, entry.lease, entry.hit_pages, place is Local.CHUNKED, now)
