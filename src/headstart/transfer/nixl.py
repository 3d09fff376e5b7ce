"""Transfer over NIXL's UCX backend: host memory now, device memory where the pool lies on a GPU.

A write:  posted ──► ended (Completed)
             └─────► failed, its vendor handle not yet released ──► ended (WriteFailed)
A link:   connected ──► left (disconnect, or replaced; not writable) ──► disposed, once its last write has ended
             └────────► lost (PeerLost reported once; not writable) ──► left

Invariant: a write ends once, when its vendor handle has been released, and only then; a link's prepared descriptors
outlive its writes.

One agent without a progress thread (that thread spins on a whole core): data, notices and a peer's first connection
advance only in `poll`, on both sides, so every loop calls it at least every few milliseconds. Not thread-safe. A lost
peer is seen at the next write or while one is open; an idle link stays silent.
"""

import contextlib
import importlib
import itertools
import logging
import secrets
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array
from headstart.core.errors import WorkerError
from headstart.core.layout import PoolRegion
from headstart.transfer.contract import Completed, Notice, PeerLost, TransferError, TransferEvent, WriteFailed
from headstart.transfer.pages import check_pages

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_DESCRIPTOR_VERSION = 1


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    version: int
    agent: bytes  # NIXL's metadata of the owner
    address: int
    num_pages: int
    page_bytes: int
    memory: str  # "DRAM" or "VRAM"
    device_id: int


@dataclass(eq=False, slots=True)
class _Link:
    peer: str
    descriptor: bytes
    agent_name: str
    num_pages: int
    pages: Any  # NIXL's prepared list of the peer's pages
    num_open: int = 0
    lost: bool = False
    reported: bool = False


@dataclass(eq=False, slots=True)
class _Write:
    link: _Link
    xfer: Any  # NIXL's handle
    failure: str | None = None


class _Vendor:
    """NIXL's package under whichever name is installed, and its exceptions."""

    def __init__(self) -> None:
        package, bindings = _import_package()
        self.agent_class: Any = package.nixl_agent
        self.config_class: Any = package.nixl_agent_config
        self.disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        self.errors: tuple[type[Exception], ...] = tuple(
            member for member in vars(bindings).values() if isinstance(member, type) and issubclass(member, Exception)
        )


def _import_package() -> tuple[ModuleType, ModuleType]:
    causes = []
    for name in _PACKAGES:
        try:
            package, bindings = importlib.import_module(name), importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            causes.append(f"{name}: {error}")
            continue
        _tame_logger()
        return package, bindings
    raise WorkerError("NIXL is not installed or does not load: " + "; ".join(causes))


