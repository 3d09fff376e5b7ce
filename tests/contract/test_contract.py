"""What every transfer backend promises, whichever it is."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from headstart.transfer.contract import Completed, Notice, PeerLost, TransferError, WriteFailed
from tests.contract.members import NUM_PAGES, PAGE_BYTES, Cluster, Loopback, Nixl, connect, pages, write


@pytest.fixture(params=[Loopback, Nixl], ids=["loopback", "nixl"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(request.param())
    yield cluster
    cluster.close()


def test_bytes_arrive_at_exactly_the_named_pages_and_sources_stay_as_they_were(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    before, sources = target.pool.copy(), source.pool.copy()
    moves = {0: 5, 7: 0, 3: 15, 15: 6}
    handle = write(source, target, moves.items())
    cluster.wait(lambda: bool(source.of(Completed) and target.of(Notice)))
    assert source.events == [Completed(handle)]
    assert target.events == [Notice(b"notice")]
    expected = before
    for src, dst in moves.items():
        expected[dst] = sources[src]
    assert np.array_equal(target.pool, expected)
    assert np.array_equal(source.pool, sources)


def test_a_notice_never_comes_before_its_data(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    order = list(range(NUM_PAGES))
    for page in order:
        write(source, target, [(page, NUM_PAGES - 1 - page)], notice=bytes([page]))
    seen: set[int] = set()

    def every_notice_tells_the_truth() -> bool:
        for event in target.of(Notice):
            assert isinstance(event, Notice)
            page = event.payload[0]
            assert np.array_equal(target.pool[NUM_PAGES - 1 - page], source.pool[page])
            seen.add(page)
        return seen == set(order)

    cluster.wait(every_notice_tells_the_truth)


def test_many_writes_each_end_once_and_are_noticed_once_in_whatever_order(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    rng, handles = random.Random(3), []
    for number in range(100):
        moved = rng.sample(range(NUM_PAGES), 4)
        targets = rng.sample(range(NUM_PAGES), 4)
        handles.append(write(source, target, zip(moved, targets, strict=True), notice=b"%d" % number))
    cluster.wait(lambda: len(source.events) >= 100 and len(target.events) >= 100)
    assert sorted(handles) == sorted({event.handle for event in source.of(Completed) if isinstance(event, Completed)})
    assert {event.payload for event in target.of(Notice) if isinstance(event, Notice)} == {
        b"%d" % n for n in range(100)
    }
    assert (len(source.events), len(target.events)) == (100, 100)


def test_a_whole_pool_moves_in_one_write(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    write(source, target, zip(range(NUM_PAGES), reversed(range(NUM_PAGES)), strict=True))
    cluster.wait(lambda: bool(target.of(Notice)))
    assert np.array_equal(target.pool, source.pool[::-1])


def test_two_sources_write_into_one_pool_and_one_source_into_two(cluster: Cluster) -> None:
    left, right, target, other = (cluster.member(name) for name in ("p0", "p1", "d0", "d1"))
    for source, sink in ((left, target), (right, target), (left, other)):
        connect(source, sink)
        write(source, sink, [(2, 4 if source is left else 5)])
    cluster.wait(lambda: len(target.events) == 2 and len(other.events) == 1 and len(left.events) == 2)
    assert np.array_equal(target.pool[4], left.pool[2])
    assert np.array_equal(target.pool[5], right.pool[2])
    assert np.array_equal(other.pool[4], left.pool[2])


def test_pools_of_different_lengths_connect(cluster: Cluster) -> None:
    source, target = cluster.member("p", num_pages=4), cluster.member("d", num_pages=40)
    connect(source, target)
    write(source, target, [(3, 39)])
    cluster.wait(lambda: bool(target.of(Notice)))
    assert np.array_equal(target.pool[39], source.pool[3])


def test_pages_of_different_size_are_refused_naming_both(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d", page_bytes=2 * PAGE_BYTES)
    with pytest.raises(TransferError, match=f"{PAGE_BYTES} here, {2 * PAGE_BYTES} at d"):
        connect(source, target)


@pytest.mark.parametrize("descriptor", [b"", b"garbage", b"\x93\x01\x02\x03", b"\x91" * 10_000])
def test_a_malformed_descriptor_is_refused(cluster: Cluster, descriptor: bytes) -> None:
    source = cluster.member("p")
    with pytest.raises(TransferError):
        source.transport.connect("d", descriptor)
    with pytest.raises(TransferError):
        source.transport.write("d", pages(0), pages(0), b"")


def test_a_failed_connect_keeps_the_earlier_connection(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    with pytest.raises(TransferError):
        source.transport.connect("d", b"garbage")
    write(source, target, [(1, 2)])
    cluster.wait(lambda: bool(target.of(Notice)))


def test_an_unknown_peer_cannot_be_written_to_and_may_be_disconnected(cluster: Cluster) -> None:
    source = cluster.member("p")
    with pytest.raises(TransferError, match="not connected"):
        source.transport.write("nobody", pages(0), pages(0), b"")
    source.transport.disconnect("nobody")


@pytest.mark.parametrize(
    ("src", "dst"),
    [((), ()), ((0, 1), (0,)), ((NUM_PAGES,), (0,)), ((-1,), (0,))],
    ids=["none", "unequal", "high", "low"],
)
def test_what_only_our_own_bug_can_ask_is_a_value_error(
    cluster: Cluster, src: tuple[int, ...], dst: tuple[int, ...]
) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    with pytest.raises(ValueError, match="page"):
        source.transport.write("d", pages(*src), pages(*dst), b"")


@pytest.mark.parametrize("dst", [(NUM_PAGES,), (-1,), (3, 3)], ids=["high", "low", "twice"])
def test_target_pages_that_a_peer_may_not_name_are_a_transfer_error(cluster: Cluster, dst: tuple[int, ...]) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    before = target.pool.copy()
    with pytest.raises(TransferError, match="page"):
        source.transport.write("d", pages(*range(len(dst))), pages(*dst), b"")
    write(source, target, [(0, 0)])
    cluster.wait(lambda: bool(target.of(Notice)))
    assert np.array_equal(target.pool[1:], before[1:])


def test_connecting_again_to_the_same_pool_changes_nothing(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    for number in range(3):
        connect(source, target)
        write(source, target, [(number, number)])
        connect(source, target)  # while that write may be open
    cluster.wait(lambda: len(source.of(Completed)) == 3 and len(target.of(Notice)) == 3)
    assert np.array_equal(target.pool[:3], source.pool[:3])


def test_a_name_that_comes_back_with_another_pool_is_written_there(cluster: Cluster) -> None:
    source, former = cluster.member("p"), cluster.member("d")
    connect(source, former)
    write(source, former, [(1, 1)])
    latter = cluster.member("d")
    before = former.pool.copy()
    before[1] = source.pool[1]
    connect(source, latter)
    write(source, latter, [(2, 2)])
    cluster.wait(lambda: len(source.of(Completed)) == 2 and bool(latter.of(Notice)))
    assert np.array_equal(latter.pool[2], source.pool[2])
    assert np.array_equal(former.pool, before)


def test_disconnect_ends_every_open_write_once_and_forgets_the_name(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    handles = {write(source, target, [(n, n)]) for n in range(8)}
    source.transport.disconnect("d")
    with pytest.raises(TransferError, match="not connected"):
        write(source, target, [(0, 0)])
    cluster.wait(lambda: len(source.events) == len(handles))
    ended = [event.handle for event in source.events if isinstance(event, Completed | WriteFailed)]
    assert sorted(ended) == sorted(handles)
    connect(source, target)
    write(source, target, [(9, 9)])
    cluster.wait(lambda: len(source.events) == len(handles) + 1)
    assert np.array_equal(target.pool[9], source.pool[9])


def test_writing_to_a_closed_peer_ends_and_loses_it_once(cluster: Cluster) -> None:
    source, target, third = cluster.member("p"), cluster.member("d"), cluster.member("d1")
    connect(source, target)
    connect(source, third)
    write(source, target, [(0, 0)])
    cluster.wait(lambda: bool(target.of(Notice) and source.of(Completed)))
    target.transport.close()
    handle = write(source, target, [(1, 1)])
    cluster.wait(lambda: bool(source.of(PeerLost)) and len(source.events) == 3)
    assert source.of(PeerLost) == [PeerLost("d")]
    ended = [event for event in source.events if isinstance(event, Completed | WriteFailed) and event.handle == handle]
    assert len(ended) == 1
    with pytest.raises(TransferError):
        write(source, target, [(2, 2)])
    write(source, third, [(3, 3)])
    cluster.wait(lambda: bool(third.of(Notice)))
    assert source.of(PeerLost) == [PeerLost("d")]


def test_close_is_final_quiet_and_may_be_repeated(cluster: Cluster) -> None:
    source, target = cluster.member("p"), cluster.member("d")
    connect(source, target)
    write(source, target, [(0, 0)])
    source.transport.close()
    source.transport.close()
    assert source.transport.poll() == []
    for refused in (
        lambda: write(source, target, [(0, 0)]),
        lambda: connect(source, target),
        source.transport.descriptor,
    ):
        with pytest.raises(TransferError):
            refused()
    source.transport.disconnect("d")
