"""Dispatcher: gets every choice served by some decode worker, whatever becomes of the workers. Pure and single-threaded.

A choice's states are in `choice`, a worker's in `registry`. Invariants:

- every submitted choice ends in exactly one on_finished or on_failed, at the latest at its deadline;
- its sink sees output `i` exactly once and in order: only the current attempt's tokens at the expected index count;
- after a hand-over the former worker is told to stop, and told again whenever it is heard to go on;
- a choice that was on two workers that died is failed, not tried on a third: it may be what killed them. One that
  died before it took the choice counts half: when all decode workers die at once, the choice is sent to a dead one.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from random import Random

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
    Submit,
    TokenDelta,
    Tokens,
    WorkerExited,
    WorkerRef,
)
from headstart.core.request import ChoiceRef, FinishReason, Request
from headstart.gateway.choice import Choice, Queued, Running, Sink, Stopping, Submitted
from headstart.gateway.cluster import DECODE, Cluster
from headstart.gateway.flush import FlushDone, Flushes
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.policy import MakePolicy, prefix_affinity
from headstart.gateway.registry import WorkerRecord
from headstart.gateway.router import Refusal, Router
from headstart.gateway.unfinished import Unfinished

Send = Callable[[str, Message], None]
"""(recipient, message); never blocks, never raises for a peer that is gone."""


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
        self._unfinished = Unfinished()
        self._policy = make_policy(rng)
        self._told: OrderedDict[ChoiceRef, float] = OrderedDict()  # stale attempts told to stop, and when
        self._next_sweep = float("-inf")
        self._next_deadline = float("inf")
        self.flushes = Flushes(send, limits.resubmit_after_s)
        self.counters: Counter[str] = Counter()
        self._cluster = Cluster(send, limits, self.counters, model_fingerprint)
        self.registry = self._cluster.registry
        self._router = Router(self.registry, self._policy, limits)

    # ---- the client's side -------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Take one choice. Its end, also a refusal, comes through the sink, possibly before this returns.

        Choices of one request share its id and go to the same decode worker. `remaining_s` starts the deadline.
        Raises InvariantError for a choice that is unfinished already.
        """
        now = self._clock.now()
        choice = Choice(request, sink, now + request.remaining_s, Queued(now), tokens=list(request.output_ids))
        if self.is_full:
            sink.on_failed(Failed(choice.ref, ErrorCode.BUSY, "too many unfinished requests, try again later"))
            return
        self._unfinished.add(choice)
        self.counters["submitted"] += 1
        self._next_deadline = min(self._next_deadline, choice.deadline)
        self._place(choice, now)

    def cancel(self, request_id: str, code: ErrorCode = ErrorCode.CANCELLED, message: str = "cancelled") -> None:
        """End every unfinished choice of a request."""
        for choice in self._unfinished.of_request(request_id):
            self._abandon(choice, code, message)

    def stop(self, request_id: str, choice_index: int) -> None:
        """The client has all it wanted of this choice: end it as finished, with the worker's stats if they come."""
        choice = self._unfinished.find(request_id, choice_index)
        if choice is None or isinstance(choice.place, Stopping):
            return
        if isinstance(choice.place, Queued):
            self._finish(choice, choice.finished(FinishReason.STOP))
            return
        choice.place = Stopping(choice.place.worker, self._clock.now())
        self._send(str(choice.place.worker), Cancel(choice.ref))

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
        return len(self._unfinished)

    def open_choices(self, worker: WorkerRef) -> int:
        record = self.registry.get(worker)
        return 0 if record is None else record.num_open

    @property
    def capacity_tokens(self) -> int | None:
        """Longest prompt plus output that some decode worker can hold; None while no worker is known."""
        return self.registry.capacity_tokens(DECODE)

    @property
    def is_ready(self) -> bool:
        return bool(self.registry.alive(DECODE))

    def iter_choices(self) -> Iterator[Choice]:
        return iter(self._unfinished)

    # ---- the workers' side -------------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message) -> None:
        """Take a message. Unexpected, late and duplicate ones are counted and ignored."""
        match message:
            case Tokens():
                for delta in message.deltas:
                    self._on_tokens(sender, delta)
            case Accepted() | Rejected() | Finished() | Failed():
                self._on_word(sender, message)
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
        if now >= self._next_sweep:
            self._sweep(now)
        elif now >= self._next_deadline:
            self._expire(now)
        is_idle = not self._unfinished and not self.flushes.is_open and not any(self.registry.all())
        return None if is_idle else min(self._next_sweep, self._next_deadline)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _current(self, sender: str, ref: ChoiceRef) -> Choice | None:
        """The choice this is about, if it comes from the worker and attempt that have it now."""
        choice = self._unfinished.find(ref.request_id, ref.choice)
        if choice is None or choice.attempt != ref.attempt or str(choice.worker) != sender:
            return None
        return choice

    def _on_tokens(self, sender: str, delta: TokenDelta) -> None:
        choice = self._current(sender, delta.ref)
        if choice is None:
            self.counters["late_tokens"] += len(delta.token_ids)
            self._tell_stale(sender, delta.ref)
            return
        if isinstance(choice.place, Stopping):
            return
        self._note_running(choice)
        if delta.index < len(choice.tokens):
            self.counters["duplicate_tokens"] += len(delta.token_ids)
        elif delta.index > len(choice.tokens):
            self._on_gap(choice)
        else:
            choice.tokens.extend(delta.token_ids)
            choice.sink.on_tokens(delta)

    def _note_running(self, choice: Choice) -> None:
        now = self._clock.now()
        if isinstance(choice.place, Submitted):
            choice.place = Running(choice.place.worker, now)
            choice.refusals.clear()
        elif isinstance(choice.place, Running):
            choice.place.heard_at = now

    def _on_gap(self, choice: Choice) -> None:
        """Something of this attempt was lost: start another where its tokens end."""
        self.counters["gaps"] += 1
        assert choice.worker is not None
        self._send(str(choice.worker), Cancel(choice.ref))
        self._requeue(choice, self._clock.now())

    def _on_word(self, sender: str, message: Accepted | Rejected | Finished | Failed) -> None:
        choice = self._current(sender, message.ref)
        if choice is None:
            self.counters["late_words"] += 1
            if isinstance(message, Accepted):
                self._tell_stale(sender, message.ref)
            return
        if isinstance(choice.place, Stopping):
            if not isinstance(message, Accepted):
                stats = message.stats if isinstance(message, Finished | Failed) else None
                self._finish(choice, choice.finished(FinishReason.STOP, stats))
            return
        match message:
            case Accepted():
                self._note_running(choice)
            case Rejected():
                self._on_rejected(choice, message)
            case Finished() if message.num_tokens > len(choice.tokens):
                self._on_gap(choice)
            case Finished():
                self._finish(choice, message)
            case Failed() if message.code in (ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE):
                self._requeue(choice, self._clock.now())  # it gave up on us or drains: nobody here asked for that
            case Failed():
                self._fail(choice, message.code, message.message)

    def _on_rejected(self, choice: Choice, message: Rejected) -> None:
        assert choice.worker is not None
        if message.code not in (ErrorCode.BUSY, ErrorCode.UNAVAILABLE):
            self._fail(choice, message.code, message.message)
            return
        self.counters["refused"] += 1
        choice.refusals[choice.worker] = message.code
        choice.num_setbacks -= 1  # a full queue is nothing that counts against the request
        self._requeue(choice, self._clock.now())

    def _on_cluster(self, sender: str, message: Join | Leave | WorkerExited | LauncherHello | KillRequest) -> None:
        now = self._clock.now()
        is_known = isinstance(message, Join) and self.registry.get(message.worker) is not None
        for worker, died in self._cluster.handle(sender, message, now):
            self._lose(worker, now, died=died)
        if not isinstance(message, Join):
            self._sweep(now)
        elif not is_known:
            self._look_around(now, repeats=False)

    def _tell_stale(self, sender: str, ref: ChoiceRef) -> None:
        """Repeat to a worker that it no longer has this attempt, at most once in a while."""
        now = self._clock.now()
        if now - self._told.get(ref, float("-inf")) < self._limits.resubmit_after_s:
            return
        self._told[ref] = now
        self._told.move_to_end(ref)
        while len(self._told) > self._limits.max_unfinished:
            self._told.popitem(last=False)
        self._send(sender, Cancel(ref))

    # ---- time --------------------------------------------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + self._limits.beat_s
        self._look_around(now, repeats=True)
        if (num_tokens := self.registry.pool_tokens(DECODE)) > 0:
            self._policy.note_pools(num_tokens)

    def _look_around(self, now: float, *, repeats: bool) -> None:
        """See what has changed. `repeats`: tell decode workers also what they know."""
        for worker, died in self._cluster.judge(now, repeats=repeats):
            self._lose(worker, now, died=died)
        self._expire(now)
        for choice in self._unfinished:
            self._nudge(choice, now)
        self.flushes.expire(now)

    def _expire(self, now: float) -> None:
        for choice in self._unfinished:
            if choice.deadline > now:
                continue
            if isinstance(choice.place, Stopping):
                self._finish(choice, choice.finished(FinishReason.STOP))
            else:
                self._abandon(choice, ErrorCode.DEADLINE, "the request's deadline has passed")
        self._next_deadline = min((choice.deadline for choice in self._unfinished), default=float("inf"))

    def _nudge(self, choice: Choice, now: float) -> None:
        """Do what is due for a choice that waits for an answer or for a worker."""
        limit = self._limits.resubmit_after_s
        match choice.place:
            case Queued():
                choice.refusals.clear()
                self._place(choice, now)
            case Submitted(worker, sent_at, num_repeats, was_running) if now - sent_at >= limit:
                if num_repeats >= self._limits.max_repeats:
                    self._on_gap(choice)
                else:
                    self._repeat(choice, Submitted(worker, now, num_repeats + 1, was_running))
            case Running(worker, heard_at) if now - heard_at >= limit:
                if (end := choice.completion()) is not None:
                    self._finish(choice, end)  # only the word of its end was lost
                elif now - heard_at >= self._limits.running_silence_s:
                    self._repeat(choice, Submitted(worker, now, was_running=True))
            case Stopping(_, since) if now - since >= limit:
                self._finish(choice, choice.finished(FinishReason.STOP))

    def _repeat(self, choice: Choice, asked: Submitted) -> None:
        """Ask again under the same attempt: a worker that has it says so, one that ended it stays silent."""
        choice.place = asked
        self._send(str(asked.worker), Submit(choice.at_attempt(asked.sent_at), self._router.ranking(choice)))

    def _lose(self, worker: WorkerRef, now: float, *, died: bool) -> None:
        """Nothing more will come of this worker: its choices go elsewhere. Harmless if it turns out to live."""
        self.flushes.lost(str(worker))
        for choice in self._unfinished:
            if choice.worker != worker:
                continue
            self._send(str(worker), Cancel(choice.ref))
            if isinstance(choice.place, Stopping):
                self._finish(choice, choice.finished(FinishReason.STOP))
                continue
            if died:
                choice.note_death(worker)
            self._requeue(choice, now)

    # ---- moving a choice ---------------------------------------------------------------------------------------------

    def _requeue(self, choice: Choice, now: float) -> None:
        choice.num_setbacks += 1
        if (completion := choice.completion()) is not None:
            self._finish(choice, completion)
        elif now >= choice.deadline:
            self._fail(choice, ErrorCode.DEADLINE, "the request's deadline has passed")
        elif choice.num_deaths >= 2:
            self._fail(choice, ErrorCode.WORKER_LOST, "two workers died while they served this request")
        elif choice.num_setbacks >= self._limits.max_setbacks:
            self._fail(choice, ErrorCode.UNAVAILABLE, f"no worker completed this in {choice.attempt + 1} attempts")
        else:
            self._set_place(choice, Queued(now))
            self._place(choice, now)

    def _place(self, choice: Choice, now: float) -> None:
        """Hand a queued choice to a worker, leave it queued, or fail it."""
        match self._router.route(choice, self._unfinished.siblings(choice), now):
            case WorkerRecord() as record:
                self._hand_over(choice, record, now)
            case Refusal(code, message):
                self._fail(choice, code, message)

    def _hand_over(self, choice: Choice, record: WorkerRecord, now: float) -> None:
        choice.attempt += 1
        choice.died.pop(record.ref, None)  # it was only silent
        self.counters["resubmitted"] += choice.attempt > 0
        self._set_place(choice, Submitted(record.ref, now))
        self._policy.note_given(choice)
        self._send(record.full_name, Submit(choice.at_attempt(now), self._router.ranking(choice)))

    def _set_place(self, choice: Choice, place: Queued | Submitted) -> None:
        self.registry.count_open(choice.worker, -1)
        choice.place = place
        self.registry.count_open(choice.worker, 1)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _abandon(self, choice: Choice, code: ErrorCode, message: str) -> None:
        if choice.worker is not None:
            self._send(str(choice.worker), Cancel(choice.ref, code))
        self._fail(choice, code, message)

    def _finish(self, choice: Choice, finished: Finished) -> None:
        if choice.worker is not None and choice.request.cacheable:
            self._policy.note_finished(choice)
        self._remove(choice)
        self.counters["finished"] += 1
        if finished.num_tokens != len(choice.tokens):
            finished = structs.replace(finished, num_tokens=len(choice.tokens))
        choice.sink.on_finished(finished)

    def _fail(self, choice: Choice, code: ErrorCode, message: str) -> None:
        self._remove(choice)
        self.counters[f"failed_{code.value}"] += 1
        choice.sink.on_failed(Failed(choice.ref, code, message))

    def _remove(self, choice: Choice) -> None:
        self._set_place(choice, Queued(0.0))
        self._unfinished.remove(choice)
