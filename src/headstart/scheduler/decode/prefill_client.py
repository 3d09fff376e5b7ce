"""Preparing entries: the delta is asked of a prefill worker, arrives page by page, and is asked of another if it fails.

A failed attempt keeps what has arrived. The rest goes onto new pages, since the writer may still write the old ones
unless it said otherwise, and is asked of another worker; where none is left it is computed here; where pages or credit
are short the choice goes back to the waiting line.

A call of which nothing is heard is asked again under the same ref: the writer takes a repeat for nothing, and one that
ended it says so. Either the question or the answer was lost with a connection, though both processes live.
"""

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
from headstart.scheduler.decode.gateway_port import GatewayPort
from headstart.scheduler.decode.placement import LATER, Local, Placement
from headstart.scheduler.decode.prefill_workers import PrefillPeer, PrefillWorkers
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Choice, Preparing
from headstart.scheduler.tickets import Phase, Repeat, Ticket

MAX_DEATHS = 2
"""A choice that this many workers died with is not tried on another: it may be the killer."""
MAX_FORGIVEN_MISMATCHES = 1
"""A choice's damaged transfers for which their worker is not left: one may be an accident of the way."""
FIRST_ASK_AGAIN_S = 2.0
LAST_ASK_AGAIN_S = 16.0


