"""NIXL between real processes, and what the writer sees when the other one dies."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headstart.core.arrays import int32_array
from headstart.core.layout import PoolRegion
from headstart.transfer.contract import Completed, PeerLost, TransferError, TransferEvent, WriteFailed
from headstart.transfer.nixl import NixlTransport

NUM_PAGES, PAGE_BYTES = 32, 368_640
PATIENCE_S = 60.0
TARGET = Path(__file__).with_name("nixl_target.py")


class Target:
    """The other process."""

    def __init__(self, name: str) -> None:
        arguments = [sys.executable, str(TARGET), name, str(NUM_PAGES), str(PAGE_BYTES)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._buffer = b""
        self._lines: dict[str, list[str]] = {"descriptor": [], "notice": [], "digest": []}

    def said(self, kind: str) -> list[str]:
        assert self._process.stdout is not None
        self._buffer += self._process.stdout.read() or b""
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            key, value = line.decode().split()
            self._lines[key].append(value)
        return self._lines[kind]

    def ask(self, pages: range) -> None:
        """One line at a time: the next only after every digest came."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, pages)).encode() + b"\n")
        self._process.stdin.flush()

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Writer:
    """This process's side."""

    def __init__(self) -> None:
        self.pool = np.random.default_rng(5).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
        self.transport = NixlTransport("p", PoolRegion(self.pool.ctypes.data, NUM_PAGES, PAGE_BYTES))
        self.events: list[TransferEvent] = []

    def wait(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, self.events
            self.events += self.transport.poll()
            os.sched_yield()  # the target shares our cores

    def connect(self, target: Target) -> None:
        self.wait(lambda: bool(target.said("descriptor")))
        self.transport.connect("d", bytes.fromhex(target.said("descriptor")[0]))

    def write(self, pages: range, notice: bytes = b"n") -> int:
        ids = int32_array(pages)
        return self.transport.write("d", ids, ids[::-1], notice)

    def of(self, kind: type) -> list[TransferEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def digest(self, page: int) -> str:
        return hashlib.sha256(self.pool[page].tobytes()).hexdigest()


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.transport.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Target]]:
    started: list[Target] = []

    def start() -> Target:
        started.append(Target("d"))
        return started[-1]

    yield start
    for target in started:
        target.kill()


def move_and_check(writer: Writer, target: Target, notice: bytes) -> None:
    """Moves pages [0, 8) in reverse; the notice has come when the digests are asked for."""
    handle = writer.write(range(8), notice)
    writer.wait(lambda: notice.hex() in target.said("notice") and Completed(handle) in writer.events)
    asked_before = len(target.said("digest"))
    target.ask(range(8))
    writer.wait(lambda: len(target.said("digest")) == asked_before + 8)
    assert target.said("digest")[asked_before:] == [writer.digest(7 - page) for page in range(8)]


def test_pages_arrive_in_another_process(writer: Writer, start: Callable[[], Target]) -> None:
    target = start()
    writer.connect(target)
    move_and_check(writer, target, b"one")
    move_and_check(writer, target, b"two")


def test_a_frozen_peer_keeps_its_writes_open_and_its_death_ends_each_once(
    writer: Writer, start: Callable[[], Target]
) -> None:
    target = start()
    writer.connect(target)
    move_and_check(writer, target, b"warm")
    writer.events.clear()
    target.freeze()
    handles = [writer.write(range(NUM_PAGES)) for _ in range(4)]
    for _ in range(200):
        writer.events += writer.transport.poll()
    assert writer.events == []
    target.kill()
    writer.wait(lambda: len(writer.events) == len(handles) + 1)
    assert writer.of(PeerLost) == [PeerLost("d")]
    assert sorted(e.handle for e in writer.of(WriteFailed) if isinstance(e, WriteFailed)) == handles
    with pytest.raises(TransferError):
        writer.write(range(1))
    for _ in range(200):
        writer.events += writer.transport.poll()
    assert len(writer.events) == len(handles) + 1


def test_a_peer_that_died_idle_is_lost_at_the_next_write(writer: Writer, start: Callable[[], Target]) -> None:
    target = start()
    writer.connect(target)
    move_and_check(writer, target, b"warm")
    target.kill()
    writer.events.clear()
    handle = writer.write(range(4))
    writer.wait(lambda: len(writer.events) == 2)
    assert writer.of(PeerLost) == [PeerLost("d")]
    assert [e.handle for e in writer.of(WriteFailed) if isinstance(e, WriteFailed)] == [handle]


def test_the_writer_survives_a_peer_that_restarts_again_and_again(writer: Writer, start: Callable[[], Target]) -> None:
    for number in range(3):
        target = start()
        writer.connect(target)
        move_and_check(writer, target, b"life %d" % number)
        if number % 2:
            writer.write(range(NUM_PAGES))  # dies with this open, or just ended
        target.kill()


def test_connecting_to_a_process_that_is_gone_is_refused_or_lost(writer: Writer, start: Callable[[], Target]) -> None:
    target = start()
    writer.wait(lambda: bool(target.said("descriptor")))
    descriptor = bytes.fromhex(target.said("descriptor")[0])
    target.kill()
    try:
        writer.transport.connect("d", descriptor)
        writer.write(range(1))
    except TransferError:
        assert writer.transport.poll() == []
        return
    writer.wait(lambda: bool(writer.of(PeerLost) and writer.of(WriteFailed)))
