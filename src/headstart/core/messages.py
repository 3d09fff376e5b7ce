"""Every message a scheduler, gateway or launcher sends another process. `wire` frames, bounds and authenticates them.

Structs are tagged with their class names; schedulers speak them directly. Arrays of ids travel as little-endian int32.

Names. A worker process is a `WorkerRef`: its name stays across restarts, its incarnation grows with each. A decode
worker numbers its tickets; (decode worker, ticket, attempt) names one right to write into a set of its pages.
"""

from collections.abc import Callable
from enum import StrEnum

from msgspec import MsgspecError, Struct, msgpack

from headstart.core.arrays import EMPTY, Int32Array
from headstart.core.errors import ErrorCode
from headstart.core.identity import KVSpec
from headstart.core.request import ChoiceRef, Request, RequestStats


class Message(Struct, frozen=True, tag=True, eq=False):
    """Base of everything that travels."""


Send = Callable[[str, Message], None]
"""(recipient, message); never blocks, never raises for a peer that is gone. A recipient is a gateway's or launcher's name,
or `str(WorkerRef)`."""


class Role(StrEnum):
    """What a worker does for others."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(StrEnum):
    """What a gateway may ask of a worker. A peer that has ended is told of as dead."""

    ALIVE = "alive"  # new work
    SUSPECT = "suspect"  # no new work
    DEAD = "dead"  # nothing: its requests fail over
    ENDED = "ended"  # nothing ever: its process is gone


class WorkerRef(Struct, frozen=True, cache_hash=True):
    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


# ---- gateway -> decode worker ----------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """Serve one choice. Idempotent by `request.ref`. `prefill_ranking` names prefill workers, best first."""

    request: Request
    prefill_ranking: tuple[str, ...] = ()


class Cancel(Message, frozen=True):
    """Stop a choice in whatever state it is. Answered by its one terminal event, if it had none yet."""

    ref: ChoiceRef
    reason: ErrorCode = ErrorCode.CANCELLED


class Flush(Message, frozen=True):
    """Drop every unpinned page from the radix cache. Refused while requests are unfinished."""

    flush_id: int


class Drain(Message, frozen=True):
    """Finish what runs, take nothing new, then exit."""


# ---- decode worker -> gateway ----------------------------------------------------------------------------------------


class Accepted(Message, frozen=True):
    ref: ChoiceRef


class Rejected(Message, frozen=True):
    """Terminal: the worker never took the choice."""

    ref: ChoiceRef
    code: ErrorCode
    message: str


class TokenDelta(Struct, frozen=True, eq=False):
    """Tokens of one choice, the first of which is output `index`."""

    ref: ChoiceRef
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class Tokens(Message, frozen=True):
    """All tokens of one step for one gateway."""

    deltas: tuple[TokenDelta, ...]


class Finished(Message, frozen=True):
    """Terminal: the choice is complete. `num_tokens` counts its outputs, those of earlier attempts and a final stop
    token included."""

    ref: ChoiceRef
    finish_reason: str
    num_tokens: int
    stats: RequestStats
    stop_token_id: int | None = None


class Failed(Message, frozen=True):
    """Terminal: the choice ended without completing. A choice that ran carries its stats, also when cancelled: the
    gateway cancels what a stop string ended and still reports its usage."""

    ref: ChoiceRef
    code: ErrorCode
    message: str
    stats: RequestStats | None = None


class Flushed(Message, frozen=True):
    flush_id: int
    ok: bool
    num_pages: int = 0


# ---- decode worker <-> prefill worker --------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A decode worker introduces itself: what its KV looks like and how to write into its pool."""

    worker: WorkerRef
    kv_spec: KVSpec
    descriptor: bytes


class Welcome(Message, frozen=True):
    """The specs agree. `credit_tokens` bounds the prompt tokens of this pair's open calls; a prompt of more than
    `capacity_tokens` can never be prefilled here."""

    worker: WorkerRef
    capacity_tokens: int
    credit_tokens: int
    descriptor: bytes


class Refused(Message, frozen=True):
    """The specs differ; `message` names both workers, the property and both values. Both processes live on."""

    worker: WorkerRef
    message: str


class TicketRef(Struct, frozen=True, cache_hash=True):
    ticket: int
    attempt: int


class Prefill(Message, frozen=True):
    """Compute KV of positions [start, end) and write its pages, in order, to `dst_pages` of the caller's pool.

    `tokens` are the `end` tokens whose KV is needed: the prompt without its last token, which runs on the decode worker.
    `start` is page-aligned: the caller holds everything before it. `dst_pages[k]` receives positions
    [start + k * page_size, ...), so there are ceil((end - start) / page_size) of them, at least one. `remaining_s` is
    the request's time left when the message was sent.
    """

    ref: TicketRef
    tokens: Int32Array
    start: int
    dst_pages: Int32Array
    namespace: bytes
    remaining_s: float
    cacheable: bool = True
    verify: bool = False  # notices must carry a checksum for each page
    src_pages: Int32Array = EMPTY  # reserved: the caller's pages of the prefix, for borrowed prefixes


