"""The decode worker's scheduler: the home of a request and of its KV.

A choice's states, what each holds and the moves between them are in `entries`; a ticket's are in `calls`. Every pass
takes in what happened, drops what ran out of time, admits what fits, and makes the next step of what runs. Whatever
ends a choice goes through `_end`, which releases what its entry holds and says so once.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from headstart.core.batch import Batch, BatchOutput, Sampled
from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode, InvariantError
from headstart.core.identity import KVSpec
from headstart.core.messages import (
    Cancel,
    Drain,
    Flush,
    Flushed,
    Hello,
    Membership,
    Message,
    PrefillDone,
    PrefillFailed,
    Refused,
    Rejected,
    Send,
    Submit,
    TicketClosed,
    Welcome,
    WorkerExited,
    WorkerLoad,
    WorkerRef,
    decode_notice,
)
from headstart.core.request import ChoiceRef
from headstart.core.sequence import Sequence
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode.admission import Admission
from headstart.scheduler.decode.batching import InflightStep, make_batch, split_token_budget, with_drafts
from headstart.scheduler.decode.deadlines import Deadlines
from headstart.scheduler.decode.gateway_liveness import GatewayLiveness
from headstart.scheduler.decode.gateway_port import GatewayPort
from headstart.scheduler.decode.placement import Placement
from headstart.scheduler.decode.preemption import Preemption
from headstart.scheduler.decode.prefill_client import PrefillClient
from headstart.scheduler.decode.prefill_workers import PrefillWorkers
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Choice, Preparing, ScheduledRow, Waiting
from headstart.scheduler.decode.stop import Stop, find_stop
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.protocol import Drafter
from headstart.scheduler.tickets import Ticket, TicketTable
from headstart.transfer.contract import Notice, PageDigests, PeerLost, TransferEvent

MIN_LOOK_S = 0.05
"""Shortest time between two looks whether a fetch gets on."""


@dataclass(frozen=True, slots=True)
class DecodePorts:
    """How the scheduler reaches the world, and its peers its pool."""

    descriptor: bytes  # of our transport: what peers connect to
    page_bytes: int
    clock: Clock
    send: Send
    digests: PageDigests | None = None  # of our pool; None: pages are taken as they come
    drafter: Drafter | None = None  # None: rows have no drafts


class DecodeScheduler:
    """Satisfies `scheduler.protocol.Scheduler`."""

    def __init__(
        self, worker: WorkerRef, kv_spec: KVSpec, limits: DecodeLimits, cache: PrefixCache, ports: DecodePorts
    ) -> None:
        clock, send = ports.clock, ports.send
        self._limits = limits
        self._cache = cache
        self._clock = clock
        self._send = send
        self._drafter = ports.drafter if limits.num_draft_tokens else None
        self._counters: Counter[str] = Counter()
        self._calls = TicketTable(cache, clock, send, self._counters, ports.digests)
        self._board = DecodeQueues(cache, limits, self._calls, self._counters)
        self._desk = GatewayPort(cache, limits, ports.page_bytes, clock, send, self._counters)
        self._links = PrefillWorkers(Hello(worker, kv_spec, ports.descriptor), send, self._counters)
        router = Placement(limits, self._links, self._calls)
        self._fetching = PrefillClient(self._board, self._links, router, self._desk, clock, send)
        self._admission = Admission(self._board, router, self._fetching, clock)
        self._growth = Preemption(self._board, self._desk)
        self._alarms = Deadlines(self._desk.get)
        self._gateways = GatewayLiveness(limits.gateway_silence_s, clock.now())
        self._links_due = inf
        self._due_at = -inf  # when something is to be done here at the latest; -inf where that has to be found out
        self._next_step = 0
        self._is_draining = False
        self._must_restart = False

    @property
    def _is_idle(self) -> bool:
        return not len(self._desk) and not self._calls.num_open_pages()

    def open_calls(self) -> list[Ticket]:
        """Calls whose writers may still write."""
        return [call for call in self._calls if not call.is_complete]

    def states(self) -> Iterator[tuple[ChoiceRef, str]]:
        """Each unfinished choice and its state."""
        for ref, entry in self._board.entries.items():
            yield ref, type(entry).__name__.lower()

    # ---- messages ----------------------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message) -> None:
        self._due_at = -inf
        match message:
            case Submit() | Cancel() | Flush() | Membership():
                self._gateways.heard(sender, self._clock.now())
                self._on_gateway(sender, message)
            case PrefillDone():
                self._fetching.on_done(sender, message)
            case PrefillFailed():
                self._fetching.on_failed(sender, message)
            case TicketClosed():
                self._fetching.on_closed(sender, message)
            case Welcome():
                self._board.stirred |= self._links.welcome(sender, message)
            case Refused():
                self._board.stirred |= self._links.refused(sender, message)
            case WorkerExited():
                self._links.exited(message.worker)
                self._fetching.ended(message.worker)
                self._board.stirred = True
            case Drain():
                self._is_draining = True
            case _:
                self._counters["stray_messages"] += 1
        self._desk.flush()

    def _on_gateway(self, sender: str, message: Submit | Cancel | Flush | Membership) -> None:
        match message:
            case Submit():
                self._on_submit(sender, message)
            case Cancel():
                self._on_cancel(message)
            case Flush():
                self._on_flush(sender, message)
            case Membership():
                ended, lost = self._links.membership(message.prefill, self._clock.now())
                for worker in ended:
                    self._fetching.ended(worker)
                for worker in lost:
                    self._fetching.lost(worker)
                self._board.stirred = True

    def _on_submit(self, sender: str, submit: Submit) -> None:
        ref = submit.request.ref
        if self._desk.repeats(sender, ref):
            return
        if self._is_draining:
            self._send(sender, Rejected(ref, ErrorCode.UNAVAILABLE, "this decode worker is draining"))
            return
        if (earlier := self._desk.earlier_attempt(ref)) is not None:
            self._end(earlier, ErrorCode.CANCELLED, "a later attempt took its place")
        choice = self._desk.take(sender, submit, self._board.num_waiting)
        if choice is None:
            return
        stop = find_stop(choice.request, choice.sequence)
        if stop is not None:
            self._desk.finish(choice, stop)
            return
        self._alarms.set(choice, choice.half_time)
        self._board.wait(choice)

    def _on_cancel(self, message: Cancel) -> None:
        choice = self._desk.get(message.ref)
        if choice is None:
            self._counters["late_cancels"] += 1
            return
        self._end(choice, message.reason, "cancelled by the gateway")

    def _on_flush(self, sender: str, message: Flush) -> None:
        if not self._is_idle:
            self._send(sender, Flushed(message.flush_id, ok=False))
            return
        self._send(sender, Flushed(message.flush_id, ok=True, num_pages=self._cache.flush()))

    def on_transfer(self, event: TransferEvent) -> None:
        self._due_at = -inf
        match event:
            case Notice():
                notice = decode_notice(event.payload)
                if notice is None:
                    self._counters["stray_notices"] += 1
                else:
                    self._fetching.on_notice(notice)
            case PeerLost():
                worker = self._links.lost(event.peer)
                if worker is not None:
                    self._fetching.lost(worker)
                    self._board.stirred = True
            case _:
                self._counters["stray_events"] += 1
        self._desk.flush()

    # ---- time --------------------------------------------------------------------------------------------------------

    def advance(self) -> float | None:
        """Most passes only take a step's output: nothing else has happened since the last, and nothing is due."""
        now = self._clock.now()
        if now >= self._alarms.next_at:
            self._ring(now)
        for gateway, silence_s in self._gateways.look(now):
            self._leave(gateway, silence_s)
        if now >= self._due_at or self._board.stirred or self._calls.are_watched:
            self._look_around(now)
        wakeup = min(self._due_at, self._gateways.silent_at) if self._board.entries else self._due_at
        return None if wakeup == inf else wakeup

    def _look_around(self, now: float) -> None:
        """Everything but deadlines and silence that a pass may find to do, and when the next one has to look again."""
        if now >= self._links_due:
            self._board.stirred = True
        self._links_due = self._links.advance(now)
        self._fetching.advance(now)
        if self._calls.is_stuck:
            self._ask_for_ends()
        self._admission.advance()
        self._desk.flush()
        self._due_at = min(self._links_due, self._calls.wakeup(now), self._fetching.ask_at, self._alarms.next_at)

    def _ring(self, now: float) -> None:
        """End what is past its deadline; nothing waits for others with half of its time behind it."""
        for choice in self._alarms.due(now):
            if now >= choice.deadline:
                self._end(choice, ErrorCode.DEADLINE, "the request's deadline has passed")
                continue
            next_look = choice.deadline
            entry = self._board.entries[choice.ref]
            if isinstance(entry, Waiting):
                self._board.stop_following(choice)
            elif isinstance(entry, Preparing) and self._fetching.look_after(entry):
                next_look = min(next_look, now + max((choice.deadline - now) / 2, MIN_LOOK_S))
            if self._desk.get(choice.ref) is choice:
                self._alarms.set(choice, next_look)

    def _leave(self, gateway: str, silence_s: float) -> None:
        for choice in self._desk.of(gateway):
            self._counters["left_by_gateway"] += 1
            self._end(choice, ErrorCode.CANCELLED, f"{gateway} has been silent for {silence_s:.1f} s")

    def _ask_for_ends(self) -> None:
        """Of those whose loose calls cover too much; and if that is of no use, of this process."""
        for request in self._calls.kill_requests(self._limits.kill_after_s):
            self._counters["kill_requests"] += 1
            for gateway in self._gateways.names():
                self._send(gateway, request)
        if not self._must_restart and self._calls.must_restart(self._limits.give_up_after_s):
            self._must_restart = self._is_draining = True

    # ---- steps -------------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        board = self._board
        if board.ready:
            self._start_ready()
        if not board.running:
            return None
        rows = split_token_budget(board.running.values(), self._limits)
        if self._drafter is not None:
            rows = with_drafts(rows, self._drafter, self._limits.num_draft_tokens)
        rows = self._growth.keep(rows)
        self._desk.flush()
        if not rows:
            return None
        self._next_step += 1
        board.steps.append(InflightStep(self._next_step, rows))
        self._counters["steps"] += 1
        return make_batch(self._next_step, rows)

    def _start_ready(self) -> None:
        board = self._board
        for entry in sorted(board.ready.values(), key=lambda entry: entry.choice.order):
            if len(board.running) >= self._limits.max_running_requests:
                break
            board.run(entry)
        board.sort_running()

    def update(self, output: BatchOutput) -> None:
        rows = self._board.take_step(output.step_id)
        if not rows:
            self._counters["stray_outputs"] += 1
            return
        sampled = {sample.row_id: sample for sample in output.sampled}
        for row in rows:
            row.entry.inflight.pop(0)
            if row.entry.has_left:
                self._counters["dropped_rows"] += 1
            else:
                self._apply(row, sampled.get(row.row_id))
        self._desk.flush()

    @property
    def queues(self) -> DecodeQueues:
        """What a simulator's fast-forward looks into."""
        return self._board

    @property
    def gateways(self) -> GatewayLiveness:
        return self._gateways

    def sequence(self, ref: ChoiceRef) -> Sequence:
        """Of an unfinished choice."""
        choice = self._desk.get(ref)
        if choice is None:
            raise InvariantError(f"{ref} has ended")
        return choice.sequence

    def _apply(self, row: ScheduledRow, sampled: Sampled | None) -> None:
        """Tokens and KV of one row, together."""
        entry, choice = row.entry, row.entry.choice
        if row.samples and (sampled is None or not sampled.token_ids):
            reason = (sampled and sampled.error) or "no token came back"
            self._end(choice, ErrorCode.INTERNAL, f"sampling failed: {reason}")
            return
        choice.sequence.num_computed += row.num_new
        if row.num_new > 1 or not row.samples:
            self._note_prefill(choice, row.num_new - row.samples)
        stop = self._accept(row, sampled) if sampled is not None and row.samples else None
        if stop is not None:
            self._board.leave(entry)
            self._desk.finish(choice, stop)
        elif choice.sequence.num_computed >= entry.commit_at:
            self._board.commit_computed(entry)

    def _accept(self, row: ScheduledRow, sampled: Sampled) -> Stop | None:
        """Append the drawn tokens that belong to the choice; all of them but the last have KV, as accepted drafts do."""
        choice, sequence = row.entry.choice, row.entry.choice.sequence
        first, stop = sequence.num_outputs, None
        for token_id in sampled.token_ids:
            sequence.append(token_id)
            if (stop := find_stop(choice.request, sequence)) is not None:
                break
        if row.drafts is not None:
            sequence.num_computed += sequence.num_outputs - first - 1
            self._counters["draft_tokens"] += len(row.drafts)
            self._counters["accepted_draft_tokens"] += len(sampled.token_ids) - 1
        if "first_token" not in choice.record.marks:
            choice.record.mark("first_token", self._clock.now())
        self._desk.say(choice, sampled, first)
        return stop

    def _note_prefill(self, choice: Choice, num_tokens: int) -> None:
        """Tokens before the last one were computed here."""
        self._counters["local_prefill_tokens"] += num_tokens
        choice.record.add_computed(num_tokens)

    def _end(self, choice: Choice, code: ErrorCode, message: str) -> None:
        """End an unfinished choice in whatever state it is."""
        self._board.leave(self._board.entries[choice.ref])
        self._desk.fail(choice, code, message)

    # ---- what others see ---------------------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        counts = self._cache.counts()
        board = self._board
        return WorkerLoad(
            num_running=len(board.running),
            num_waiting=board.num_waiting + len(board.preparing) + len(board.ready),
            queued_tokens=board.num_queued_tokens(),
            inflight_pages=counts.inflight,
            private_pages=counts.private,
            pinned_pages=counts.pinned,
            cached_pages=counts.cached,
            free_pages=counts.free,
            counters={name: float(value) for name, value in self._counters.items()},
            overdue_pages=self._calls.num_overdue(),
            must_restart=self._must_restart,
        )

    def check(self) -> None:
        """Raise InvariantError unless every page, lease, ticket and choice has the owners it should."""
        self._board.check()
        self._desk.check(self._board.entries)
        self._alarms.check(self._board.entries.keys())
