"""`headstart replay`: feed what processes put on tape to fresh schedulers and dispatchers, and compare every decision.

    head ─► rebuilt ─► call after call ─► identical | different (the first difference is reported)

A replayed part reads the noted clock readings in place of a clock, gets the noted handles for the writes it posts, and
whatever it says, posts, launches or returns must be what stands next among the noted effects. See `worker.tape`.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headstart.core.arrays import Int32Array
from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished, Flushed, Message, TokenDelta, Tokens
from headstart.gateway.dispatch import DispatcherApi
from headstart.scheduler.protocol import Scheduler
from headstart.transfer.contract import TransferError, TransferEvent
from headstart.worker.recording import FLUSH_CLIENT, counted, make_dispatcher
from headstart.worker.schedulers import SchedulerPorts, make_scheduler
from headstart.worker.tape import (
    Asked,
    Call,
    Cancelled,
    Digested,
    DispatcherSpec,
    Effect,
    Head,
    Input,
    Linked,
    Raised,
    Received,
    Said,
    StepEnded,
    Stopped,
    Submitted,
    Transferred,
    Wakeup,
    Wrote,
    client_name,
    event_of,
    frame_of,
    int32_bytes,
    launched,
    message_in,
    submit_in,
)
from headstart.worker.tape_words import describe, describe_input

NUM_CALLS_BEFORE = 3
"""Calls shown before the one that differs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call that went another way and its number, and what was noted and done instead."""

    number: int
    calls: tuple[Call, ...]  # a few before it, and itself
    noted: str
    done: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`num_decisions` counts effects that were compared."""

    num_calls: int
    num_readings: int
    num_decisions: int
    difference: Difference | None = None


class Diverged(Exception):
    """A replayed part did something else than what is on the tape."""

    def __init__(self, noted: str, done: str) -> None:
        super().__init__(f"noted: {noted}; done: {done}")
        self.noted = noted
        self.done = done


def replay(head: Head, calls: Iterable[Call]) -> Verdict:
    """Up to the end, or to the first difference."""
    script = Script(head)
    recent: deque[Call] = deque(maxlen=NUM_CALLS_BEFORE + 1)
    num_calls = 0
    difference = None
    for call in calls:
        recent.append(call)
        try:
            script.play(call)
        except Diverged as gap:
            difference = Difference(num_calls, tuple(recent), gap.noted, gap.done)
            break
        num_calls += 1
    return Verdict(num_calls, script.num_readings, script.num_decisions, difference)


Do = Callable[[Input], "Effect | None"]
"""Performs an input; returns what the call's result is noted as, if it has one."""


class Script:
    """What the tape says comes next. Satisfies `core.clock.Clock`."""

    def __init__(self, head: Head) -> None:
        self.num_readings = 0
        self.num_decisions = 0
        self._head = head
        self._do: Do = self._construct
        self._times: list[deque[float]] = []
        self._effects: list[deque[Effect]] = []

    def play(self, call: Call) -> None:
        """Raises Diverged."""
        self._times.append(deque(call.times))
        self._effects.append(deque(call.effects))
        try:
            result = self._do(call.input)
            if result is not None:
                self.expect(result)
        except Diverged:
            raise
        except Exception as error:
            self.expect(Raised(type(error).__name__))
        times, effects = self._times.pop(), self._effects.pop()
        if effects:
            raise Diverged(describe(effects[0]), "nothing more")
        if times:
            raise Diverged(f"{len(times)} more clock readings", "none")

    def now(self) -> float:
        if not self._times or not self._times[-1]:
            raise Diverged("no further clock reading", "one")
        self.num_readings += 1
        return self._times[-1].popleft()

    def expect(self, effect: Effect) -> None:
        noted = self._next(effect)
        if noted != effect:
            raise Diverged(describe(noted), describe(effect))

    def expect_write(self, write: Wrote) -> int:
        """The noted handle. Raises TransferError where the post failed."""
        noted = self._next(write)
        if not isinstance(noted, Wrote) or _request(noted) != _request(write):
            raise Diverged(describe(noted), describe(write))
        if noted.error is not None:
            raise TransferError(noted.error)
        return noted.handle

    def expect_digests(self, pages: bytes) -> list[int]:
        noted = self._next(Digested(pages, ()))
        if not isinstance(noted, Digested) or noted.pages != pages:
            raise Diverged(describe(noted), describe(Digested(pages, ())))
        return list(noted.digests)

    def expect_link(self, link: Linked) -> None:
        noted = self._next(link)
        if not isinstance(noted, Linked) or (noted.peer, noted.descriptor) != (link.peer, link.descriptor):
            raise Diverged(describe(noted), describe(link))
        if noted.error is not None:
            raise TransferError(noted.error)

    def play_nested(self) -> None:
        """Calls that the client made from within its callback."""
        while self._effects[-1] and isinstance(call := self._effects[-1][0], Call):
            self._effects[-1].popleft()
            self.play(call)

    def _construct(self, noted: Input) -> None:
        """The first call on a tape is the part's construction."""
        self._do = _rebuild(self._head, self)

    def _next(self, done: Effect) -> Effect:
        if not self._effects[-1]:
            raise Diverged("nothing more", describe(done))
        self.num_decisions += 1
        return self._effects[-1].popleft()


