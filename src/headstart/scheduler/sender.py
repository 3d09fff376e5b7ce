"""The sending half of a transfer: pushes pages of our pool into pages that a peer opened for us under its ticket.

    open ──everything posted, last handle ended──► closed (`done`)
      └──end──► ending ──last handle ended──► closed (its answer; none if the peer's process has ended)

open    holds a PageLease over its source pages, and an open handle for each posted chunk
ending  the same, but nothing is posted any more
closed  holds nothing; its ref is remembered (`EndedTickets`), so that a late call is refused and a late Cancel answered

Invariant: the source pages of an open handle are leased by its push and have the handle as a reader, and a push is
answered only when none of its handles is open. A range is posted at most once: a failed post ends the push.

Either role may own a sender: it knows neither how its pages came to hold KV nor who its peers are. `tickets` is the
other half.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from headstart.core.arrays import Int32Array
from headstart.core.errors import ErrorCode, InvariantError
from headstart.core.layout import pages_for
from headstart.core.messages import ChunkNotice, Message, Send, TicketClosed, TicketRef, WorkerRef, encode_notice
from headstart.kv.cache import PageLease, PrefixCache
from headstart.scheduler.checksums import page_checksums
from headstart.scheduler.stuck_peers import Stuck
from headstart.transfer.contract import Completed, PageDigests, TransferError, Transport, WriteFailed

PushKey = tuple[str, TicketRef]
"""(name of the peer, its ticket and attempt)."""


@dataclass(frozen=True, slots=True)
class Target:
    """Pages of a peer's pool that it opened for us. `pages[k]` receives positions [start + k * page_size, ...)."""

    peer: WorkerRef
    ref: TicketRef
    tokens: Int32Array  # of all positions before the end, from position 0
    start: int  # page-aligned
    pages: Int32Array
    deadline: float  # nothing is posted from then on
    verify: bool  # notices carry page checksums


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a push stops, as the answer its peer gets; None if nobody is left to answer."""

    answer: Message | None


@dataclass(slots=True, eq=False)
class Push:
    """A ticket that is being served. `cursor` is the first page of the sequence not yet posted; it only grows."""

    target: Target
    lease: PageLease  # of the sequence, from position 0
    prefix_len: int  # tokens whose KV was here before the call: told in every notice
    done: Message  # the answer once everything was posted and has ended
    cursor: int
    end_page: int
    handles: set[int] = field(default_factory=set)
    ending: Ending | None = None

    @property
    def key(self) -> PushKey:
        return str(self.target.peer), self.target.ref

    @property
    def is_open(self) -> bool:
        return self.ending is None


def push_to(target: Target, lease: PageLease, prefix_len: int, done: Message, page_size: int) -> Push:
    """An open push of everything the target asks for."""
    return Push(target, lease, prefix_len, done, target.start // page_size, pages_for(len(target.tokens), page_size))


class Write(NamedTuple):
    """An open handle. It is a reader of its source pages until it has ended."""

    push: Push
    pages: Int32Array


@dataclass(frozen=True, slots=True)
class SenderPorts:
    """How a sender reaches its peers."""

    transport: Transport
    digests: PageDigests  # of our pool
    send: Send
    failure: Callable[[TicketRef, ErrorCode, str], Message]
    """The message which states that no write of a ticket is or will be in flight, and that it is incomplete."""


class EndedTickets:
    """Tombstones of one peer's tickets. Bounded: tickets up to the newest one forgotten count as ended too, which holds
    because a peer numbers its tickets upwards."""

    def __init__(self, max_refs: int = 4096) -> None:
        self._max_refs = max_refs
        self._refs: OrderedDict[TicketRef, None] = OrderedDict()
        self._floor = -1

    def __contains__(self, ref: TicketRef) -> bool:
        return ref.ticket <= self._floor or ref in self._refs

    def add(self, ref: TicketRef) -> None:
        self._refs[ref] = None
        if len(self._refs) > self._max_refs:
            oldest, _ = self._refs.popitem(last=False)
            self._floor = max(self._floor, oldest.ticket)


class Sender:
    """Every push that is not closed, and the tickets that have ended."""

    def __init__(self, worker: WorkerRef, cache: PrefixCache, ports: SenderPorts, counters: Counter[str]) -> None:
        self._worker = worker
        self._cache = cache
        self._ports = ports
        self._counters = counters
        self._pushes: dict[PushKey, Push] = {}
        self._writes: dict[int, Write] = {}
        self._ended: dict[str, EndedTickets] = {}

    def __len__(self) -> int:
        return len(self._pushes)

    def __iter__(self) -> Iterator[Push]:
        return iter(tuple(self._pushes.values()))

    def __contains__(self, key: PushKey) -> bool:
        return key in self._pushes

    def of(self, peer: str) -> list[Push]:
        return [push for (name, _), push in self._pushes.items() if name == peer]

    def has_ended(self, peer: str, ref: TicketRef) -> bool:
        """Whether this ticket was answered or cancelled here."""
        return peer in self._ended and ref in self._ended[peer]

    # ---- what the owner decides --------------------------------------------------------------------------------------

    def open(self, push: Push) -> None:
        """Serve a ticket. Its lease belongs to the push from now on."""
        self._pushes[push.key] = push

    def post(self, push: Push, num_ready: int) -> None:
        """Write the pages of the first `num_ready` tokens that were not posted before, as one chunk with its own notice. A
        partial page is written only if it is the last one."""
        is_whole = num_ready >= len(push.target.tokens)
        limit = push.end_page if is_whole else num_ready // self._cache.page_size
        if limit <= push.cursor or not push.is_open:
            return
        try:
            self._write(push, limit)
        except TransferError as error:
            self._counters["failed_writes"] += 1
            self.fail(push, ErrorCode.UNAVAILABLE, str(error))

    def _write(self, push: Push, limit: int) -> None:
        target, first = push.target, push.target.start // self._cache.page_size
        src, dst = push.lease.pages[push.cursor : limit], target.pages[push.cursor - first : limit - first]
        checksums = self._checksums(push, src) if target.verify else b""
        count = limit - push.cursor
        notice = ChunkNotice(self._worker, target.ref, push.cursor - first, count, push.prefix_len, checksums)
        handle = self._ports.transport.write(str(target.peer), src, dst, encode_notice(notice))
        self._cache.add_reader(src)
        self._writes[handle] = Write(push, src)
        push.handles.add(handle)
        push.cursor = limit
        self._counters["pages_posted"] += count

    def _checksums(self, push: Push, src: Int32Array) -> bytes:
        size = self._cache.page_size
        return page_checksums(self._ports.digests.digest(src), push.target.tokens, push.cursor * size, size)

    def fail(self, push: Push, code: ErrorCode, reason: str) -> None:
        self.end(push, self._ports.failure(push.target.ref, code, reason))

    def end(self, push: Push, answer: Message | None) -> None:
        """Stop posting. The answer leaves when no handle is open; the latest one given counts."""
        push.ending = Ending(answer)
        self._close_if_quiet(push)

    def refuse(self, peer: str, ref: TicketRef, code: ErrorCode, reason: str) -> None:
        """Answer a ticket that is not served: it has ended here."""
        self._remember_as_ended(peer, ref)
        self._ports.send(peer, self._ports.failure(ref, code, reason))

    # ---- what peers and the transport report -------------------------------------------------------------------------

    def cancel(self, peer: str, ref: TicketRef) -> None:
        """Its peer wants no more. Always answered, also for a ticket never seen, whose call is then refused if it comes."""
        push = self._pushes.get((peer, ref))
        if push is None:
            self._remember_as_ended(peer, ref)
            self._ports.send(peer, TicketClosed(ref))
            return
        self._counters["cancelled_calls"] += 1
        self.end(push, TicketClosed(ref))

    def on_transfer(self, event: Completed | WriteFailed) -> None:
        """A handle has ended."""
        write = self._writes.pop(event.handle, None)
        if write is None:
            self._counters["stray_events"] += 1
            return
        push = write.push
        self._cache.drop_reader(write.pages)
        push.handles.remove(event.handle)
        if isinstance(event, WriteFailed) and push.is_open:
            self._counters["failed_writes"] += 1
            self.fail(push, ErrorCode.UNAVAILABLE, event.reason)
        else:
            self._close_if_quiet(push)

    def on_peer_lost(self, peer: str) -> None:
        """The transport to it is closed; it may live, and wait for answers."""
        for push in self.of(peer):
            if push.is_open:
                self.fail(push, ErrorCode.UNAVAILABLE, "the transport to the caller is closed")

    def forget(self, worker: WorkerRef) -> None:
        """Proof that the peer's process has ended: nobody is left to answer."""
        for push in self.of(str(worker)):
            self.end(push, None)
        self._ended.pop(str(worker), None)

    # ---- time --------------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """End what is past its deadline."""
        for push in self:
            if push.is_open and push.target.deadline <= now:
                self._counters["expired_calls"] += 1
                self.fail(push, ErrorCode.DEADLINE, "the deadline passed before everything was sent")

    def next_deadline(self) -> float:
        return min([push.target.deadline for push in self._pushes.values() if push.is_open], default=inf)

    @property
    def has_open_writes(self) -> bool:
        return bool(self._writes)

    def stuck_peers(self, now: float) -> dict[WorkerRef, Stuck]:
        """The peers with open writes past their deadline, which keep the source pages from reuse."""
        stuck: dict[WorkerRef, Stuck] = {}
        for write in self._writes.values():
            target = write.push.target
            if target.deadline <= now:
                since, num_pages = stuck.get(target.peer, Stuck(target.deadline, 0))
                stuck[target.peer] = Stuck(min(since, target.deadline), num_pages + len(write.pages))
        return stuck

    # ---- closing -----------------------------------------------------------------------------------------------------

    def _close_if_quiet(self, push: Push) -> None:
        if push.handles or (push.is_open and push.cursor < push.end_page):
            return
        if push.ending is None:
            self._counters["completed_calls"] += 1
            push.ending = Ending(push.done)
        del self._pushes[push.key]
        self._cache.release(push.lease)
        if push.ending.answer is not None:
            self._remember_as_ended(*push.key)
            self._ports.send(push.key[0], push.ending.answer)

    def _remember_as_ended(self, peer: str, ref: TicketRef) -> None:
        self._ended.setdefault(peer, EndedTickets()).add(ref)

    def check(self) -> None:
        """Raise InvariantError unless every open write belongs to an open push that leases its pages."""
        handles = {handle: push for push in self._pushes.values() for handle in push.handles}
        if {handle: write.push for handle, write in self._writes.items()} != handles:
            raise InvariantError("an open write has no push, or a push an unknown write")
        for push, pages in self._writes.values():
            if not set(pages.tolist()) <= set(push.lease.pages.tolist()):
                raise InvariantError("an open write may read a page that its push does not lease")
        if any(push.ending is not None and not push.handles for push in self._pushes.values()):
            raise InvariantError("a push has ended, has no open write, and was not answered")
