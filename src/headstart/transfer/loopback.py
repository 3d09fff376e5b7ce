"""Transfer inside one process, for tests and simulation: honest about when bytes land, and as unkind as a network.

    posted ──► landed ──► ended (Completed)                 the notice travels apart from the completion
       │  └──► parked while either end is stalled ──► landed
       ├─────► noticed with a damaged page ──► landed      against the contract, as some networks do it
       └─────► ended (WriteFailed): its fault, or the target was killed; some of its pages may have landed

Where links fill up, a posted write waits until both its ends have carried what was posted there before.

Invariant: the target's pool changes only while a write to it is posted or parked, never at the post itself and never
after its end was reported. Source pages are read when the write lands, so reusing them early shows up as wrong bytes.
A pool that its owner closed can still be written by peers until they are told, and what they posted still lands, as
with real registrations; only `kill` proves that nothing of a process lands any more.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.clock import Clock
from headstart.core.layout import PoolRegion
from headstart.transfer.contract import Completed, Notice, PeerLost, TransferError, TransferEvent, WriteFailed
from headstart.transfer.pages import check_pages

Delay = Callable[[int], float]
"""Bytes -> seconds: asked once for the landing of a write, and with 0 for its completion and each of its notices."""
BusyTime = Callable[[int], float]
"""Bytes -> seconds for which a write keeps either of its ends busy."""


class Posted(Struct, frozen=True):
    """A write as the injector sees it. `index` counts the posts of the whole network from 0."""

    source: str
    peer: str
    index: int
    num_pages: int
    notice: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of one write."""

    refused: bool = False  # `write` raises TransferError
    fails: bool = False  # ends as WriteFailed after a random part of its pages landed
    delay_s: float | None = None  # until it lands, after its turn; None: the network's delay model
    num_notices: int = 1  # 0: lost, 2: duplicated
    notice_delay_s: float = 0.0  # added to each notice's own way
    flips: bool = False  # one bit of one page arrives wrong
    late_page_s: float | None = None  # one page is right only this long after the others and their notice


FaultInjector = Callable[[Posted], Fault]


_SUCCESS = Fault()


def every_write_succeeds(posted: Posted) -> Fault:
    return _SUCCESS


def inject_nth(faults: dict[int, Fault]) -> FaultInjector:
    """Give post number k the fault `faults[k]`; the others succeed."""
    return lambda posted: faults.get(posted.index, _SUCCESS)


class _Descriptor(Struct, frozen=True, array_like=True):
    endpoint: int
    num_pages: int
    page_bytes: int


@dataclass(eq=False, slots=True)
class _Lane:
    """One direction of an endpoint's adapter, which carries one write after another, in the order of their posts."""

    free_at: float = 0.0

    def take(self, now: float, busy_s: float) -> float:
        """When a write that is posted now has passed. Its turn is kept whether or not it lands."""
        self.free_at = max(self.free_at, now) + busy_s
        return self.free_at


@dataclass(eq=False, slots=True)
class _Adapter:
    sends: _Lane = field(default_factory=_Lane)
    receives: _Lane = field(default_factory=_Lane)


@dataclass(eq=False, slots=True)
class _Endpoint:
    name: str
    region: PoolRegion
    pages: NDArray[np.uint8] | None  # [num_pages, page_bytes], the owner's memory; None where only notices move
    inbox: list[TransferEvent] = field(default_factory=list)
    links: dict[str, "_Link"] = field(default_factory=dict)
    adapter: _Adapter = field(default_factory=_Adapter)
    alive: bool = True
    closed: bool = False
    stalled: bool = False


@dataclass(eq=False, slots=True)
class _Link:
    target: _Endpoint
    lost: bool = False


class _Write(Struct, frozen=True, eq=False):
    handle: int
    source: _Endpoint
    target: _Endpoint
    src_pages: Int32Array
    dst_pages: Int32Array
    notice: bytes
    fault: Fault


