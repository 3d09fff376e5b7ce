"""Dispatcher: gets every choice served by some decode worker, whatever becomes of the workers. Pure and single-threaded.

A choice's states are in `choice`, a worker's in `registry`. Invariants:

- every submitted choice ends in exactly one on_finished or on_failed, at the latest at its deadline;
- its sink sees output `i` exactly once and in order: only the current attempt's tokens at the expected index count;
- after a hand-over the former worker gets a Cancel, and another whenever a message shows that it goes on;
- a choice that was on two workers that died is failed, not tried on a third: it may be what killed them. Only a proven
  end counts (an exit status, or a successor under the same lock), also if the proof comes later; silence does not. A
  worker that died before it accepted the choice counts half: a restart of all workers must not use up the limit.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from random import Random
from typing import Protocol

from msgspec import structs

from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode
from headstart.core.messages import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    Flushed,
    Heartbeat,
    Join,
    KillRequest,
    LauncherHello,
    Leave,
    Message,
    Rejected,
    Role,
    Send,
    Submit,
    TokenDelta,
    Tokens,
    WorkerExited,
    WorkerRef,
)
from headstart.core.request import ChoiceRef, FinishReason, Request
from headstart.gateway.choice_record import ChoiceRecord, Queued, Serving, Sink, Stopping, Submitted, bounded_stats
from headstart.gateway.cluster import Cluster
from headstart.gateway.flush import FlushDone, Flushes
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.open_requests import OpenRequests
from headstart.gateway.policy import MakePolicy, prefix_affinity
from headstart.gateway.registry import WorkerRecord
from headstart.gateway.router import Refusal, RequestRouter


class DispatcherApi(Protocol):
    """Everything that reaches a dispatcher: clients on one side, workers and time on the other. A recorder has it too."""

    def submit(self, request: Request, sink: Sink) -> None: ...

    def cancel(self, request_id: str, code: ErrorCode = ErrorCode.CANCELLED, message: str = "cancelled") -> None: ...

    def stop(self, request_id: str, choice_index: int) -> None: ...

    def flush(self, done: FlushDone) -> None: ...

    def handle(self, sender: str, message: Message) -> None: ...

    def advance(self) -> float | None: ...


class Dispatcher:
    """Submissions in, messages out. Drive it with `handle` for every message, then `advance`."""

    def __init__(
        self,
        clock: Clock,
        send: Send,
        rng: Random,
        limits: DispatchLimits,
        make_policy: MakePolicy = prefix_affinity,
        model_fingerprint: str = "",
    ) -> None:
        self._clock = clock
        self._send = send
        self._limits = limits
        self._open = OpenRequests()
        self._policy = make_policy(rng)
        self._notified: OrderedDict[ChoiceRef, float] = OrderedDict()  # stale attempts that were cancelled, and when
        self._next_tick = float("-inf")
        self._next_deadline = float("inf")
        self.flushes = Flushes(send, limits.resubmit_after_s)
        self.counters: Counter[str] = Counter()
        self._cluster = Cluster(send, limits, self.counters, model_fingerprint)
        self.registry = self._cluster.registry
        self._router = RequestRouter(self.registry, self._policy, limits)

    # ---- the client's side -------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Take one choice. Its end, also a refusal, comes through the sink, possibly before this returns.

        Choices of one request share its id and go to the same decode worker. `remaining_s` starts the deadline.
        Raises InvariantError for a choice that is unfinished already.
        """
        now = self._clock.now()
        choice = ChoiceRecord(request, sink, now + request.remaining_s, Queued(now), tokens=list(request.output_ids))
        if self.is_full:
            sink.on_failed(Failed(choice.ref, ErrorCode.BUSY, "too many unfinished requests, try again later"))
            return
        self._open.add(choice)
        self.counters["submitted"] += 1
        self._next_deadline = min(self._next_deadline, choice.deadline)
        self._assign(choice, now)

    def cancel(self, request_id: str, code: ErrorCode = ErrorCode.CANCELLED, message: str = "cancelled") -> None:
        """End every unfinished choice of a request."""
        for choice in self._open.of_request(request_id):
            self._abandon(choice, code, message)

    def stop(self, request_id: str, choice_index: int) -> None:
        """The client has all it wanted of this choice: end it as finished, with the worker's stats if they come."""
        choice = self._open.find(request_id, choice_index)
        if choice is None or isinstance(choice.state, Stopping):
            return
        if isinstance(choice.state, Queued):
            self._finish(choice, choice.finished(FinishReason.STOP))
            return
        choice.state = Stopping(choice.state.worker, self._clock.now())
        self._send(str(choice.state.worker), Cancel(choice.ref))

    def flush(self, done: FlushDone) -> None:
        """Drop unpinned cache pages on every worker; `done(ok, pages)` once. Refused while anything is unfinished."""
        if self.num_unfinished:
            done(False, 0)
            return
        workers = [record.ref for record in self.registry.all() if record.may_return]
        self.flushes.start(workers, self._clock.now(), done)

    @property
    def is_full(self) -> bool:
        """Whether a submission would be answered BUSY."""
        return self.num_unfinished >= self._limits.max_unfinished

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    def open_choices(self, worker: WorkerRef) -> int:
        record = self.registry.get(worker)
        return 0 if record is None else record.num_open

    @property
    def capacity_tokens(self) -> int | None:
        """Longest prompt plus output that some decode worker can hold; None while no worker is known."""
        return self.registry.capacity_tokens(Role.DECODE)

    @property
    def is_ready(self) -> bool:
        return bool(self.registry.alive(Role.DECODE))

    def iter_choices(self) -> Iterator[ChoiceRecord]:
        return iter(self._open)

    # ---- the workers' side -------------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message) -> None:
        """Take a message. Unexpected, late and duplicate ones are counted and ignored."""
        match message:
            case Tokens():
                now = self._clock.now()
                for delta in message.deltas:
                    self._on_tokens(sender, delta, now)
            case Accepted() | Rejected() | Finished() | Failed():
                self._on_reply(sender, message)
            case Heartbeat():
                self._cluster.handle(sender, message, self._clock.now())
            case Join() | Leave() | WorkerExited() | LauncherHello() | KillRequest():
                self._on_cluster(sender, message)
            case Flushed():
                self.flushes.answered(sender, message)
            case _:
                self.counters["unexpected_messages"] += 1

    def advance(self) -> float | None:
        """Work that time drives: deadlines, repeats, silent workers. Returns when to come back at the latest."""
        now = self._clock.now()
        if now >= self._next_tick:
            self._tick(now)
        elif now >= self._next_deadline:
            self._expire(now)
        is_idle = not self._open and not self.flushes.is_open and not any(self.registry.all())
        return None if is_idle else min(self._next_tick, self._next_deadline)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _current(self, sender: str, ref: ChoiceRef) -> ChoiceRecord | None:
        """The choice this is about, if it comes from the worker and attempt that have it now."""
        choice = self._open.find(ref.request_id, ref.choice)
        if choice is None or choice.attempt != ref.attempt or choice.worker_name != sender:
            return None
        return choice

    def _on_tokens(self, sender: str, delta: TokenDelta, now: float) -> None:
        choice = self._current(sender, delta.ref)
        if choice is None:
            self.counters["late_tokens"] += len(delta.token_ids)
            self._notify_stale(sender, delta.ref)
            return
        if isinstance(choice.state, Stopping):
            return
        self._note_running(choice, now)
        if delta.index < len(choice.tokens):
            self.counters["duplicate_tokens"] += len(delta.token_ids)
        elif delta.index > len(choice.tokens):
            self._on_gap(choice)
        else:
            choice.tokens.extend(delta.token_ids)
            choice.sink.on_tokens(delta)

    def _note_running(self, choice: ChoiceRecord, now: float) -> None:
        state = choice.state
        if isinstance(state, Serving):
            state.last_seen_at = now
        elif isinstance(state, Submitted):
            choice.state = Serving(state.worker, now)
            choice.refusals.clear()

    def _on_gap(self, choice: ChoiceRecord) -> None:
        """Something of this attempt was lost: start another where its tokens end."""
        self.counters["gaps"] += 1
        assert choice.worker is not None
        self._send(str(choice.worker), Cancel(choice.ref))
        self._requeue(choice, self._clock.now())

    def _on_reply(self, sender: str, message: Accepted | Rejected | Finished | Failed) -> None:
        choice = self._current(sender, message.ref)
        if choice is None:
            self.counters["late_replies"] += 1
            if isinstance(message, Accepted):
                self._notify_stale(sender, message.ref)
            return
        if isinstance(choice.state, Stopping):
            if not isinstance(message, Accepted):
                stats = message.stats if isinstance(message, Finished | Failed) else None
                self._finish(choice, choice.finished(FinishReason.STOP, stats))
            return
        match message:
            case Accepted():
                self._note_running(choice, self._clock.now())
            case Rejected():
                self._on_rejected(choice, message)
            case Finished() if message.num_tokens > len(choice.tokens):
                self._on_gap(choice)
            case Finished():
                self._finish(choice, message)
            case Failed() if message.code in (ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE):
                self._requeue(choice, self._clock.now())  # it drains or took us for dead: nobody here cancelled it
            case Failed():
                self._fail(choice, message.code, message.message)

    def _on_rejected(self, choice: ChoiceRecord, message: Rejected) -> None:
        assert choice.worker is not None
        if message.code not in (ErrorCode.BUSY, ErrorCode.UNAVAILABLE):
            self._fail(choice, message.code, message.message)
            return
        self.counters["refused"] += 1
        choice.refusals[choice.worker] = message.code
        choice.num_failed_attempts -= 1  # a full queue is nothing that counts against the request
        self._requeue(choice, self._clock.now())

    def _on_cluster(self, sender: str, message: Join | Leave | WorkerExited | LauncherHello | KillRequest) -> None:
        now = self._clock.now()
        is_known = isinstance(message, Join) and self.registry.get(message.worker) is not None
        for worker, has_ended in self._cluster.handle(sender, message, now):
            self._on_lost(worker, now, has_ended=has_ended)
        if not isinstance(message, Join):
            self._tick(now)
        elif not is_known:
            self._check_all(now, repeats=False)

    def _notify_stale(self, sender: str, ref: ChoiceRef) -> None:
        """Repeat to a worker that it no longer has this attempt, at most once in a while."""
        now = self._clock.now()
        if now - self._notified.get(ref, float("-inf")) < self._limits.resubmit_after_s:
            return
        self._notified[ref] = now
        self._notified.move_to_end(ref)
        while len(self._notified) > self._limits.max_unfinished:
            self._notified.popitem(last=False)
        self._send(sender, Cancel(ref))

    # ---- time --------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._next_tick = now + self._limits.beat_s
        self._check_all(now, repeats=True)
        if (num_tokens := self.registry.pool_tokens(Role.DECODE)) > 0:
            self._policy.note_pools(num_tokens)

    def _check_all(self, now: float, *, repeats: bool) -> None:
        """Check workers, deadlines and choices that wait. `repeats`: send decode workers the membership again."""
        for worker, has_ended in self._cluster.judge(now, repeats=repeats):
            self._on_lost(worker, now, has_ended=has_ended)
        self._expire(now)
        for choice in self._open:
            self._retry_due(choice, now)
        self.flushes.expire(now)

    def _expire(self, now: float) -> None:
        for choice in self._open:
            if choice.deadline > now:
                continue
            if isinstance(choice.state, Stopping):
                self._finish(choice, choice.finished(FinishReason.STOP))
            else:
                self._abandon(choice, ErrorCode.DEADLINE, "the request's deadline has passed")
        self._next_deadline = min((choice.deadline for choice in self._open), default=float("inf"))

    def _retry_due(self, choice: ChoiceRecord, now: float) -> None:
        """Do what is due for a choice that waits for an answer or for a worker."""
        limit = self._limits.resubmit_after_s
        match choice.state:
            case Queued():
                choice.refusals.clear()
                self._assign(choice, now)
            case Submitted(worker, sent_at, num_repeats, was_running) if now - sent_at >= limit:
                if num_repeats >= self._limits.max_repeats:
                    self._on_gap(choice)
                else:
                    self._repeat(choice, Submitted(worker, now, num_repeats + 1, was_running))
            case Serving(worker, last_seen_at) if now - last_seen_at >= limit:
                if (end := choice.completion()) is not None:
                    self._finish(choice, end)  # only the message of its end was lost
                elif now - last_seen_at >= self._limits.running_silence_s:
                    self._repeat(choice, Submitted(worker, now, was_running=True))
            case Stopping(_, since) if now - since >= limit:
                self._finish(choice, choice.finished(FinishReason.STOP))

    def _repeat(self, choice: ChoiceRecord, state: Submitted) -> None:
        """Submit again under the same attempt: a worker that has it accepts again, one that ended it sends nothing."""
        choice.state = state
        self._send(str(state.worker), Submit(choice.at_attempt(state.sent_at), self._router.ranking(choice)))

    def _on_lost(self, worker: WorkerRef, now: float, *, has_ended: bool) -> None:
        """Hand a worker's choices to others. Harmless if it turns out to live. `has_ended`: its end is proven."""
        self.flushes.lost(str(worker))
        for choice in self._open:
            if has_ended:
                choice.note_end(worker)
            if choice.worker != worker:
                continue
            self._send(str(worker), Cancel(choice.ref))
            if isinstance(choice.state, Stopping):
                self._finish(choice, choice.finished(FinishReason.STOP))
                continue
            choice.note_loss(worker, has_ended=has_ended)
            self._requeue(choice, now)

    # ---- moving a choice ---------------------------------------------------------------------------------------------

    def _requeue(self, choice: ChoiceRecord, now: float) -> None:
        choice.num_failed_attempts += 1
        if (completion := choice.completion()) is not None:
            self._finish(choice, completion)
        elif now >= choice.deadline:
            self._fail(choice, ErrorCode.DEADLINE, "the request's deadline has passed")
        elif choice.num_deaths >= 2:
            self._fail(choice, ErrorCode.WORKER_LOST, "two workers died while they served this request")
        elif choice.num_failed_attempts >= self._limits.max_failed_attempts:
            self._fail(choice, ErrorCode.UNAVAILABLE, f"no worker completed this in {choice.attempt + 1} attempts")
        else:
            self._set_state(choice, Queued(now))
            self._assign(choice, now)

    def _assign(self, choice: ChoiceRecord, now: float) -> None:
        """Hand a queued choice to a worker, leave it queued, or fail it."""
        match self._router.route(choice, self._open.siblings(choice), now):
            case WorkerRecord() as record:
                self._hand_over(choice, record, now)
            case Refusal(code, message):
                self._fail(choice, code, message)

    def _hand_over(self, choice: ChoiceRecord, record: WorkerRecord, now: float) -> None:
        choice.attempt += 1
        choice.note_return(record.ref)
        self.counters["resubmitted"] += choice.attempt > 0
        self._set_state(choice, Submitted(record.ref, now))
        self._policy.note_given(choice)
        self._send(record.full_name, Submit(choice.at_attempt(now), self._router.ranking(choice)))

    def _set_state(self, choice: ChoiceRecord, state: Queued | Submitted) -> None:
        self.registry.count_open(choice.worker, -1)
        choice.state = state
        choice.worker_name = "" if state.worker is None else str(state.worker)
        self.registry.count_open(choice.worker, 1)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _abandon(self, choice: ChoiceRecord, code: ErrorCode, message: str) -> None:
        if choice.worker is not None:
            self._send(str(choice.worker), Cancel(choice.ref, code))
        self._fail(choice, code, message)

    def _finish(self, choice: ChoiceRecord, finished: Finished) -> None:
        if choice.worker is not None and choice.request.cacheable:
            self._policy.note_finished(choice)
        self._remove(choice)
        self.counters["finished"] += 1
        stats = bounded_stats(finished.stats, len(choice.request.prompt))
        if finished.num_tokens != len(choice.tokens) or stats is not finished.stats:
            finished = structs.replace(finished, num_tokens=len(choice.tokens), stats=stats)
        choice.sink.on_finished(finished)

    def _fail(self, choice: ChoiceRecord, code: ErrorCode, message: str) -> None:
        self._remove(choice)
        self.counters[f"failed_{code.value}"] += 1
        choice.sink.on_failed(Failed(choice.ref, code, message))

    def _remove(self, choice: ChoiceRecord) -> None:
        self._set_state(choice, Queued(0.0))
        self._open.remove(choice)
