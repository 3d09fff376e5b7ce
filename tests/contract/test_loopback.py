"""Loopback's own promises: virtual time, honest landings, and faults on demand."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from headstart.core.layout import PoolRegion
from headstart.transfer.contract import Completed, Notice, PeerLost, TransferError, TransferEvent, WriteFailed
from headstart.transfer.loopback import (
    BusyTime,
    Fault,
    FaultInjector,
    LoopbackNetwork,
    LoopbackTransport,
    Posted,
    every_write_succeeds,
    inject_nth,
)
from tests.contract.members import pages, stamped

NUM_PAGES, PAGE_BYTES = 16, 64
LANDS_AFTER, TRAVELS = 1.0, 0.25
PAGE_S = 0.5
"""A page keeps both ends of a link busy for so long, where links fill up."""


class Time:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


class World:
    """Writer p and target d, connected: writes land after one second, events travel a quarter more."""

    def __init__(
        self, injector: FaultInjector = every_write_succeeds, seed: int = 1, busy_time: BusyTime | None = None
    ) -> None:
        self.time = Time()
        self.network = LoopbackNetwork(
            random.Random(seed), self.time, lambda num_bytes: LANDS_AFTER if num_bytes else TRAVELS, injector, busy_time
        )
        self.p_pool, self.p = self.open("p", 1)
        self.d_pool, self.d = self.open("d", 2)
        self.p.connect("d", self.d.descriptor())

    def open(self, name: str, salt: int) -> tuple[NDArray[np.uint8], LoopbackTransport]:
        pool = stamped(NUM_PAGES, PAGE_BYTES, salt)
        return pool, self.network.transport(name, pool, PoolRegion(0, NUM_PAGES, PAGE_BYTES))

    def write(self, src: int, dst: int, notice: bytes = b"n") -> int:
        return self.p.write("d", pages(src), pages(dst), notice)

    def polls(self, at: float) -> tuple[list[TransferEvent], list[TransferEvent]]:
        """(p's events, d's events) at that time."""
        self.time.at = at
        return self.p.poll(), self.d.poll()

    def landed(self, src: int, dst: int) -> bool:
        return np.array_equal(self.d_pool[dst], self.p_pool[src])


class FullLinks(World):
    """p, q, d and e, each connected to each; either end of a link takes its pages one by one."""

    def __init__(self, injector: FaultInjector = every_write_succeeds) -> None:
        super().__init__(injector, busy_time=lambda num_bytes: num_bytes / PAGE_BYTES * PAGE_S)
        self.transports = {"p": self.p, "d": self.d, "q": self.open("q", 3)[1], "e": self.open("e", 4)[1]}
        for writer in self.transports.values():
            for name, target in self.transports.items():
                if target is not writer:
                    writer.connect(name, target.descriptor())
        self._landed: dict[int, float] = {}

    def landings(self, *posts: tuple[float, str, int]) -> list[float | None]:
        """When the writes have passed that are posted at that time, that way ("pd") and of so many pages; None: never."""
        for number, (at, (writer, target), num_pages) in enumerate(posts):
            self._go_on_until(at)
            taken = pages(*range(num_pages))
            self.transports[writer].write(target, taken, taken, bytes([number]))
        self._go_on_until(1000.0)
        return [self._landed.get(number) for number in range(len(posts))]

    def _go_on_until(self, end: float) -> None:
        while (at := self.network.next_event_time()) is not None and at <= end:
            self.time.at = at
            for event in (event for transport in self.transports.values() for event in transport.poll()):
                if isinstance(event, Notice):
                    self._landed[event.payload[0]] = at - TRAVELS - LANDS_AFTER
        self.time.at = end


@pytest.mark.parametrize(
    ("posts", "landings"),
    [
        ([(0.0, "pd", 1), (0.0, "qd", 1)], [0.5, 1.0]),
        ([(0.0, "pd", 1), (0.0, "pe", 1)], [0.5, 1.0]),
        ([(0.0, "pd", 3), (0.0, "qd", 2)], [1.5, 2.5]),
        ([(0.0, "pd", 1), (0.0, "qe", 1)], [0.5, 0.5]),
        ([(0.0, "pd", 1), (0.0, "dp", 1)], [0.5, 0.5]),
        ([(0.0, "pd", 3), (0.0, "pe", 1), (0.0, "qe", 1)], [1.5, 2.0, 1.0]),
        ([(0.0, "pd", 1), (10.0, "pe", 1), (10.25, "pe", 1)], [0.5, 10.5, 11.0]),
        ([(0.0, "pd", 1), (10.0, "qd", 1), (10.25, "qd", 1)], [0.5, 10.5, 11.0]),
        ([(0.0, "pd", 1), (10.0, "pe", 1), (10.0, "qd", 1), (10.25, "qe", 1)], [0.5, 10.5, 10.5, 11.0]),
    ],
    ids=[
        "one target takes its writes in turn",
        "one source sends in turn",
        "a write takes the time of all its pages",
        "other ends do not wait",
        "directions do not wait for each other",
        "the busier end decides",
        "a source that was idle owes nothing",
        "a target that was idle owes nothing",
        "both ends were idle for different times",
    ],
)
def test_where_links_fill_up(posts: list[tuple[float, str, int]], landings: list[float]) -> None:
    assert FullLinks().landings(*posts) == landings


def test_a_write_that_fails_keeps_its_turn_and_one_with_a_delay_waits_for_its_own() -> None:
    posts = [(0.0, "pd", 1), (0.0, "pd", 1), (0.0, "pd", 1)]
    faults = {0: Fault(fails=True), 1: Fault(delay_s=LANDS_AFTER + 4.0)}
    assert FullLinks(inject_nth(faults)).landings(*posts) == [None, 5.0, 1.5]


def test_bytes_land_at_their_time_and_not_at_the_post() -> None:
    world = World()
    handle = world.write(3, 5)
    assert world.network.next_event_time() == LANDS_AFTER
    assert world.polls(0.99) == ([], [])
    assert not world.landed(3, 5)
    assert world.network.pages_under_write("d") == {5}
    assert world.polls(1.0) == ([], [])
    assert world.landed(3, 5)
    assert world.network.pages_under_write("d") == set()
    assert world.network.next_event_time() == LANDS_AFTER + TRAVELS
    assert world.polls(1.25) == ([Completed(handle)], [Notice(b"n")])
    assert world.network.next_event_time() is None


def test_an_event_that_nobody_fetched_is_due_now() -> None:
    world = World()
    world.write(0, 0)
    world.time.at = 2.0
    world.p.poll()
    world.time.at = 2.25
    world.p.poll()
    assert world.network.next_event_time() == 2.25  # d's notice
    world.d.poll()
    assert world.network.next_event_time() is None


def test_fetching_one_event_loses_none_that_is_under_way() -> None:
    world = World()
    handles, ended, noticed = [], [], []
    for tick in range(40):
        if tick < 20:
            handles.append(world.write(0, 0, bytes([tick])))
        mine, theirs = world.polls(tick / 10)
        ended += mine
        noticed += theirs
    assert sorted(event.handle for event in ended if isinstance(event, Completed)) == handles
    assert sorted(event.payload[0] for event in noticed if isinstance(event, Notice)) == list(range(20))


def test_a_source_page_reused_too_early_arrives_wrong() -> None:
    world = World()
    original = world.p_pool[3].copy()
    world.write(3, 5)
    world.p_pool[3] = 0
    world.polls(1.0)
    assert not np.array_equal(world.d_pool[5], original)
    assert not world.d_pool[5].any()


def test_order_differs_with_the_seed_and_repeats_with_it() -> None:
    def order(seed: int) -> list[bytes]:
        world = World(seed=seed)
        for number in range(8):
            world.write(number, number, bytes([number]))
        world.polls(1.0)
        return [event.payload for event in world.polls(1.25)[1] if isinstance(event, Notice)]

    orders = [order(seed) for seed in range(20)]
    assert len({tuple(o) for o in orders}) > 15
    assert order(5) == orders[5]
    assert all(sorted(o) == [bytes([n]) for n in range(8)] for o in orders)


def test_without_a_clock_everything_lands_at_the_next_poll() -> None:
    network = LoopbackNetwork(random.Random(1))
    pool = bytearray(2 * PAGE_BYTES)
    source = network.transport("p", bytearray(b"x" * 2 * PAGE_BYTES), PoolRegion(0, 2, PAGE_BYTES))
    target = network.transport("d", pool, PoolRegion(0, 2, PAGE_BYTES))
    source.connect("d", target.descriptor())
    source.write("d", pages(0), pages(1), b"n")
    assert not any(pool)
    assert target.poll() == [Notice(b"n")]
    assert pool[PAGE_BYTES:] == b"x" * PAGE_BYTES


# ---- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(4))
def test_write_k_of_four_fails_and_the_others_do_not(k: int) -> None:
    world = World(inject_nth({k: Fault(fails=True)}))
    handles = [world.write(n, n, bytes([n])) for n in range(4)]
    world.polls(1.0)
    ended, noticed = world.polls(1.25)
    assert {e.handle for e in ended if isinstance(e, WriteFailed)} == {handles[k]}
    assert {e.handle for e in ended if isinstance(e, Completed)} == set(handles) - {handles[k]}
    assert {e.payload[0] for e in noticed if isinstance(e, Notice)} == set(range(4)) - {k}


def test_a_failed_write_leaves_some_of_its_pages_and_no_notice() -> None:
    parts = set()
    for seed in range(10):
        world = World(inject_nth({0: Fault(fails=True)}), seed)
        world.p.write("d", pages(*range(8)), pages(*range(8)), b"n")
        world.polls(1.0)
        assert world.polls(1.25)[1] == []
        parts.add(sum(world.landed(n, n) for n in range(8)))
    assert len(parts) > 2


def test_a_refused_post_raises_and_nothing_is_in_flight() -> None:
    world = World(inject_nth({1: Fault(refused=True)}))
    world.write(0, 0)
    with pytest.raises(TransferError, match="refused"):
        world.write(1, 1)
    assert world.network.num_open_writes() == 1


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_notices_may_be_lost_or_doubled(copies: int) -> None:
    world = World(inject_nth({0: Fault(num_notices=copies)}))
    handle = world.write(0, 0)
    world.polls(1.0)
    assert world.polls(1.25) == ([Completed(handle)], [Notice(b"n")] * copies)


def test_a_notice_may_come_long_after_the_completion() -> None:
    world = World(inject_nth({0: Fault(notice_delay_s=5.0)}))
    handle = world.write(0, 0)
    world.polls(1.0)
    assert world.polls(1.25) == ([Completed(handle)], [])
    assert world.polls(6.25) == ([], [Notice(b"n")])


def test_one_write_may_be_late() -> None:
    world = World(inject_nth({0: Fault(delay_s=30.0)}))
    slow, fast = world.write(0, 0), world.write(1, 1)
    world.polls(1.0)
    assert world.polls(29.0)[0] == [Completed(fast)]
    assert not world.landed(0, 0)
    world.polls(30.0)
    assert world.landed(0, 0)
    assert world.polls(30.25)[0] == [Completed(slow)]


# ---- ends of processes -----------------------------------------------------------------------------------------------


def test_a_write_posted_before_its_target_closed_still_lands() -> None:
    world = World()
    handle = world.write(3, 5)
    world.d.close()
    assert world.polls(1.0)[0] == [PeerLost("d")]
    assert world.landed(3, 5)
    assert world.polls(1.25)[0] == [Completed(handle)]


def test_a_write_posted_after_its_target_closed_lands_too_until_the_writer_is_told() -> None:
    world = World()
    world.d.close()
    world.write(3, 5)
    world.polls(1.25)
    assert world.landed(3, 5)
    with pytest.raises(TransferError):
        world.write(4, 6)


def test_a_killed_target_fails_open_writes_and_is_lost_once() -> None:
    world = World()
    handle = world.write(0, 0)
    world.network.kill("d")
    world.network.kill("d")
    late = world.write(1, 1)  # the writer has not heard yet
    events = world.polls(5.0)[0]
    assert [e for e in events if isinstance(e, PeerLost)] == [PeerLost("d")]
    assert {e.handle for e in events if isinstance(e, WriteFailed)} == {handle, late}
    assert world.network.num_open_writes() == 0
    with pytest.raises(TransferError):
        world.write(2, 2)
    with pytest.raises(TransferError):
        world.p.connect("d", world.d.descriptor())


def test_a_restarted_target_is_another_pool_under_the_same_name() -> None:
    world = World()
    world.network.kill("d")
    world.polls(5.0)
    pool, restarted = world.open("d", 3)
    world.p.connect("d", restarted.descriptor())
    world.write(2, 2)
    world.polls(7.0)
    assert np.array_equal(pool[2], world.p_pool[2])


def test_nothing_of_a_killed_writer_lands_after_its_end() -> None:
    torn = set()
    for seed in range(10):
        world = World(seed=seed)
        world.p.write("d", pages(*range(8)), pages(*range(8)), b"n")
        world.network.kill("p")
        at_its_end = world.d_pool.copy()
        torn.add(sum(world.landed(n, n) for n in range(8)))
        assert world.polls(100.0) == ([], [])
        assert np.array_equal(world.d_pool, at_its_end)
        assert world.network.pages_under_write("d") == set()
    assert len(torn) > 2


def test_a_killed_writers_landed_write_may_or_may_not_be_noticed() -> None:
    def notices(seed: int) -> int:
        world = World(seed=seed)
        world.write(0, 0)
        world.polls(1.0)
        world.network.kill("p")
        return len(world.polls(1.25)[1])

    assert {notices(seed) for seed in range(20)} == {0, 1}


@pytest.mark.parametrize("stalled", ["p", "d"])
def test_a_stalled_end_keeps_writes_open_until_it_resumes(stalled: str) -> None:
    world = World()
    world.write(3, 5)
    world.network.stall(stalled)
    assert world.polls(60.0) == ([], [])
    assert not world.landed(3, 5)
    assert world.network.pages_under_write("d") == {5}
    assert world.network.next_event_time() is None
    world.network.resume(stalled)
    world.polls(60.0)
    assert world.landed(3, 5)
    assert [len(events) for events in world.polls(60.25)] == [1, 1]


def test_a_stalled_target_that_is_killed_fails_its_writes() -> None:
    world = World()
    handle = world.write(3, 5)
    world.network.stall("d")
    world.polls(2.0)
    world.network.kill("d")
    assert [e for e in world.polls(3.0)[0] if isinstance(e, WriteFailed)] == [WriteFailed(handle, "peer d is gone")]


def test_a_judge_sees_who_writes_what_to_whom() -> None:
    seen: list[Posted] = []

    def inject(posted: Posted) -> Fault:
        seen.append(posted)
        return Fault()

    world = World(inject)
    world.p.write("d", pages(1, 2), pages(3, 4), b"x")
    world.write(0, 0)
    assert seen == [Posted("p", "d", 0, 2, b"x"), Posted("p", "d", 1, 1, b"n")]
