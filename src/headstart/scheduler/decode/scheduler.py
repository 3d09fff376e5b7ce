"""The decode worker's scheduler: the home of a request and of its KV.

A choice's states, what each holds and the moves between them are in `states`; a ticket's are in `scheduler.tickets`.
Every pass takes in what happened, drops what ran out of time, admits what fits, and makes the next step of what runs.
Whatever ends a choice goes through `DecodeQueues.end`. What a call has to tell gateways leaves at its end.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from math import inf, isfinite
from typing import Concatenate, ParamSpec, TypeVar

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
from headstart.scheduler.decode.batching import InflightStep, make_batch, split_token_budget, with_drafts, work_of
from headstart.scheduler.decode.deadlines import Deadlines, Timer
from headstart.scheduler.decode.gateway_port import GatewayLiveness, GatewayPort
from headstart.scheduler.decode.preemption import Preemption
from headstart.scheduler.decode.prefill_client import PrefillClient
from headstart.scheduler.decode.prefill_workers import Placement, PrefillWorkers
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Abort, Choice, Preparing, ScheduledRow, Waiting, find_stop
from headstart.scheduler.decode.step_time import ItlControl
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.protocol import Drafter
from headstart.scheduler.tickets import Ticket, TicketTable
from headstart.transfer.contract import Notice, PageDigests, PeerLost, TransferEvent

MIN_CHECK_S = 0.05
"""Shortest time between two checks whether a prefill worker makes progress."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class DecodePorts:
    """How the scheduler reaches the world, and its peers its pool."""

    descriptor: bytes  # of our transport: what peers connect to
    page_bytes: int
    clock: Clock
    send: Send
    digests: PageDigests | None = None  # of our pool; None: pages are accepted unverified
    drafter: Drafter | None = None  # None: rows have no drafts