class CancelTicket(Message, frozen=True):
    """Stop writing. Repeated until answered; always answered, also for a ticket never seen."""

    ref: TicketRef


class PrefillDone(Message, frozen=True):
    """Every chunk was posted and its handle has ended."""

    ref: TicketRef
    prefix_len: int  # tokens of the prompt found in the prefill worker's own cache
    num_computed: int


class PrefillFailed(Message, frozen=True):
    """The writer's word that no write of this ticket is or will be in flight, and that it is not complete."""

    ref: TicketRef
    code: ErrorCode
    message: str


class TicketClosed(Message, frozen=True):
    """Answer to CancelTicket: no write of this ticket is or will be in flight."""

    ref: TicketRef


class ChunkNotice(Message, frozen=True):
    """Arrives with the data, over the transport: pages [first, first + count) of the ticket's `dst_pages` are written.

    `prefix_len` as in PrefillDone, so that a request which finishes before Done arrives knows what it cost. `checksums` are
    `count` of 8 bytes each (`scheduler.checksums`) where the call asked for them."""

    writer: WorkerRef
    ref: TicketRef
    first: int
    count: int
    prefix_len: int = 0
    checksums: bytes = b""


def encode_notice(notice: ChunkNotice) -> bytes:
    """The payload of a transport write."""
    return msgpack.encode(notice)


def decode_notice(payload: bytes) -> ChunkNotice | None:
    """The notice in a payload, or None where a stranger wrote something else."""
    try:
        return msgpack.decode(payload, type=ChunkNotice)
    except (MsgspecError, ValueError, RecursionError):  # text that is not UTF-8 is a plain ValueError
        return None


# ---- membership: gateway, launcher and workers -----------------------------------------------------------------------


class Join(Message, frozen=True):
    """A worker is ready. `peer_address` is where decode workers reach a prefill worker; empty for decode workers.

    `lock_domain` is the lock that the worker holds its name by: a later incarnation under the same lock proves that the
    former has ended. Empty proves nothing.
    """

    worker: WorkerRef
    role: Role
    kv_spec: KVSpec
    peer_address: str
    capacity_tokens: int
    model: str = ""
    lock_domain: str = ""


class Heartbeat(Message, frozen=True):
    """Sent by a thread of its own. `loop_age_s`: seconds since the worker's loop last came round."""

    worker: WorkerRef
    loop_age_s: float
    load: "WorkerLoad"


class WorkerLoad(Struct, frozen=True):
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    inflight_pages: int = 0
    private_pages: int = 0
    pinned_pages: int = 0
    cached_pages: int = 0
    free_pages: int = 0
    counters: dict[str, float] = {}  # monotonic totals: tokens, hits, bytes moved and saved, retractions, ...
    overdue_pages: int = 0  # kept for a peer that has let its time pass
    must_restart: bool = False  # too many of them, and neither word nor proof came: only a restart gets them back
    mismatches: tuple[
        str, ...
    ] = ()  # each names a peer that exchanges no KV with this worker, and the setting that differs

    @property
    def used_pages(self) -> int:
        """Neither free nor evictable."""
        return self.inflight_pages + self.private_pages + self.pinned_pages

    @property
    def pool_pages(self) -> int:
        """All of the pool; 0 before a worker's first word on it."""
        return self.used_pages + self.cached_pages + self.free_pages


class Leave(Message, frozen=True):
    """A worker drained and is about to exit."""

    worker: WorkerRef


class PeerState(Struct, frozen=True):
    worker: WorkerRef
    address: str
    state: WorkerState  # never ENDED
    lock_domain: str = ""  # of its Join

    def proves_end_of(self, former: "PeerState") -> bool:
        """Whether this process can only have started after `former` had ended: it has its name, under the same lock."""
        return (
            former.worker.name == self.worker.name
            and former.worker.incarnation < self.worker.incarnation
            and former.lock_domain == self.lock_domain != ""
        )


class Membership(Message, frozen=True):
    """Gateway -> decode workers: every prefill worker it knows."""

    prefill: tuple[PeerState, ...]


class WorkerExited(Message, frozen=True):
    """Launcher -> gateway -> workers: proof that this process has ended. Nothing it posted can land any more."""

    worker: WorkerRef
    exit_status: int


class LauncherHello(Message, frozen=True):
    """Launcher -> gateway: I started these workers, will report their exits and can kill them."""

    workers: tuple[str, ...]


class KillRequest(Message, frozen=True):
    """Worker -> gateway -> launcher: this peer holds pages past their deadline, and only its end gives them back. A decode
    worker says it of tickets that are not answered, a prefill worker of writes that do not end."""

    worker: WorkerRef
    reason: str
