"""One choice of one request on its way through the workers.

    Queued ─► Submitted ─► Serving ─► (finished | failed)
      ▲           │           │  └──► Stopping ─► (finished)
      └───────────┴───────────┘
      worker died, left or was too busy; a gap in the tokens

Queued     on no worker; waits for one that may take it
Submitted  a worker was asked and has not answered; again where nothing was heard for long of one that had it
Serving    a worker has it
Stopping   the client has all it wanted (a stop string); only the worker's last word on its cost is awaited

Each hand-over to a worker is an attempt with its own number. Whatever carries another number is late.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from msgspec import Struct, structs

from headstart.core.arrays import EMPTY, int32_array
from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished, TokenDelta, WorkerRef
from headstart.core.request import ChoiceRef, FinishReason, Request, RequestStats


class Sink(Protocol):
    """Receives one choice: tokens in order, each once, then exactly one of finished and failed.

    Never blocks and never raises; may call back into the dispatcher.
    """

    def on_tokens(self, delta: TokenDelta) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...

    def on_failed(self, failed: Failed) -> None: ...


class Queued(Struct, frozen=True):
    since: float
    worker: ClassVar[None] = None


class Submitted(Struct, frozen=True):
    worker: WorkerRef
    sent_at: float
    num_repeats: int = 0
    was_running: bool = False  # there: it is asked whether it still has it


class Serving(Struct):
    worker: WorkerRef
    last_seen_at: float


class Stopping(Struct, frozen=True):
    worker: WorkerRef
    since: float


ChoiceState = Queued | Submitted | Serving | Stopping


@dataclass(slots=True, eq=False)
class ChoiceRecord:
    """A request, where it is, and what it has produced."""

    request: Request  # as the client made it; its ref has attempt 0
    sink: Sink
    deadline: float
    state: ChoiceState
    worker_name: str = ""  # of the worker that has it, as a sender
    attempt: int = -1  # of the latest hand-over; -1 before the first
    tokens: list[int] = field(default_factory=list)  # accepted outputs, over all attempts
    died: dict[WorkerRef, float] = field(default_factory=dict)  # workers that ended with it -> how much that counts
    lost: dict[WorkerRef, float] = field(default_factory=dict)  # the same of workers that are not known to have ended
    num_failed_attempts: int = 0  # hand-overs that came to nothing, refusals for want of room apart
    refusals: dict[WorkerRef, ErrorCode] = field(default_factory=dict)  # since it last ran
    is_open: bool = True  # has neither finished nor failed

    @property
    def key(self) -> tuple[str, int]:
        return self.request.ref.request_id, self.request.ref.choice

    @property
    def ref(self) -> ChoiceRef:
        return ChoiceRef(*self.key, max(self.attempt, 0))

    @property
    def worker(self) -> WorkerRef | None:
        return self.state.worker

    @property
    def num_tokens(self) -> int:
        """Longest the sequence can become."""
        return len(self.request.prompt) + self.request.stop.max_new_tokens

    @property
    def num_deaths(self) -> float:
        """Workers that are known to have ended with this choice."""
        return sum(self.died.values())

    def note_loss(self, worker: WorkerRef, *, has_ended: bool) -> None:
        """The worker that has this choice is gone, or only silent. It counts half if it had not accepted the choice yet."""
        is_untaken = isinstance(self.state, Submitted) and not self.state.was_running
        (self.died if has_ended else self.lost)[worker] = 0.5 if is_untaken else 1.0

    def note_end(self, worker: WorkerRef) -> None:
        """A worker that was lost before is known to have ended now."""
        if (weight := self.lost.pop(worker, None)) is not None:
            self.died[worker] = weight

    def note_return(self, worker: WorkerRef) -> None:
        """A worker that was lost was only silent."""
        self.lost.pop(worker, None)
        self.died.pop(worker, None)

    def at_attempt(self, now: float) -> Request:
        """The request to send for the current attempt: what it has produced goes along as output ids."""
        return structs.replace(
            self.request,
            ref=self.ref,
            output_ids=int32_array(self.tokens) if self.tokens else EMPTY,
            remaining_s=max(self.deadline - now, 0.0),
        )

    def completion(self) -> Finished | None:
        """The end that the accepted tokens already imply: their worker died before it could say so."""
        stop, last = self.request.stop, self.tokens[-1] if self.tokens else None
        if last in stop.stop_token_ids and len(self.tokens) > stop.min_new_tokens:
            return self.finished(FinishReason.STOP, stop_token_id=last)
        if len(self.tokens) >= stop.max_new_tokens:
            return self.finished(FinishReason.LENGTH)
        return None

    def finished(self, reason: str, stats: RequestStats | None = None, stop_token_id: int | None = None) -> Finished:
        return Finished(self.ref, reason, len(self.tokens), stats or RequestStats(), stop_token_id)


def bounded_stats(stats: RequestStats, prompt_len: int) -> RequestStats:
    """A worker that took a choice over counts earlier outputs as prompt; a client is told of its own prompt alone."""
    prefixes = {name: getattr(stats, name) for name in ("cached_tokens", "decode_prefix_len", "prefill_prefix_len")}
    wrong = {
        name: min(max(length, 0), prompt_len) for name, length in prefixes.items() if not 0 <= length <= prompt_len
    }
    return structs.replace(stats, **wrong) if wrong else stats