def _tame_logger() -> None:
    """NIXL attaches a handler that prints to standard output; its records belong into our log."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)


class NixlTransport:
    """Transport over one registered pool. Opening it loads NIXL and takes about half a second.

    `name` appears in NIXL's own logs; the agent's full name is unique, so that a restarted peer is a new agent.
    Raises WorkerError where NIXL is missing or refuses the pool.
    """

    def __init__(self, name: str, region: PoolRegion) -> None:
        self._region = region
        self._memory, self._device_id = _memory_of(region.device)
        self._vendor = _Vendor()
        self._links: dict[str, _Link] = {}
        self._left: list[_Link] = []
        self._writes: dict[int, _Write] = {}
        self._handles = itertools.count()
        self._closed = False
        try:
            self._open(f"{name}/{secrets.token_hex(8)}")
        except self._vendor.errors as error:
            raise WorkerError(f"NIXL cannot serve the KV pool of {name}: {error}") from error

    def _open(self, agent_name: str) -> None:
        vendor = self._vendor
        self._agent = vendor.agent_class(agent_name, vendor.config_class(enable_prog_thread=False, backends=[]))
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        region = self._region
        whole = (region.address, region.num_pages * region.page_bytes, self._device_id, "")
        self._registration = self._agent.register_memory([whole], self._memory)
        table = _page_table(region.address, region.num_pages, region.page_bytes, self._device_id)
        self._pages = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", table, self._memory)

    # ---- links -------------------------------------------------------------------------------------------------------

    def descriptor(self) -> bytes:
        if self._closed:
            raise TransferError("this transport is closed")
        region = self._region
        metadata: bytes = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(
            _Descriptor(
                _DESCRIPTOR_VERSION,
                metadata,
                region.address,
                region.num_pages,
                region.page_bytes,
                self._memory,
                self._device_id,
            )
        )

    def connect(self, peer: str, descriptor: bytes) -> None:
        if self._closed:
            raise TransferError("this transport is closed")
        theirs = self._check_descriptor(peer, descriptor)
        self.disconnect(peer)
        link = self._try_revive(peer, descriptor) or self._link(peer, descriptor, theirs)
        self._links[peer] = link

    def _check_descriptor(self, peer: str, descriptor: bytes) -> _Descriptor:
        try:
            theirs = msgspec.msgpack.decode(descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise TransferError(f"descriptor of {peer} is malformed") from error
        for field, here, there in (
            ("descriptor version", _DESCRIPTOR_VERSION, theirs.version),
            ("page_bytes", self._region.page_bytes, theirs.page_bytes),
        ):
            if here != there:
                raise TransferError(f"{field} differs: {here} here, {there} at {peer}")
        if theirs.memory not in ("DRAM", "VRAM") or theirs.num_pages < 1 or theirs.address < 0 or theirs.device_id < 0:
            raise TransferError(f"descriptor of {peer} describes no pool")
        return theirs

    def _try_revive(self, peer: str, descriptor: bytes) -> _Link | None:
        """A link to the very same pool that was left while writes were open: NIXL cannot hold its agent twice."""
        for link in self._left:
            if link.peer == peer and link.descriptor == descriptor:
                if link.lost:
                    raise TransferError(f"writes of the lost connection to {peer} have not ended yet")
                self._left.remove(link)
                return link
        return None

    def _link(self, peer: str, descriptor: bytes, theirs: _Descriptor) -> _Link:
        table = _page_table(theirs.address, theirs.num_pages, theirs.page_bytes, theirs.device_id)
        agent_name = None
        try:
            agent_name = _text(self._agent.add_remote_agent(theirs.agent))
            pages = self._agent.prep_xfer_dlist(agent_name, table, theirs.memory)
        except self._vendor.errors as error:
            if agent_name is not None:
                self._forget_agent(agent_name)
            raise TransferError(f"cannot reach the pool of {peer}: {error}") from error
        return _Link(peer, descriptor, agent_name, theirs.num_pages, pages)

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._left.append(link)
            self._dispose_left()

    def _dispose_left(self) -> None:
        for link in [link for link in self._left if link.num_open == 0]:
            self._left.remove(link)
            self._dispose(link)

    def _dispose(self, link: _Link) -> None:
        with contextlib.suppress(*self._vendor.errors):
            link.pages.release()
        self._forget_agent(link.agent_name)

    def _forget_agent(self, agent_name: str) -> None:
        if all(link.agent_name != agent_name for link in (*self._links.values(), *self._left)):
            with contextlib.suppress(*self._vendor.errors):  # it may have gone with the connection
                self._agent.remove_remote_agent(agent_name)

    # ---- writes ------------------------------------------------------------------------------------------------------

    def write(self, peer: str, src_pages: Int32Array, dst_pages: Int32Array, notice: bytes) -> int:
        link = self._links.get(peer)
        if link is None or link.lost:
            raise TransferError(f"not connected to {peer}")
        check_pages(src_pages, dst_pages, self._region.num_pages, link.num_pages)
        src, dst = np.ascontiguousarray(src_pages, np.int32), np.ascontiguousarray(dst_pages, np.int32)
        try:
            xfer = self._agent.make_prepped_xfer("WRITE", self._pages, src, link.pages, dst, bytes(notice))
        except self._vendor.errors as error:
            link.lost |= isinstance(error, self._vendor.disconnected)
            raise TransferError(f"cannot prepare a write to {peer}: {error}") from error
        write = _Write(link, xfer)
        # From here on some descriptors may be in flight, so also a failed post ends through poll.
        self._advance(write, self._agent.transfer)
        handle = next(self._handles)
        link.num_open += 1
        self._writes[handle] = write
        return handle

    def poll(self) -> list[TransferEvent]:
        if self._closed:
            return []
        events: list[TransferEvent] = [Notice(payload) for payload in self._notices()]
        for handle, write in list(self._writes.items()):
            event = self._try_end(handle, write)
            if event is not None:
                del self._writes[handle]
                write.link.num_open -= 1
                events.append(event)
        self._dispose_left()
        events += [PeerLost(peer) for peer in self._newly_lost()]
        return events

    def _notices(self) -> list[bytes]:
        try:
            received: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        except self._vendor.errors as error:
            raise WorkerError(f"NIXL cannot read notifications: {error}") from error
        return [payload for payloads in received.values() for payload in payloads]

    def _try_end(self, handle: int, write: _Write) -> TransferEvent | None:
        done = write.failure is None and self._advance(write, self._agent.check_xfer_state)
        if not done and write.failure is None:
            return None
        try:
            write.xfer.release()
        except self._vendor.errors:
            return None  # still being cancelled; asked again at the next poll
        return Completed(handle) if write.failure is None else WriteFailed(handle, write.failure)

    def _advance(self, write: _Write, step: Any) -> bool:
        """Run one vendor step of a write; True when it is done. A failure is recorded on the write and its link."""
        try:
            state = step(write.xfer)
        except self._vendor.errors as error:
            write.failure = f"{type(error).__name__}: {error}"
            write.link.lost |= isinstance(error, self._vendor.disconnected)
            return False
        if state == "ERR":
            write.failure = "NIXL reports an error"
        return bool(state == "DONE")

    def _newly_lost(self) -> list[str]:
        lost = [link for link in self._links.values() if link.lost and not link.reported]
        for link in lost:
            link.reported = True
        return [link.peer for link in lost]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for write in self._writes.values():
            with contextlib.suppress(*self._vendor.errors):
                write.xfer.release()
        links = [*self._links.values(), *self._left]
        self._writes, self._links, self._left = {}, {}, []
        for link in links:
            self._dispose(link)
        with contextlib.suppress(*self._vendor.errors):
            self._pages.release()
            self._agent.deregister_memory(self._registration)
        # NIXL hangs up on its peers when its agent is destroyed, which nothing but these references keeps.
        self._agent = self._pages = self._registration = None


def _memory_of(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    if kind == "cuda":
        return "VRAM", int(index or 0)
    if kind == "cpu":
        return "DRAM", 0
    raise WorkerError(f"no NIXL memory type for device {device!r}")


def _page_table(address: int, num_pages: int, page_bytes: int, device_id: int) -> NDArray[np.uint64]:
    """One descriptor a page: [num_pages, 3] of (address, bytes, device)."""
    table = np.empty((num_pages, 3), dtype=np.uint64)
    table[:, 0] = np.arange(num_pages, dtype=np.uint64) * np.uint64(page_bytes) + np.uint64(address)
    table[:, 1] = page_bytes
    table[:, 2] = device_id
    return table


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
