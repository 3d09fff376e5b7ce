"""Puts a scheduler or a dispatcher on tape: stands around it and its ports, and changes nothing of what it does.

    building ──built──► idle ◄──► in a call (calls may be nested) ──► the tape is full or closed: everything passes through

Whatever is read or sent outside a call is not on the tape; there is nothing of that kind.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from headstart.core.arrays import Int32Array
from headstart.core.batch import Batch, BatchOutput
from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished, Flushed, Message, Submit, TokenDelta, Tokens, WorkerLoad
from headstart.core.request import Request
from headstart.gateway.choice_record import Sink
from headstart.gateway.dispatch import Dispatcher
from headstart.gateway.flush import FlushDone
from headstart.gateway.policy import POLICIES, MakePolicy
from headstart.scheduler.protocol import Scheduler, Send
from headstart.transfer.contract import PageDigests, TransferError, TransferEvent, Transport
from headstart.worker.schedulers import SchedulerPorts, SchedulerSpec, make_scheduler
from headstart.worker.tape import (
    Asked,
    Call,
    Cancelled,
    Counted,
    Digested,
    DispatcherSpec,
    Effect,
    Input,
    Linked,
    Raised,
    Received,
    Said,
    StepEnded,
    Stopped,
    Submitted,
    TapeWriter,
    Wakeup,
    Wrote,
    client_name,
    frame_of,
    int32_bytes,
    launched,
    transferred,
)

FLUSH_CLIENT = "whoever asked for a flush"

R = TypeVar("R")


def policy_name(make_policy: MakePolicy) -> str:
    """The name that a head gives it."""
    return next(name for name, make in POLICIES.items() if make is make_policy)


@dataclass(slots=True)
class _OpenCall:
    input: Input
    times: list[float] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)

    def close(self) -> Call:
        return Call(self.input, tuple(self.times), tuple(self.effects))


class Recorder:
    """Satisfies `core.clock.Clock`: whoever is recorded reads the time here. One thread."""

    def __init__(self, tape: TapeWriter, clock: Clock) -> None:
        self._tape = tape
        self._clock = clock
        self._open = [_OpenCall(Asked("built"))]

    def now(self) -> float:
        now = self._clock.now()
        if self._open:
            self._open[-1].times.append(now)
        return now

    def note(self, effect: Callable[[], Effect]) -> None:
        if self._open:
            self._open[-1].effects.append(effect())

    def built(self) -> None:
        """The construction is over."""
        self._tape.write(self._open.pop().close())

    def call(self, noted: Callable[[], Input], run: Callable[[], R], result: Callable[[R], Effect] | None = None) -> R:
        """Do it, and put it on the tape."""
        if not self._tape.is_open:
            return run()
        call = _OpenCall(noted())
        self._open.append(call)
        try:
            value = run()
            if result is not None:
                call.effects.append(result(value))
            return value
        except BaseException as error:
            call.effects.append(Raised(type(error).__name__))
            raise
        finally:
            self._open.pop()
            if self._open:
                self._open[-1].effects.append(call.close())
            else:
                self._tape.write(call.close())
                if call.effects and isinstance(call.effects[-1], Raised):
                    self._tape.flush()


# ---- a worker --------------------------------------------------------------------------------------------------------


def record_scheduler(spec: SchedulerSpec, ports: SchedulerPorts, tape: TapeWriter) -> "RecordedScheduler":
    """A scheduler whose whole life goes on `tape`, which has `spec` as its head."""
    recorder = Recorder(tape, ports.clock)
    scheduler = make_scheduler(spec, recorded_ports(ports, recorder))
    recorder.built()
    return RecordedScheduler(scheduler, recorder, spec.kv_spec.page_size)


def recorded_ports(ports: SchedulerPorts, recorder: Recorder) -> SchedulerPorts:
    transport, digests = RecordedTransport(ports.transport, recorder), RecordedDigests(ports.digests, recorder)
    return SchedulerPorts(transport, digests, recorder, recorded_send(ports.send, recorder))


@dataclass(frozen=True, slots=True)
class RecordedScheduler:
    """Satisfies `scheduler.protocol.Scheduler`."""

    inner: Scheduler
    recorder: Recorder
    page_size: int

    def handle(self, sender: str, message: Message) -> None:
        self.recorder.call(lambda: Received(sender, frame_of(message)), lambda: self.inner.handle(sender, message))

    def on_transfer(self, event: TransferEvent) -> None:
        self.recorder.call(lambda: transferred(event), lambda: self.inner.on_transfer(event))

    def update(self, output: BatchOutput) -> None:
        self.recorder.call(lambda: StepEnded(output), lambda: self.inner.update(output))

    def advance(self) -> float | None:
        return self.recorder.call(lambda: Asked("advance"), self.inner.advance, Wakeup)

    def schedule(self) -> Batch | None:
        def noted(batch: Batch | None) -> Effect:
            return launched(batch, self.page_size)

        return self.recorder.call(lambda: Asked("schedule"), self.inner.schedule, noted)

    def load(self) -> WorkerLoad:
        return self.recorder.call(lambda: Asked("load"), self.inner.load, counted)


def counted(load: WorkerLoad) -> Counted:
    queues = load.num_running, load.num_waiting
    return Counted(
        *queues, load.inflight_pages, load.private_pages, load.pinned_pages, load.cached_pages, load.free_pages
    )


def recorded_send(send: Send, recorder: Recorder) -> Send:
    def say(recipient: str, message: Message) -> None:
        recorder.note(lambda: Said(recipient, frame_of(message)))
        send(recipient, message)

    return say


@dataclass(frozen=True, slots=True)
class RecordedTransport:
    """Satisfies `transfer.contract.Transport`. What `poll` brings is on the tape when the scheduler is told of it."""

    inner: Transport
    recorder: Recorder

    def descriptor(self) -> bytes:
        return self.inner.descriptor()

    def connect(self, peer: str, descriptor: bytes) -> None:
        try:
            self.inner.connect(peer, descriptor)
        except TransferError as error:
            reason = str(error)
            self.recorder.note(lambda: Linked(peer, descriptor, reason))
            raise
        self.recorder.note(lambda: Linked(peer, descriptor))

    def disconnect(self, peer: str) -> None:
        self.recorder.note(lambda: Linked(peer, None))
        self.inner.disconnect(peer)

    def write(self, peer: str, src_pages: Int32Array, dst_pages: Int32Array, notice: bytes) -> int:
        pages = int32_bytes(src_pages), int32_bytes(dst_pages)
        try:
            handle = self.inner.write(peer, src_pages, dst_pages, notice)
        except TransferError as error:
            reason = str(error)
            self.recorder.note(lambda: Wrote(peer, *pages, notice, error=reason))
            raise
        self.recorder.note(lambda: Wrote(peer, *pages, notice, handle))
        return handle

    def poll(self) -> list[TransferEvent]:
        return self.inner.poll()

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, slots=True)
class RecordedDigests:
    """Satisfies `transfer.contract.PageDigests`."""

    inner: PageDigests
    recorder: Recorder

    def digest(self, pages: Int32Array) -> list[int]:
        digests = self.inner.digest(pages)
        self.recorder.note(lambda: Digested(int32_bytes(pages), tuple(digests)))
        return digests


# ---- a gateway -------------------------------------------------------------------------------------------------------


def make_dispatcher(spec: DispatcherSpec, clock: Clock, send: Send) -> Dispatcher:
    return Dispatcher(clock, send, Random(spec.seed), spec.limits, POLICIES[spec.policy], spec.model_fingerprint)


@dataclass(frozen=True, slots=True)
class RecordedDispatcher:
    """Satisfies `gateway.dispatch.DispatcherApi`. `inner` was made with `recorder` for a clock, and says what it sends."""

    inner: Dispatcher
    recorder: Recorder

    def submit(self, request: Request, sink: Sink) -> None:
        name = client_name(request.ref.request_id, request.ref.choice)
        recorded = RecordedSink(sink, self.recorder, name)
        self.recorder.call(lambda: Submitted(frame_of(Submit(request))), lambda: self.inner.submit(request, recorded))

    def cancel(self, request_id: str, code: ErrorCode = ErrorCode.CANCELLED, message: str = "cancelled") -> None:
        self.recorder.call(
            lambda: Cancelled(request_id, code.value, message), lambda: self.inner.cancel(request_id, code, message)
        )

    def stop(self, request_id: str, choice_index: int) -> None:
        self.recorder.call(lambda: Stopped(request_id, choice_index), lambda: self.inner.stop(request_id, choice_index))

    def flush(self, done: FlushDone) -> None:
        def settle(ok: bool, num_pages: int) -> None:
            self.recorder.note(lambda: Said(FLUSH_CLIENT, frame_of(Flushed(0, ok, num_pages))))
            done(ok, num_pages)

        self.recorder.call(lambda: Asked("flush"), lambda: self.inner.flush(settle))

    def handle(self, sender: str, message: Message) -> None:
        self.recorder.call(lambda: Received(sender, frame_of(message)), lambda: self.inner.handle(sender, message))

    def advance(self) -> float | None:
        return self.recorder.call(lambda: Asked("advance"), self.inner.advance, Wakeup)


@dataclass(frozen=True, slots=True)
class RecordedSink:
    """Satisfies `gateway.choice_record.Sink`."""

    inner: Sink
    recorder: Recorder
    name: str

    def on_tokens(self, delta: TokenDelta) -> None:
        self.recorder.note(lambda: Said(self.name, frame_of(Tokens((delta,)))))
        self.inner.on_tokens(delta)

    def on_finished(self, finished: Finished) -> None:
        self.recorder.note(lambda: Said(self.name, frame_of(finished)))
        self.inner.on_finished(finished)

    def on_failed(self, failed: Failed) -> None:
        self.recorder.note(lambda: Said(self.name, frame_of(failed)))
        self.inner.on_failed(failed)


def record_dispatcher(spec: DispatcherSpec, clock: Clock, send: Send, tape: TapeWriter) -> RecordedDispatcher:
    """A dispatcher whose whole life goes on `tape`, which has `spec` as its head."""
    recorder = Recorder(tape, clock)
    dispatcher = make_dispatcher(spec, recorder, recorded_send(send, recorder))
    recorder.built()
    return RecordedDispatcher(dispatcher, recorder)
