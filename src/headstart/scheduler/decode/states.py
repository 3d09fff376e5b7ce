"""A choice on the decode worker: what stays with it throughout, and the entry whose type is its state.

    waiting ─► preparing ─► ready ─► running ─► finished | failed
       │         │  ▲                  │  ▲
       │         └──┘ retry            └─►│ retracted ─► waiting
       └────────── short or local delta ──┘
    preparing ─► waiting (busy, or cancelled by a growing row)      ready ─► retracted
    every state ─► failed (cancel, deadline, error)

Waiting    holds nothing; `retracted` ones resume before new admissions; a follower is out of line until its leader is on
Preparing  a PageLease, and a Ticket under which a prefill worker writes part of it
Ready      a PageLease; everything but the last token has KV, or the worker computes the rest itself
Running    a PageLease; has a row in each step for which there are pages and tokens, also while earlier rows are in flight

Invariant: an unfinished choice has exactly one entry, a lease exactly one entry, and a Ticket is owned by one
Preparing entry or by nobody (cancelling: its request has left, its pages wait for the writer's answer). Whoever
removes an entry puts its choice into the next queue or releases what it holds. An entry is never used twice: the
identity of a Running entry is the epoch that a step's result must match.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

from headstart.core.arrays import Int32Array
from headstart.core.errors import ErrorCode
from headstart.core.messages import WorkerRef
from headstart.core.request import ChoiceRef, FinishReason, Request
from headstart.core.sequence import Sequence
from headstart.kv.cache import PageLease
from headstart.scheduler.decode.metrics import ChoiceMetrics
from headstart.scheduler.tickets import Ticket


class PrefillFault(Enum):
    """How a prefill worker failed a choice."""

    FAILED = "failed"  # it answered so, damaged pages, or sent none for too long
    LOST = "lost"  # silent or cut off: it may live
    DIED = "died"  # its process is proven to have ended


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of one request, from Accepted to its terminal event."""

    request: Request
    gateway: str
    ranking: tuple[str, ...]
    order: int  # of arrival; the oldest is the smallest
    sequence: Sequence
    deadline: float
    metrics: ChoiceMetrics
    failed_on: dict[WorkerRef, "PrefillFault"] = field(
        default_factory=dict
    )  # prefill workers that are not called again

    @property
    def ref(self) -> ChoiceRef:
        return self.request.ref

    @property
    def num_deaths(self) -> int:
        """Prefill workers that are proven to have ended with it."""
        return list(self.failed_on.values()).count(PrefillFault.DIED)

    @property
    def fallback_at(self) -> float:
        """From here on it waits for no prefill worker and no leader."""
        return (self.metrics.accepted_at + self.deadline) / 2

    @property
    def max_len(self) -> int:
        """Tokens with the last possible output."""
        return self.sequence.prompt_len + self.request.stop.max_new_tokens


class Stop(NamedTuple):
    """Why a choice is complete."""

    reason: str
    token_id: int | None = None


class Abort(NamedTuple):
    """Why a choice ends without being complete."""

    code: ErrorCode
    message: str


Outcome = Stop | Abort


def find_stop(request: Request, sequence: Sequence) -> Stop | None:
    """Whether the outputs so far complete the choice. A stop id counts from output `min_new_tokens` on."""
    num_outputs, stop = sequence.num_outputs, request.stop
    if num_outputs == 0:
        return None
    if num_outputs > stop.min_new_tokens and sequence.last_token in stop.stop_token_ids:
        return Stop(FinishReason.STOP, sequence.last_token)
    return Stop(FinishReason.LENGTH) if num_outputs >= stop.max_new_tokens else None


class LastMatch(NamedTuple):
    """What the last match of a choice found that was not admitted then."""

    prefix_len: int
    num_new: int  # pages to lease
    pages_wanted: int  # with the reserve
    match_again_at: float


@dataclass(slots=True, eq=False)
class Waiting:
    choice: Choice
    retracted: bool = False
    num_bypassed: int = 0
    last_match: LastMatch | None = None


@dataclass(slots=True, eq=False)
class Preparing:
    choice: Choice
    lease: PageLease
    ticket: Ticket
    hit_pages: int  # shared pages when it was leased


@dataclass(slots=True, eq=False)
class Ready:
    choice: Choice
    lease: PageLease
    hit_pages: int
    chunked: bool = False  # its delta is long and comes out of the chunk budget, not the short one


@dataclass(slots=True, eq=False)
class Running:
    choice: Choice
    lease: PageLease
    hit_pages: int
    chunked: bool
    prompt_pages: int  # whole pages of what it was admitted with: matchable as soon as they are computed
    commit_at: int = 0  # tokens with KV at which pages are committed next
    inflight: list["ScheduledRow"] = field(default_factory=list)  # its rows in steps in flight, oldest first
    has_left: bool = False  # what its rows in flight bring is dropped

    @property
    def next_position(self) -> int:
        """Where its next row starts."""
        return self.inflight[-1].stop if self.inflight else self.choice.sequence.num_computed

    @property
    def is_prompt_scheduled(self) -> bool:
        """Whether its next row is a decode row."""
        return self.next_position >= len(self.choice.sequence) - 1


class ScheduledRow(Struct, eq=False):
    """The positions [start, start + num_new) that a running entry computes in one step, and drafts behind them.

    It samples if that reaches the entry's last token, which may be one that the entry's row before it is yet to draw.
    """

    entry: Running
    start: int
    num_new: int
    samples: bool
    drafts: Int32Array | None = None
    step_id: int = 0  # where it was launched
    row_id: int = 0

    @property
    def stop(self) -> int:
        """Where the entry's next row starts, unless this one has drafts."""
        return self.start + self.num_new


Holder = Preparing | Ready | Running
Entry = Waiting | Holder
