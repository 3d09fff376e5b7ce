"""Which messages may travel where: one tagged union for each direction between two kinds of process."""

from dataclasses import dataclass

from headstart.core.messages import (
    Accepted,
    Cancel,
    CancelTicket,
    ChunkNotice,
    Drain,
    Failed,
    Finished,
    Flush,
    Flushed,
    Heartbeat,
    Hello,
    Join,
    KillRequest,
    LauncherHello,
    Leave,
    Membership,
    Message,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Refused,
    Rejected,
    Submit,
    TicketClosed,
    Tokens,
    Welcome,
    WorkerExited,
)


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction. A receiver refuses every other type, however well formed."""

    name: str
    types: tuple[type[Message], ...]


TO_WORKER = Channel(
    "gateway to workers and launcher", (Submit, Cancel, Flush, Drain, Membership, WorkerExited, KillRequest)
)
FROM_WORKER = Channel(
    "workers and launcher to gateway",
    (
        Accepted,
        Rejected,
        Tokens,
        Finished,
        Failed,
        Flushed,
        Join,
        Heartbeat,
        Leave,
        KillRequest,
        LauncherHello,
        WorkerExited,
    ),
)
TO_PREFILL = Channel("decode to prefill workers", (Hello, Prefill, CancelTicket))
FROM_PREFILL = Channel("prefill to decode workers", (Welcome, Refused, PrefillDone, PrefillFailed, TicketClosed))
NOTICE = Channel("transfer notices", (ChunkNotice,))
CHANNELS = (TO_WORKER, FROM_WORKER, TO_PREFILL, FROM_PREFILL, NOTICE)
