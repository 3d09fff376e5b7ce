"""Two backends behind one way to open them, and how a test waits for a transport."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.layout import PoolRegion
from headstart.transfer.contract import TransferEvent, Transport
from headstart.transfer.loopback import LoopbackNetwork
from headstart.transfer.nixl import NixlTransport

PATIENCE_S = 60.0
NUM_PAGES, PAGE_BYTES = 16, 4096


@dataclass(eq=False)
class Member:
    """A transport, its pool and everything its polls have returned."""

    name: str
    pool: NDArray[np.uint8]  # [num_pages, page_bytes]
    transport: Transport
    events: list[TransferEvent]

    def poll(self) -> None:
        self.events += self.transport.poll()

    def of(self, kind: type) -> list[TransferEvent]:
        return [event for event in self.events if isinstance(event, kind)]


class Loopback:
    def __init__(self) -> None:
        self._network = LoopbackNetwork(random.Random(7))

    def open(self, name: str, pool: NDArray[np.uint8], region: PoolRegion) -> Transport:
        return self._network.transport(name, pool, region)


class Nixl:
    def open(self, name: str, pool: NDArray[np.uint8], region: PoolRegion) -> Transport:
        return NixlTransport(name, region)


class Cluster:
    """Members of one backend in this process."""

    def __init__(self, backend: Loopback | Nixl) -> None:
        self._backend = backend
        self._members: list[Member] = []

    def member(self, name: str, num_pages: int = NUM_PAGES, page_bytes: int = PAGE_BYTES) -> Member:
        pool = stamped(num_pages, page_bytes, salt=len(self._members))
        region = PoolRegion(pool.ctypes.data, num_pages, page_bytes)
        member = Member(name, pool, self._backend.open(name, pool, region), [])
        self._members.append(member)
        return member

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, [(member.name, member.events) for member in self._members]
            for member in self._members:
                member.poll()

    def close(self) -> None:
        for member in self._members:
            member.transport.close()


def stamped(num_pages: int, page_bytes: int, salt: int) -> NDArray[np.uint8]:
    """Random bytes: no two pages of any two pools are alike."""
    return np.random.default_rng(salt).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)


def pages(*ids: int) -> Int32Array:
    return int32_array(ids)


def connect(source: Member, target: Member) -> None:
    source.transport.connect(target.name, target.transport.descriptor())


def write(source: Member, target: Member, moves: Iterable[tuple[int, int]], notice: bytes = b"notice") -> int:
    src, dst = zip(*moves, strict=True)
    return source.transport.write(target.name, pages(*src), pages(*dst), notice)