class _FrozenClock:
    def now(self) -> float:
        return 0.0


class LoopbackNetwork:
    """All endpoints of one process and everything between them. Not thread-safe.

    Without a clock time stands still: what was posted lands at the next poll of any endpoint, in shuffled order. With
    `busy_time`, which needs a clock, links fill up.
    """

    def __init__(
        self,
        rng: random.Random,
        clock: Clock | None = None,
        delay: Delay = lambda num_bytes: 0.0,
        injector: FaultInjector = every_write_succeeds,
        busy_time: BusyTime | None = None,
    ) -> None:
        self.injector = injector
        self._rng = rng
        self._clock = clock or _FrozenClock()
        self._delay = delay
        self._busy_time = busy_time
        self._endpoints: list[_Endpoint] = []
        self._agenda: list[tuple[float, float, int, Callable[[], None]]] = []
        self._open: dict[int, _Write] = {}
        self._ready: dict[_Endpoint, None] = {}  # whose next poll returns something
        self._parked: list[int] = []
        self._ids = itertools.count()
        self._num_posts = 0

    def transport(
        self, name: str, pool: bytearray | NDArray[np.uint8] | None, region: PoolRegion
    ) -> "LoopbackTransport":
        """A worker's transport over `pool`, contiguous and of num_pages * page_bytes bytes, or over no memory at all. A
        name may come again (a restart); peers reach the new endpoint only by its own descriptor."""
        pages = None if pool is None else np.frombuffer(pool, np.uint8).reshape(region.num_pages, region.page_bytes)
        self._endpoints.append(_Endpoint(name, region, pages))
        return LoopbackTransport(self, len(self._endpoints) - 1)

    def next_event_time(self) -> float | None:
        """When somebody's next poll can return something: now for undelivered events, else a time of the clock."""
        if self._ready:
            return self._clock.now()
        return self._agenda[0][0] if self._agenda else None

    def ready(self) -> list[str]:
        """Names of the endpoints whose next poll returns something."""
        return [endpoint.name for endpoint in self._ready]

    def progress(self) -> None:
        """Let everything that is due happen."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= self._clock.now():
            heapq.heappop(agenda)[-1]()

    def pages_under_write(self, name: str) -> set[int]:
        """Pages of that pool which posted writes may still touch."""
        return {int(p) for w in self._open.values() if w.target.name == name for p in w.dst_pages}

    def num_open_writes(self) -> int:
        return len(self._open)

    # ---- faults ------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """The process has ended: its writes tear here and land no more, writes to it fail, its peers lose it."""
        for endpoint in self._endpoints:
            if endpoint.name == name and endpoint.alive:
                endpoint.alive = False
                self._note_ready(endpoint)
                self._tear_writes(endpoint)
                self._hang_up(endpoint)

    def cut(self, name: str, peer: str) -> None:
        """The connection of `name` to `peer` is closed. Both live, and only `name` notices."""
        for endpoint in self._endpoints:
            link = endpoint.links.get(peer)
            if endpoint.name == name and endpoint.alive and link is not None:
                self._lose(endpoint, peer, link)

    def stall(self, name: str) -> None:
        """Writes from and to this process stay open until `resume`."""
        self._set_stalled(name, True)

    def resume(self, name: str) -> None:
        self._set_stalled(name, False)
        parked, self._parked = self._parked, []
        for number in parked:
            self._after(0.0, partial(self._land, number))

    def _set_stalled(self, name: str, stalled: bool) -> None:
        for endpoint in self._endpoints:
            if endpoint.name == name:
                endpoint.stalled = stalled
                self._note_ready(endpoint)

    def _tear_writes(self, dead: _Endpoint) -> None:
        for number, write in list(self._open.items()):
            if write.source is dead:
                self._copy(write, self._some_pages(write))
            elif write.target is dead:
                self._send_later(write.source, WriteFailed(write.handle, f"peer {dead.name} is gone"))
            else:
                continue
            del self._open[number]

    def closed(self, endpoint: _Endpoint) -> None:
        """Its owner polls no more."""
        self._note_ready(endpoint)
        self._hang_up(endpoint)

    def _hang_up(self, gone: _Endpoint) -> None:
        """Tell everyone who was connected to it, in time."""
        for endpoint in self._endpoints:
            for peer, link in endpoint.links.items():
                if link.target is gone and endpoint.alive:
                    self._after(self._delay(0), partial(self._lose, endpoint, peer, link))

    def _lose(self, endpoint: _Endpoint, peer: str, link: _Link) -> None:
        link.lost = True
        if endpoint.links.get(peer) is link:
            self._put(endpoint, PeerLost(peer))

    # ---- what transports call ------------------------------------------------------------------------------------------

    def endpoint(self, number: int) -> _Endpoint:
        """Raises TransferError for a number no endpoint ever had."""
        if not 0 <= number < len(self._endpoints):
            raise TransferError(f"no endpoint {number}")
        return self._endpoints[number]

    def fault_of(self, source: str, peer: str, num_pages: int, notice: bytes) -> Fault:
        posted = Posted(source, peer, self._num_posts, num_pages, notice)
        self._num_posts += 1
        return self.injector(posted)

    def post(self, write: _Write) -> None:
        if not write.target.alive:
            self._send_later(write.source, WriteFailed(write.handle, f"peer {write.target.name} is gone"))
            return
        number = next(self._ids)
        self._open[number] = write
        num_bytes = len(write.src_pages) * write.source.region.page_bytes
        delay_s = self._delay(num_bytes) if write.fault.delay_s is None else write.fault.delay_s
        if self._busy_time is not None:
            now, busy_s = self._clock.now(), self._busy_time(num_bytes)
            sent_at = write.source.adapter.sends.take(now, busy_s)
            received_at = write.target.adapter.receives.take(now, busy_s)
            delay_s += max(sent_at, received_at) - now
        self._after(delay_s, partial(self._land, number))

    def drain(self, endpoint: _Endpoint) -> list[TransferEvent]:
        if self._agenda:
            self.progress()
        events = endpoint.inbox
        if not events or endpoint.stalled or not endpoint.alive:
            return []
        endpoint.inbox = []
        self._note_ready(endpoint)
        self._rng.shuffle(events)
        return events

    # ---- the way of a write ----------------------------------------------------------------------------------------------

    def _land(self, number: int) -> None:
        write = self._open.get(number)
        if write is None:
            return
        if write.source.stalled or write.target.stalled:
            self._parked.append(number)
            return
        if write.fault.late_page_s is not None and not write.fault.fails:
            self._land_unfinished(number, write)
            return
        del self._open[number]
        if write.fault.fails:
            self._copy(write, self._some_pages(write))
            self._send_later(write.source, WriteFailed(write.handle, "failed by the network"))
            return
        self._copy(write, slice(None))
        if write.fault.flips:
            self._flip(write.target, int(self._rng.choice(write.dst_pages.tolist())))
        self._send_later(write.source, Completed(write.handle))
        self._notify(write)

    def _land_unfinished(self, number: int, write: _Write) -> None:
        """One page goes on as a write of its own, under the same handle and without a notice."""
        late = self._rng.randrange(len(write.src_pages))
        self._copy(write, slice(None))
        self._flip(write.target, int(write.dst_pages[late]))
        self._notify(write)
        src, dst = write.src_pages[late : late + 1], write.dst_pages[late : late + 1]
        rest = _Write(write.handle, write.source, write.target, src, dst, write.notice, Fault(num_notices=0))
        self._open[number] = rest
        self._after(write.fault.late_page_s or 0.0, partial(self._land, number))

    def _flip(self, target: _Endpoint, page: int) -> None:
        bit = self._rng.randrange(8 * target.region.page_bytes)
        if target.pages is not None:
            target.pages[page, bit // 8] ^= 1 << bit % 8

    def _notify(self, write: _Write) -> None:
        for _ in range(write.fault.num_notices):
            self._after(write.fault.notice_delay_s + self._delay(0), partial(self._arrive, write))

    def _arrive(self, write: _Write) -> None:
        lost_with_its_sender = not write.source.alive and self._rng.random() < 0.5
        if not lost_with_its_sender:
            self._put(write.target, Notice(write.notice))

    def _send_later(self, endpoint: _Endpoint, event: TransferEvent) -> None:
        self._after(self._delay(0), partial(self._put, endpoint, event))

    def _put(self, endpoint: _Endpoint, event: TransferEvent) -> None:
        endpoint.inbox.append(event)
        self._note_ready(endpoint)

    def _note_ready(self, endpoint: _Endpoint) -> None:
        if endpoint.inbox and endpoint.alive and not endpoint.closed and not endpoint.stalled:
            self._ready[endpoint] = None
        else:
            self._ready.pop(endpoint, None)

    def _copy(self, write: _Write, which: NDArray[np.intp] | slice) -> None:
        target, source = write.target.pages, write.source.pages
        if target is not None and source is not None:
            target[write.dst_pages[which]] = source[write.src_pages[which]]

    def _some_pages(self, write: _Write) -> NDArray[np.intp]:
        return np.array([i for i in range(len(write.src_pages)) if self._rng.random() < 0.5], dtype=np.intp)

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        entry = (self._clock.now() + delay_s, self._rng.random(), next(self._ids), action)
        heapq.heappush(self._agenda, entry)


class LoopbackTransport:
    """One endpoint's side of the contract."""

    def __init__(self, network: LoopbackNetwork, number: int) -> None:
        self._network = network
        self._number = number
        self._endpoint = network.endpoint(number)
        self._handles = itertools.count()

    def descriptor(self) -> bytes:
        if self._endpoint.closed:
            raise TransferError("this transport is closed")
        region = self._endpoint.region
        return msgspec.msgpack.encode(_Descriptor(self._number, region.num_pages, region.page_bytes))

    def connect(self, peer: str, descriptor: bytes) -> None:
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise TransferError(f"descriptor of {peer} is malformed") from error
        ours = self._endpoint.region
        if theirs.page_bytes != ours.page_bytes:
            raise TransferError(f"page_bytes differs: {ours.page_bytes} here, {theirs.page_bytes} at {peer}")
        target = self._network.endpoint(theirs.endpoint)
        if self._endpoint.closed or target.closed or not target.alive:
            raise TransferError(f"peer {peer} is gone, or this transport is closed")
        self._endpoint.links[peer] = _Link(target)

    def disconnect(self, peer: str) -> None:
        self._endpoint.links.pop(peer, None)

    def write(self, peer: str, src_pages: Int32Array, dst_pages: Int32Array, notice: bytes) -> int:
        link = self._endpoint.links.get(peer)
        if link is None or link.lost or self._endpoint.closed or not self._endpoint.alive:
            raise TransferError(f"not connected to {peer}")
        check_pages(src_pages, dst_pages, self._endpoint.region.num_pages, link.target.region.num_pages)
        source, handle = self._endpoint, next(self._handles)
        fault = self._network.fault_of(source.name, peer, len(src_pages), notice)
        if fault.refused:
            raise TransferError("refused by the network")
        src, dst = int32_array(src_pages), int32_array(dst_pages)
        self._network.post(_Write(handle, source, link.target, src, dst, bytes(notice), fault))
        return handle

    def poll(self) -> list[TransferEvent]:
        return [] if self._endpoint.closed else self._network.drain(self._endpoint)

    def close(self) -> None:
        if not self._endpoint.closed:
            self._endpoint.closed = True
            self._network.closed(self._endpoint)
            self._endpoint.links.clear()