def _then_flush(
    method: Callable[Concatenate["DecodeScheduler", _P], _R],
) -> Callable[Concatenate["DecodeScheduler", _P], _R]:
    """For every call from outside: what it has to tell gateways is sent at its end."""

    @wraps(method)
    def call(scheduler: "DecodeScheduler", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        result = method(scheduler, *args, **kwargs)
        scheduler._gateways.flush()
        return result

    return call


class DecodeScheduler:
    """Satisfies `scheduler.protocol.Scheduler`."""

    def __init__(
        self, worker: WorkerRef, kv_spec: KVSpec, limits: DecodeLimits, cache: PrefixCache, ports: DecodePorts
    ) -> None:
        clock, send = ports.clock, ports.send
        counters = self._counters = Counter[str]()
        self._limits = limits
        self._cache = cache
        self._clock = clock
        self._send = send
        self._drafter = ports.drafter if limits.num_draft_tokens else None
        self._deadlines = Deadlines()
        self._gateways = GatewayPort(cache, limits, ports.page_bytes, clock, send, counters)
        self._liveness = GatewayLiveness(limits.gateway_silence_s, clock.now())
        self._tickets = TicketTable(cache, clock, send, counters, ports.digests)
        self._queues = DecodeQueues(cache, limits, self._tickets, self._gateways, self._deadlines, counters)
        self._workers = PrefillWorkers(Hello(worker, kv_spec, ports.descriptor), send, counters)
        placement = Placement(limits, self._workers, self._tickets)
        self._prefill_client = PrefillClient(self._queues, self._tickets, placement, clock, send, counters)
        self._admission = Admission(self._queues, cache, placement, self._prefill_client, clock, counters)
        self._preemption = Preemption(self._queues, cache, self._tickets, counters)
        bounds_itl = limits.itl_slo_s is not None or isfinite(limits.max_step_stretch)
        self._itl = ItlControl(limits) if bounds_itl else None
        self._last_step = 0
        self._is_draining = False
        self._must_restart = False

    @property
    def _is_idle(self) -> bool:
        return not len(self._gateways) and not self._tickets.num_open_pages()

    def open_tickets(self) -> list[Ticket]:
        """Tickets whose writers may still write."""
        return [ticket for ticket in self._tickets if not ticket.is_complete]

    def states(self) -> Iterator[tuple[ChoiceRef, str]]:
        """Each open choice and its state."""
        for ref, entry in self._queues.entries.items():
            yield ref, type(entry).__name__.lower()

    # ---- messages ----------------------------------------------------------------------------------------------------

    @_then_flush
    def handle(self, sender: str, message: Message) -> None:
        self._deadlines.set(Timer.PEERS, -inf)
        match message:
            case Submit() | Cancel() | Flush() | Membership():
                self._liveness.on_message(sender, self._clock.now())
                self._on_gateway(sender, message)
            case PrefillDone():
                self._prefill_client.on_done(sender, message)
            case PrefillFailed():
                self._prefill_client.on_failed(sender, message)
            case TicketClosed():
                self._prefill_client.on_closed(sender, message)
            case Welcome() | Refused():
                self._on_handshake(sender, message)
            case WorkerExited():
                self._workers.on_exited(message.worker)
                self._prefill_client.on_ended(message.worker)
                self._queues.request_admission()
            case Drain():
                self._is_draining = True
            case _:
                self._counters["stray_messages"] += 1

    def _on_gateway(self, sender: str, message: Submit | Cancel | Flush | Membership) -> None:
        match message:
            case Submit():
                self._on_submit(sender, message)
            case Cancel():
                self._on_cancel(message)
            case Flush():
                is_idle = self._is_idle
                num_pages = self._cache.flush() if is_idle else 0
                self._send(sender, Flushed(message.flush_id, ok=is_idle, num_pages=num_pages))
            case Membership():
                ended, lost = self._workers.on_membership(message.prefill, self._clock.now())
                for worker in ended:
                    self._prefill_client.on_ended(worker)
                for worker in lost:
                    self._prefill_client.on_lost(worker)
                self._queues.request_admission()

    def _on_handshake(self, sender: str, message: Welcome | Refused) -> None:
        if isinstance(message, Welcome):
            is_known = self._workers.on_welcome(sender, message)
        else:
            is_known = self._workers.on_refused(sender, message)
        if is_known:
            self._queues.request_admission()

    def _on_submit(self, sender: str, submit: Submit) -> None:
        ref = submit.request.ref
        if self._gateways.is_repeat(sender, ref):
            return
        if self._is_draining:
            self._send(sender, Rejected(ref, ErrorCode.UNAVAILABLE, "this decode worker is draining"))
            return
        if (earlier := self._gateways.earlier_attempt(ref)) is not None:
            self._queues.end(earlier, Abort(ErrorCode.CANCELLED, "a later attempt took its place"))
        choice = self._gateways.accept(sender, submit, self._queues.num_waiting)
        if choice is None:
            return
        self._queues.enqueue(choice)
        stop = find_stop(choice.request, choice.sequence)
        if stop is not None:
            self._queues.end(choice, stop)

    def _on_cancel(self, message: Cancel) -> None:
        choice = self._gateways.get(message.ref)
        if choice is None:
            self._counters["late_cancels"] += 1
        else:
            self._queues.end(choice, Abort(message.reason, "cancelled by the gateway"))

    @_then_flush
    def on_transfer(self, event: TransferEvent) -> None:
        self._deadlines.set(Timer.PEERS, -inf)
        match event:
            case Notice():
                notice = decode_notice(event.payload)
                if notice is None:
                    self._counters["stray_notices"] += 1
                else:
                    self._prefill_client.on_notice(notice)
            case PeerLost():
                worker = self._workers.on_disconnected(event.peer)
                if worker is not None:
                    self._prefill_client.on_lost(worker)
                    self._queues.request_admission()
            case _:
                self._counters["stray_events"] += 1

    # ---- time --------------------------------------------------------------------------------------------------------

    @_then_flush
    def advance(self) -> float | None:
        """Most passes only take a step's output: nothing else has happened since the last, and nothing is due."""
        now, deadlines = self._clock.now(), self._deadlines
        is_due = now >= deadlines.next_at
        if is_due:
            for owner in deadlines.expire(now):
                if isinstance(owner, Choice):
                    self._expire(owner, now)
        for gateway, silence_s in self._liveness.check(now):
            self._on_silent(gateway, silence_s)
        if is_due or self._queues.needs_admission or self._tickets.are_watched:
            self._advance_peers(now)
        return None if deadlines.next_at == inf else deadlines.next_at

    def _advance_peers(self, now: float) -> None:
        """What messages and time bring about between workers, and admission, which follows from it."""
        if self._workers.advance(now):
            self._queues.request_admission()
        self._prefill_client.advance(now)
        if self._tickets.is_stuck:
            self._request_kills()
        if self._queues.needs_admission:
            self._admission.advance(2 * self._limits.max_running_requests)
        next_at = min(self._workers.next_at, self._tickets.wakeup(now), self._prefill_client.next_at)
        self._deadlines.set(Timer.PEERS, next_at)
        self._deadlines.set(Timer.GATEWAYS, self._liveness.silent_at if self._queues.entries else inf)

    def _expire(self, choice: Choice, now: float) -> None:
        """End a choice past its deadline; none waits for others with half of its time behind it."""
        if now >= choice.deadline:
            self._queues.end(choice, Abort(ErrorCode.DEADLINE, "the request's deadline has passed"))
            return
        check_at = choice.deadline
        entry = self._queues.entries[choice.ref]
        if isinstance(entry, Waiting):
            self._queues.stop_following(choice)
        elif isinstance(entry, Preparing) and self._prefill_client.check_progress(entry):
            check_at = min(check_at, now + max((choice.deadline - now) / 2, MIN_CHECK_S))
        if self._gateways.get(choice.ref) is choice:
            self._deadlines.set(choice, check_at)

    def _on_silent(self, gateway: str, silence_s: float) -> None:
        for choice in self._gateways.of(gateway):
            self._counters["gateway_silence_cancels"] += 1
            reason = f"{gateway} has been silent for {silence_s:.1f} s"
            self._queues.end(choice, Abort(ErrorCode.CANCELLED, reason))

    def _request_kills(self) -> None:
        """Ask the launcher to kill the writers whose unanswered Cancels cover too much of the pool. If no exit is proven in
        time, drain and restart ourselves."""
        for request in self._tickets.kill_requests(self._limits.kill_after_s):
            self._counters["kill_requests"] += 1
            for gateway in self._liveness.names():
                self._send(gateway, request)
        if not self._must_restart and self._tickets.must_restart(self._limits.give_up_after_s):
            self._must_restart = self._is_draining = True

    # ---- steps -------------------------------------------------------------------------------------------------------

    @_then_flush
    def schedule(self) -> Batch | None:
        queues = self._queues
        if queues.ready:
            queues.start_ready(self._limits.max_running_requests if self._itl is None else self._itl.max_rows)
        if not queues.running:
            return None
        rows = split_token_budget(queues.running.values(), self._limits, self._chunk_tokens())
        if self._drafter is not None:
            rows = with_drafts(rows, self._drafter, self._limits.num_draft_tokens)
        rows = self._preemption.reserve_or_preempt(rows)
        if not rows:
            return None
        self._last_step += 1
        queues.steps.append(InflightStep(self._last_step, rows))
        self._counters["steps"] += 1
        return make_batch(self._last_step, rows)

    def _chunk_tokens(self) -> int:
        """Prompt tokens that the next step may compute for prompts that come out of the chunk budget."""
        if self._itl is None:
            return self._limits.chunked_prefill_size
        running = self._queues.running.values()
        starts = [entry.next_position for entry in running if entry.chunked and not entry.is_prompt_scheduled]
        return self._itl.chunk_tokens(len(running) - len(starts), starts[0]) if starts else 0

    @_then_flush
    def update(self, output: BatchOutput) -> None:
        rows = self._queues.take_step(output.step_id)
        if not rows:
            self._counters["stray_outputs"] += 1
            return
        if self._itl is not None:
            self._itl.observe(work_of(rows), output.elapsed_s)
        sampled = {sample.row_id: sample for sample in output.sampled}
        for row in rows:
            row.entry.inflight.pop(0)
            if row.entry.has_left:
                self._counters["dropped_rows"] += 1
            else:
                self._apply(row, sampled.get(row.row_id))

    def _apply(self, row: ScheduledRow, sampled: Sampled | None) -> None:
        """Tokens and KV of one row, together. What was drawn behind the choice's end is dropped."""
        entry, choice = row.entry, row.entry.choice
        if row.samples and (sampled is None or not sampled.token_ids):
            reason = (sampled and sampled.error) or "no token came back"
            self._queues.end(choice, Abort(ErrorCode.INTERNAL, f"sampling failed: {reason}"))
            return
        sequence, stop = choice.sequence, None
        sequence.num_computed += row.num_new
        if row.num_new > 1 or not row.samples:
            self._counters["local_prefill_tokens"] += row.num_new - row.samples
        if "first_token" not in choice.metrics.timestamps:
            choice.metrics.computed(row.start, row.stop)
            if row.samples:
                choice.metrics.timestamp("first_token", self._clock.now())
        if sampled is not None and row.samples:
            first = sequence.num_outputs
            for token_id in sampled.token_ids:
                sequence.append(token_id)
                if (stop := find_stop(choice.request, sequence)) is not None:
                    break
            if row.drafts is not None:
                sequence.num_computed += sequence.num_outputs - first - 1  # accepted drafts have KV
                self._counters["draft_tokens"] += len(row.drafts)
                self._counters["accepted_draft_tokens"] += len(sampled.token_ids) - 1
            self._gateways.queue_tokens(choice, sampled, first)
        if stop is not None:
            self._queues.end(choice, stop)
        elif sequence.num_computed >= entry.commit_at:
            self._queues.commit_computed(entry)

    # ---- what others see ---------------------------------------------------------------------------------------------

    @property
    def queues(self) -> DecodeQueues:
        """What a simulator's fast-forward looks into."""
        return self._queues

    @property
    def itl(self) -> ItlControl | None:
        return self._itl

    @property
    def liveness(self) -> GatewayLiveness:
        return self._liveness

    def sequence(self, ref: ChoiceRef) -> Sequence:
        """Of an open choice."""
        choice = self._gateways.get(ref)
        if choice is None:
            raise InvariantError(f"{ref} has ended")
        return choice.sequence

    def load(self) -> WorkerLoad:
        counts = self._cache.counts()
        queues = self._queues
        return WorkerLoad(
            num_running=len(queues.running),
            num_waiting=queues.num_waiting + len(queues.preparing) + len(queues.ready),
            queued_tokens=queues.num_queued_tokens(),
            inflight_pages=counts.inflight,
            private_pages=counts.private,
            pinned_pages=counts.pinned,
            cached_pages=counts.cached,
            free_pages=counts.free,
            counters={name: float(value) for name, value in self._counters.items()},
            overdue_pages=self._tickets.num_overdue(),
            must_restart=self._must_restart,
            mismatches=self._workers.mismatches(),
        )

    def check(self) -> None:
        """Raise InvariantError unless every page, lease, ticket and choice has the owners it should."""
        self._queues.check()
        self._gateways.check(self._queues.entries)
        self._deadlines.check([entry.choice for entry in self._queues.entries.values()])
