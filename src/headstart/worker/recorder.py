"""Records what a scheduler or a dispatcher decides: stands around it and its ports, and changes nothing of what it does.

    building ──built──► idle ◄──► in a call (calls may be nested) ──► the log is full or closed: everything passes through

A part is called through one protocol and calls its ports through others; both kinds of call are recorded alike, from the
protocols' annotations. What a part does outside of a call is not recorded: there is nothing of that kind.
"""

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar, cast

from headstart.core.clock import Clock
from headstart.core.messages import Send
from headstart.gateway.dispatch import Dispatcher, DispatcherApi
from headstart.gateway.policy import POLICIES, MakePolicy
from headstart.scheduler.protocol import Drafter, Scheduler
from headstart.transfer.contract import PageDigests, Transport
from headstart.worker.call_codec import CALLABLE, MethodCodec, codecs_of, encode, summarize
from headstart.worker.decision_log import DecisionLog, DispatcherSpec, RecordedCall, RecordedFailure
from headstart.worker.schedulers import SchedulerPorts, SchedulerSpec, make_scheduler

BUILD = "build"
"""The first call of a log: the part's construction."""
CLOCK, SEND, TRANSPORT, DIGESTS, DRAFTER = "clock", "send", "transport", "digests", "drafter"
"""Ports that a part is built with. Ports that come as arguments are named by the method and a number."""

T = TypeVar("T")


class Recorder:
    """Keeps the calls that are open, innermost last. Used by one thread."""

    def __init__(self, log: DecisionLog, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._open: list[list[RecordedCall]] = []
        self._num_ports = 0

    def build(self, make: Callable[[], T]) -> T:
        """Make the part, and record what it calls meanwhile."""
        return self._record("", BUILD, (), make)

    def part(self, inner: T, kind: Any) -> T:
        """`inner` with every call of the protocol `kind` recorded."""
        return cast(T, _Recorded(self, inner, kind, ""))

    def port(self, inner: T, kind: Any, name: str) -> T:
        """The same for a port that the part calls. Its calls outside of a recorded call pass through."""
        if kind in (Send,) or CALLABLE in codecs_of(kind):
            return cast(T, _Recorded(self, inner, kind, name).__getattr__(CALLABLE))
        return cast(T, _Recorded(self, inner, kind, name))

    def call(self, target: str, codec: MethodCodec, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self._log.is_open or (target and not self._open):
            return run(*arguments)
        kept = [summarize(argument) for argument in arguments]
        passed = list(arguments)
        for position, kind in codec.ports.items():
            self._num_ports += 1
            kept[position] = f"{codec.name} {self._num_ports}"
            passed[position] = self.port(arguments[position], kind, kept[position])
        return self._record(target, codec.name, tuple(kept), lambda: run(*passed))

    def _record(self, target: str, method: str, arguments: tuple[Any, ...], run: Callable[[], T]) -> T:
        encoded, calls = encode(arguments), list[RecordedCall]()
        result, failure = encode(None), None
        self._open.append(calls)
        try:
            value = run()
            result = encode(summarize(value)) if method != BUILD else result
            return value
        except BaseException as error:
            failure = RecordedFailure(type(error).__name__, str(error))
            raise
        finally:
            self._open.pop()
            call = RecordedCall(target, method, encoded, tuple(calls), result, failure)
            if self._open:
                self._open[-1].append(call)
            else:
                self._log.write(call, self._clock.now())


class _Recorded:
    """Has the methods of `kind`; each is made when it is first asked for."""

    def __init__(self, recorder: Recorder, inner: Any, kind: Any, target: str) -> None:
        self._recorder = recorder
        self._inner = inner
        self._codecs = codecs_of(kind)
        self._target = target

    def __getattr__(self, name: str) -> Any:
        codec = self._codecs.get(name)
        if codec is None:
            raise AttributeError(name)
        call, target = self._recorder.call, self._target
        run = self._inner if name == CALLABLE else getattr(self._inner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return call(target, codec, run, codec.bind(args, kwargs))

        setattr(self, name, method)
        return method


def record_scheduler(spec: SchedulerSpec, ports: SchedulerPorts, log: DecisionLog) -> Scheduler:
    """A scheduler whose whole life goes to `log`, which has `spec` as its head."""
    recorder = Recorder(log, ports.clock)
    recorded = recorded_ports(ports, recorder)
    scheduler = recorder.build(lambda: make_scheduler(spec, recorded))
    return recorder.part(scheduler, Scheduler)


def recorded_ports(ports: SchedulerPorts, recorder: Recorder) -> SchedulerPorts:
    """What the transport's `poll` brings is recorded when the scheduler is told of it."""
    return SchedulerPorts(
        recorder.port(ports.transport, Transport, TRANSPORT),
        recorder.port(ports.digests, PageDigests, DIGESTS),
        recorder.port(ports.clock, Clock, CLOCK),
        recorder.port(ports.send, Send, SEND),
        None if ports.drafter is None else recorder.port(ports.drafter, Drafter, DRAFTER),
    )


def make_dispatcher(spec: DispatcherSpec, clock: Clock, send: Send) -> Dispatcher:
    return Dispatcher(clock, send, Random(spec.seed), spec.limits, POLICIES[spec.policy], spec.model_fingerprint)


def record_dispatcher(
    spec: DispatcherSpec, clock: Clock, send: Send, log: DecisionLog
) -> tuple[Dispatcher, DispatcherApi]:
    """A dispatcher whose whole life goes to `log`, which has `spec` as its head; and the way in that records."""
    recorder = Recorder(log, clock)
    ports = recorder.port(clock, Clock, CLOCK), recorder.port(send, Send, SEND)
    dispatcher = recorder.build(lambda: make_dispatcher(spec, *ports))
    return dispatcher, recorder.part(cast(DispatcherApi, dispatcher), DispatcherApi)


def policy_name(make_policy: MakePolicy) -> str:
    """The name that a head gives it."""
    return next(name for name, make in POLICIES.items() if make is make_policy)
