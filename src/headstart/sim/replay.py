"""`headstart replay`: repeat what processes logged with fresh schedulers and dispatchers, and compare every decision.

    head ─► rebuilt ─► call after call ─► identical | different (the first difference is reported)

A replayed part gets the logged results from its ports: clock readings, digests, handles of posted writes, and failures.
Which port it calls, with which arguments, and what it returns must be what stands next in the log. See `worker.recorder`.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from headstart.core.clock import Clock
from headstart.core.errors import InvariantError
from headstart.core.messages import Send
from headstart.gateway.dispatch import DispatcherApi
from headstart.scheduler.protocol import Drafter, Scheduler
from headstart.transfer.contract import PageDigests, TransferError, Transport
from headstart.worker.call_codec import CALLABLE, MethodCodec, codecs_of, encode, summarize
from headstart.worker.decision_log import DispatcherSpec, Head, RecordedCall, RecordedFailure
from headstart.worker.recorder import BUILD, CLOCK, DIGESTS, DRAFTER, SEND, TRANSPORT, make_dispatcher
from headstart.worker.schedulers import DecodeSpec, SchedulerPorts, make_scheduler

NUM_CALLS_BEFORE = 3
"""Calls shown before the one that differs."""
PORTS: dict[str, Any] = {CLOCK: Clock, SEND: Send, TRANSPORT: Transport, DIGESTS: PageDigests, DRAFTER: Drafter}
FAILURES: dict[str, Callable[[str], Exception]] = {"TransferError": TransferError, "ValueError": ValueError}
"""What a port may raise, by name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call that went another way and its number, and what was logged and done instead."""

    number: int
    calls: tuple[str, ...]  # a few before it, and itself
    logged: str
    done: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`num_decisions` counts calls of ports and results that were compared, clock readings apart."""

    num_calls: int
    num_readings: int
    num_decisions: int
    difference: Difference | None = None


class Diverged(BaseException):
    """A replayed part did something else than what the log says. No part catches it."""

    def __init__(self, logged: str, done: str) -> None:
        super().__init__(f"logged: {logged}; done: {done}")
        self.logged = logged
        self.done = done


def replay(head: Head, calls: Iterable[RecordedCall]) -> Verdict:
    """Up to the end, or to the first difference."""
    script = Script(head)
    recent: deque[RecordedCall] = deque(maxlen=NUM_CALLS_BEFORE + 1)
    num_calls = 0
    difference = None
    for call in calls:
        recent.append(call)
        try:
            script.play(call)
        except Diverged as gap:
            difference = Difference(num_calls, tuple(map(script.describe, recent)), gap.logged, gap.done)
            break
        num_calls += 1
    return Verdict(num_calls, script.num_readings, script.num_decisions, difference)


class Script:
    """Plays a part's calls, and is all of its ports."""

    def __init__(self, head: Head) -> None:
        self.num_readings = 0
        self.num_decisions = 0
        self._head = head
        self._part: Any = None
        self._methods = codecs_of(DispatcherApi if isinstance(head, DispatcherSpec) else Scheduler)
        self._ports: dict[str, dict[str, MethodCodec]] = {name: codecs_of(kind) for name, kind in PORTS.items()}
        self._expected: list[deque[RecordedCall]] = []  # port calls of the part's calls that are open, innermost last

    def play(self, call: RecordedCall) -> None:
        """Raises Diverged."""
        self._expected.append(deque(call.calls))
        result, failure = encode(None), None
        try:
            result = self._run(call)
        except Exception as error:
            failure = RecordedFailure(type(error).__name__, str(error))
        self.num_decisions += 1
        if (bytes(result), failure) != (bytes(call.result), call.failure):
            raise Diverged(self._outcome(call), str(failure or self._result(call, result)))
        if left := self._expected.pop():
            raise Diverged(self.describe(left[0]), "nothing more")

    def port(self, name: str) -> Any:
        """The port of that name. A callable's is its one method."""
        codecs = self._ports[name]
        return self.method(name, codecs[CALLABLE]) if CALLABLE in codecs else _ScriptedPort(self, name, codecs)

    def method(self, target: str, codec: MethodCodec) -> Callable[..., Any]:
        """A method of a port, as the log says that it went."""

        def method(*args: Any, **kwargs: Any) -> Any:
            done = RecordedCall(target, codec.name, encode(tuple(map(summarize, codec.bind(args, kwargs)))))
            call = self._next(done)
            for nested in call.calls:
                self.play(nested)
            if call.failure is not None:
                raise FAILURES.get(call.failure.kind, InvariantError)(call.failure.message)
            return codec.result.decode(call.result)

        return method

    def describe(self, call: RecordedCall) -> str:
        """A call for people."""
        if call.method == BUILD:
            return BUILD
        codec = (self._ports[call.target] if call.target else self._methods)[call.method]
        return f"{call.target} {codec.describe(call.arguments)}".strip()

    def _run(self, call: RecordedCall) -> Any:
        if call.method == BUILD:
            self._part = self._build()
            return encode(None)
        codec = self._methods[call.method]
        arguments = list(codec.arguments.decode(call.arguments))
        for position, kind in codec.ports.items():
            self._ports[arguments[position]] = codecs_of(kind)
            arguments[position] = self.port(arguments[position])
        return encode(summarize(getattr(self._part, call.method)(*arguments)))

    def _build(self) -> Any:
        if isinstance(self._head, DispatcherSpec):
            return make_dispatcher(self._head, self.port(CLOCK), self.port(SEND))
        has_drafter = isinstance(self._head, DecodeSpec) and self._head.limits.num_draft_tokens > 0
        drafter = self.port(DRAFTER) if has_drafter else None
        transport, digests, clock, send = map(self.port, (TRANSPORT, DIGESTS, CLOCK, SEND))
        return make_scheduler(self._head, SchedulerPorts(transport, digests, clock, send, drafter))

    def _next(self, done: RecordedCall) -> RecordedCall:
        """The call that the log has next, which must be `done`."""
        expected = self._expected[-1]
        if not expected:
            raise Diverged("nothing more", self.describe(done))
        call = expected.popleft()
        same = (call.target, call.method, bytes(call.arguments)) == (done.target, done.method, bytes(done.arguments))
        if not same:
            raise Diverged(self.describe(call), self.describe(done))
        if call.target == CLOCK:
            self.num_readings += 1
        else:
            self.num_decisions += 1
        return call

    def _outcome(self, call: RecordedCall) -> str:
        return str(call.failure or self._result(call, call.result))

    def _result(self, call: RecordedCall, result: Any) -> str:
        if call.method == BUILD:
            return "built"
        return f"returns {self._methods[call.method].result.decode(result)}"


class _ScriptedPort:
    """Has the methods of a port's protocol."""

    def __init__(self, script: Script, name: str, codecs: dict[str, MethodCodec]) -> None:
        self._script = script
        self._name = name
        self._codecs = codecs

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in self._codecs:
            raise AttributeError(method)
        made = self._script.method(self._name, self._codecs[method])
        setattr(self, method, made)
        return made
