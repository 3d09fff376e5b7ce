"""A dispatcher in virtual time with workers played by the test: every message out is recorded, every message in is said."""

from dataclasses import dataclass, field
from random import Random

from headstart.core.arrays import int32_array
from headstart.core.identity import PROTOCOL_VERSION, KVSpec
from headstart.core.kv_layout import KVLayout
from headstart.core.messages import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    Heartbeat,
    Join,
    Message,
    Rejected,
    Submit,
    TokenDelta,
    Tokens,
    WorkerLoad,
    WorkerRef,
)
from headstart.core.request import ChoiceRef, Request, RequestStats, SamplingParams, StopCriteria
from headstart.gateway.dispatch import Dispatcher
from headstart.gateway.limits import DispatchLimits

SPEC = KVSpec(PROTOCOL_VERSION, "model", "rope", KVLayout.full(16, 2, 2, 8, "float32"))
HERE = "the lock that holds a name on this host"


@dataclass
class VirtualClock:
    time: float = 100.0

    def now(self) -> float:
        return self.time


@dataclass
class RecordingSink:
    """What a client would see of one choice."""

    tokens: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    def on_tokens(self, delta: TokenDelta) -> None:
        assert not self.is_over, "tokens after the end"
        assert delta.index == len(self.tokens), "a gap or a repeat reached the client"
        self.tokens.extend(delta.token_ids)

    def on_finished(self, finished: Finished) -> None:
        assert not self.is_over, "a second terminal event"
        self.finished.append(finished)

    def on_failed(self, failed: Failed) -> None:
        assert not self.is_over, "a second terminal event"
        self.failed.append(failed)

    @property
    def is_over(self) -> bool:
        return bool(self.finished or self.failed)


def make_request(
    request_id: str = "r", choice: int = 0, prompt: int | list[int] = 40, max_new: int = 8, remaining_s: float = 60.0
) -> Request:
    tokens = range(prompt) if isinstance(prompt, int) else prompt
    return Request(
        ChoiceRef(request_id, choice),
        int32_array(tokens),
        SamplingParams(seed=7),
        StopCriteria(max_new, stop_token_ids=(2,)),
        b"n" * 32,
        remaining_s,
    )


class World:
    """`world.sent` holds what the dispatcher sent; workers named in `beat` stay alive as time passes."""

    def __init__(self, limits: DispatchLimits | None = None, seed: int = 0, model_fingerprint: str = "") -> None:
        self.clock = VirtualClock()
        self.sent: list[tuple[str, Message]] = []
        self.limits = limits or DispatchLimits()
        self.dispatcher = Dispatcher(
            self.clock,
            lambda to, message: self.sent.append((to, message)),
            Random(seed),
            self.limits,
            model_fingerprint=model_fingerprint,
        )
        self.beating: set[WorkerRef] = set()

    # ---- workers -----------------------------------------------------------------------------------------------------

    def join(self, name: str, role: str = "decode", incarnation: int = 1, capacity: int = 1000) -> WorkerRef:
        ref = WorkerRef(name, incarnation)
        self.dispatcher.handle(str(ref), Join(ref, role, SPEC, f"tcp://{name}", capacity, lock_domain=HERE))
        self.beating = {other for other in self.beating if other.name != name} | {ref}
        return ref

    def beat(self, ref: WorkerRef, loop_age_s: float = 0.0, load: WorkerLoad | None = None) -> None:
        self.dispatcher.handle(f"hb:{ref}", Heartbeat(ref, loop_age_s, load or WorkerLoad()))

    def say(self, ref: WorkerRef, message: Message) -> None:
        self.dispatcher.handle(str(ref), message)

    def accept(self, ref: WorkerRef, choice: ChoiceRef) -> None:
        self.say(ref, Accepted(choice))

    def reject(self, ref: WorkerRef, choice: ChoiceRef, code: str) -> None:
        self.say(ref, Rejected(choice, code, "no"))

    def emit(self, ref: WorkerRef, choice: ChoiceRef, index: int, *token_ids: int) -> None:
        self.say(ref, Tokens((TokenDelta(choice, index, token_ids),)))

    def finish(self, ref: WorkerRef, choice: ChoiceRef, num_tokens: int, reason: str = "length") -> None:
        self.say(ref, Finished(choice, reason, num_tokens, RequestStats(cached_tokens=16)))

    # ---- time and what came out --------------------------------------------------------------------------------------

    def run(self, seconds: float, step: float = 0.1) -> None:
        for _ in range(round(seconds / step)):
            self.clock.time += step
            for ref in self.beating:
                self.beat(ref)
            self.dispatcher.advance()

    def take(self, kind: type) -> list[tuple[str, Message]]:
        """Messages of a kind sent so far, once."""
        taken = [(to, message) for to, message in self.sent if isinstance(message, kind)]
        self.sent = [(to, message) for to, message in self.sent if not isinstance(message, kind)]
        return taken

    def submitted(self) -> tuple[str, Submit]:
        """The one Submit sent since last asked."""
        (only,) = self.take(Submit)
        return only

    def cancelled(self) -> list[tuple[str, ChoiceRef]]:
        return [(to, message.ref) for to, message in self.take(Cancel)]

    def submit(self, **kwargs) -> RecordingSink:
        sink = RecordingSink()
        self.dispatcher.submit(make_request(**kwargs), sink)
        return sink

    def check(self) -> None:
        """Nothing is left behind once everything has ended."""
        assert self.dispatcher.num_unfinished == 0
        assert not any(record.num_open for record in self.dispatcher.registry.all())