def _request(write: Wrote) -> tuple[str, bytes, bytes, bytes]:
    return write.peer, write.src_pages, write.dst_pages, write.notice


# ---- parts under replay ----------------------------------------------------------------------------------------------


def _rebuild(head: Head, script: Script) -> Do:
    def say(recipient: str, message: Message) -> None:
        script.expect(Said(recipient, frame_of(message)))

    if isinstance(head, DispatcherSpec):
        dispatcher = make_dispatcher(head, script, say)
        return lambda noted: _do_dispatch(dispatcher, noted, script)
    page_size = head.kv_spec.page_size
    ports = SchedulerPorts(ScriptedTransport(script, head.descriptor), ScriptedDigests(script), script, say)
    scheduler = make_scheduler(head, ports)
    return lambda noted: _do_schedule(scheduler, noted, page_size)


def _do_schedule(scheduler: Scheduler, noted: Input, page_size: int) -> Effect | None:
    match noted:
        case Received(sender, frame):
            scheduler.handle(sender, message_in(frame))
        case Transferred():
            scheduler.on_transfer(event_of(noted))
        case StepEnded(output):
            scheduler.update(output)
        case Asked("advance"):
            return Wakeup(scheduler.advance())
        case Asked("schedule"):
            return launched(scheduler.schedule(), page_size)
        case Asked("load"):
            return counted(scheduler.load())
        case _:
            raise Diverged(describe_input(noted), "no input of a scheduler")
    return None


def _do_dispatch(dispatcher: DispatcherApi, noted: Input, script: Script) -> Effect | None:
    match noted:
        case Received(sender, frame):
            dispatcher.handle(sender, message_in(frame))
        case Submitted(frame):
            request = submit_in(frame).request
            dispatcher.submit(request, ScriptedSink(script, client_name(request.ref.request_id, request.ref.choice)))
        case Cancelled(request_id, code, message):
            dispatcher.cancel(request_id, ErrorCode(code), message)
        case Stopped(request_id, choice):
            dispatcher.stop(request_id, choice)
        case Asked("flush"):
            dispatcher.flush(lambda ok, num: script.expect(Said(FLUSH_CLIENT, frame_of(Flushed(0, ok, num)))))
        case Asked("advance"):
            return Wakeup(dispatcher.advance())
        case _:
            raise Diverged(describe_input(noted), "no input of a dispatcher")
    return None


@dataclass(frozen=True, slots=True)
class ScriptedTransport:
    """Satisfies `transfer.contract.Transport`: posts succeed or fail as they did."""

    script: Script
    own: bytes

    def descriptor(self) -> bytes:
        return self.own

    def connect(self, peer: str, descriptor: bytes) -> None:
        self.script.expect_link(Linked(peer, descriptor))

    def disconnect(self, peer: str) -> None:
        self.script.expect_link(Linked(peer, None))

    def write(self, peer: str, src_pages: Int32Array, dst_pages: Int32Array, notice: bytes) -> int:
        return self.script.expect_write(Wrote(peer, int32_bytes(src_pages), int32_bytes(dst_pages), notice))

    def poll(self) -> list[TransferEvent]:
        return []

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ScriptedDigests:
    """Satisfies `transfer.contract.PageDigests`."""

    script: Script

    def digest(self, pages: Int32Array) -> list[int]:
        return self.script.expect_digests(int32_bytes(pages))


@dataclass(frozen=True, slots=True)
class ScriptedSink:
    """Satisfies `gateway.choice_record.Sink`: calls back as the client did."""

    script: Script
    name: str

    def on_tokens(self, delta: TokenDelta) -> None:
        self._take(Tokens((delta,)))

    def on_finished(self, finished: Finished) -> None:
        self._take(finished)

    def on_failed(self, failed: Failed) -> None:
        self._take(failed)

    def _take(self, message: Message) -> None:
        self.script.expect(Said(self.name, frame_of(message)))
        self.script.play_nested()