class PrefillClient:
    def __init__(
        self, board: DecodeQueues, links: PrefillWorkers, router: Placement, desk: GatewayPort, clock: Clock, send: Send
    ) -> None:
        self._board = board
        self._links = links
        self._router = router
        self._desk = desk
        self._clock = clock
        self._send = send
        self._last_ticket = 0
        self._asked: dict[TicketRef, Repeat] = {}
        self.ask_at = inf  # when `advance` has something to ask at the earliest

    def begin(self, choice: Choice, lease: PageLease, hit_pages: int, link: PrefillPeer) -> None:
        """Ask `link` for everything that has no KV yet, but the last token."""
        self._last_ticket += 1
        self._call(choice, lease, hit_pages, TicketRef(self._last_ticket, 0), link)

    def _call(self, choice: Choice, lease: PageLease, hit_pages: int, ref: TicketRef, link: PrefillPeer) -> None:
        sequence, size = choice.sequence, self._board.page_size
        start, end = sequence.num_computed, len(sequence) - 1
        pages = lease.pages[start // size : pages_for(end, size)]
        call = Ticket(ref, link.worker, start, sequence.span(0, end), pages)
        self._board.calls.add(call)
        entry = Preparing(choice, lease, call, hit_pages)
        self._board.prepare(entry)
        self._board.counters["prefill_calls"] += 1
        now = self._clock.now()
        repeat = self._asked[ref] = Repeat(now, now + FIRST_ASK_AGAIN_S, FIRST_ASK_AGAIN_S)
        self.ask_at = min(self.ask_at, repeat.next_at)
        self._ask(entry)

    def _ask(self, entry: Preparing) -> None:
        call, request = entry.call, entry.choice.request
        remaining_s = entry.choice.deadline - self._clock.now()
        message = Prefill(
            call.ref,
            call.tokens,
            call.start,
            call.pages,
            request.namespace,
            remaining_s,
            request.cacheable,
            verify=self._board.calls.verifies,
        )
        self._send(str(call.worker), message)

    def _ask_again(self, now: float) -> None:
        """Repeat the calls of which nothing was heard, and forget those that are over."""
        preparing = self._board.preparing
        self._asked = {ref: repeat for ref, repeat in self._asked.items() if ref in preparing}
        for ref, repeat in self._asked.items():
            if now < repeat.next_at:
                continue
            if preparing[ref].call.phase is Phase.OPEN:
                self._board.counters["repeated_calls"] += 1
                self._ask(preparing[ref])
            repeat.interval = min(2 * repeat.interval, LAST_ASK_AGAIN_S)
            repeat.next_at = now + repeat.interval
        self.ask_at = min((repeat.next_at for repeat in self._asked.values()), default=inf)

    # ---- the writer's words ------------------------------------------------------------------------------------------

    def on_notice(self, notice: ChunkNotice) -> None:
        board = self._board
        entry = board.preparing.get(notice.ref)
        call = board.calls.expected(notice)
        if call is None:
            return
        if not board.calls.is_intact(call, notice):
            self._mismatch(call)
            return
        board.calls.receive(call, notice)
        board.counters["pages_moved"] += notice.count
        board.stirred |= call.is_complete
        if entry is None:
            board.counters["pages_moved_in_vain"] += notice.count
            return
        choice = entry.choice
        repeat = self._asked[notice.ref]
        repeat.next_at = self._clock.now() + repeat.interval
        choice.record.pages_moved += notice.count
        choice.record.prefill_prefix_len = notice.prefix_len
        choice.sequence.num_computed = min(call.start + call.num_arrived * board.page_size, call.end)
        board.commit(entry)
        if call.is_complete:
            choice.record.add_computed(call.end - call.prefix_len)
            board.detach(entry)
            board.make_ready(choice, entry.lease, entry.hit_pages, chunked=False)
            choice.record.mark("ready", self._clock.now())

    def _mismatch(self, call: Ticket) -> None:
        """What is in our pool does not have the writer's checksums. The request goes on without that call, whose pages wait
        for the writer's last word: the right bytes may still be on their way."""
        board = self._board
        board.counters["digest_mismatches"] += 1
        entry = board.preparing.get(call.ref)
        if entry is None:
            return
        board.calls.cancel(call)
        board.stirred = True
        record = entry.choice.record
        record.num_mismatches += 1
        self._retry(entry, blames_worker=record.num_mismatches > MAX_FORGIVEN_MISMATCHES)

    def on_done(self, sender: str, message: PrefillDone) -> None:
        call = self._known(sender, message.ref)
        if call is None:
            return
        if call.phase is Phase.DONE:
            self._board.counters["stray_messages"] += 1
            return
        self._board.counters["prefill_tokens"] += message.num_computed
        self._board.stirred = True
        self._board.calls.done(call)

    def on_failed(self, sender: str, message: PrefillFailed) -> None:
        call = self._known(sender, message.ref)
        if call is None:
            return
        entry = self._board.preparing.get(call.ref)
        self._board.calls.close(call)
        self._board.stirred = True
        if entry is None:
            return
        self._board.counters[f"prefill_failed_{message.code.value}"] += 1
        match message.code:
            case ErrorCode.BUSY:
                self._links.busy(call.worker, self._clock.now())
                self._board.send_back(entry)
            case ErrorCode.INVALID | ErrorCode.MISMATCH:
                if message.code is ErrorCode.MISMATCH:
                    self._links.mismatch(call.worker)
                self._board.leave(entry)
                self._desk.fail(entry.choice, message.code, f"{call.worker}: {message.message}")
            case ErrorCode.UNAVAILABLE:
                self._links.greet_again(call.worker, self._clock.now())
                self._retry(entry)
            case _:
                self._retry(entry)

    def on_closed(self, sender: str, message: TicketClosed) -> None:
        call = self._known(sender, message.ref)
        if call is None:
            return
        entry = self._board.preparing.get(call.ref)
        self._board.calls.close(call)
        self._board.stirred = True
        if entry is not None:
            self._retry(entry)

    def _known(self, sender: str, ref: TicketRef) -> Ticket | None:
        call = self._board.calls.get(ref)
        if call is None or str(call.worker) != sender:
            self._board.counters["stray_messages"] += 1
            return None
        return call

    # ---- ends of workers ---------------------------------------------------------------------------------------------

    def lost(self, worker: WorkerRef) -> None:
        """Dead for requests: they go elsewhere. Its pages wait for its word or the proof of its end."""
        for call in self._board.calls.of(worker):
            if call.phase is Phase.OPEN:
                self._board.calls.cancel(call)
                self._fail_over(call)

    def ended(self, worker: WorkerRef) -> None:
        """Proven: nothing it posted can land any more."""
        for call in self._board.calls.of(worker):
            self._board.calls.close(call)
            self._board.stirred = True
            self._fail_over(call)

    def _fail_over(self, call: Ticket) -> None:
        entry = self._board.preparing.get(call.ref)
        if entry is not None:
            entry.choice.num_deaths += 1
            self._retry(entry)

    def look_after(self, entry: Preparing) -> bool:
        """Half the time is gone. True if pages still arrive; else the request goes on without this writer."""
        if entry.call.has_progressed():
            return True
        self._board.counters["stalled_calls"] += 1
        self._board.calls.cancel(entry.call)
        self._retry(entry)
        return False

    def advance(self, now: float) -> None:
        if now >= self.ask_at:
            self._ask_again(now)
        for call in self._board.calls.advance(now):
            self._board.counters["lost_notices"] += 1
            entry = self._board.preparing[call.ref]
            self._board.calls.close(call)
            self._retry(entry)

    # ---- down the ladder ---------------------------------------------------------------------------------------------

    def _retry(self, entry: Preparing, blames_worker: bool = True) -> None:
        """The entry's call is over or loose, and something is missing. A worker that is blamed is not asked again."""
        board, choice, call = self._board, entry.choice, entry.call
        if blames_worker:
            choice.failed_on.add(call.worker)
        arrived = choice.sequence.num_computed
        choice.record.add_computed(max(0, arrived - call.prefix_len) if arrived > call.start else 0)
        board.counters["prefill_retries"] += 1
        if choice.num_deaths >= MAX_DEATHS:
            board.leave(entry)
            self._desk.fail(choice, ErrorCode.WORKER_LOST, f"{MAX_DEATHS} workers died while they prefilled this")
            return
        pick = self._router.pick(choice, arrived, {}, self._clock.now())
        first = call.start // board.page_size + call.num_arrived
        count = len(call.pages) - call.num_arrived
        if pick is LATER or not board.cache.try_replace(entry.lease, first, count):
            board.send_back(entry)
            return
        board.detach(entry)
        board.unpark(board.claims.end(choice.ref))
        board.claim(choice, entry.lease)
        if isinstance(pick, PrefillPeer):
            self._call(choice, entry.lease, entry.hit_pages, TicketRef(call.ref.ticket, call.ref.attempt + 1), pick)
        else:
            board.make_ready(choice, entry.lease, entry.hit_pages, chunked=pick is Local.CHUNKED)
            choice.record.mark("ready", self._clock.now())
