"""The gateway and the launcher end under load and are started again on their ports; the workers of each as they should."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event

import httpx
import pytest
from cluster import PATIENCE_S, TINY_FLAGS, Cluster, Worker, is_free, until
from load import Ask, Heard, Load, Refused, conversations, greedy, listen, some

pytestmark = pytest.mark.full
FLAGS = (*TINY_FLAGS, "--dtype", "float32", "--local-prefill-tokens", "0", "--drain-timeout", "1")
CANCELLED_WITHIN_S = 5.0 + 2.0
"""Of a gateway's silence (limits.gateway_silence_s), and for the end to be reported."""
NUM_RESTARTS = 10
BROKEN = (httpx.TransportError, Refused)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A gateway, a prefill and two decode workers that no launcher looks after."""
    cluster = Cluster(tmp_path_factory.mktemp("by-hand"), *FLAGS, command="gateway")
    try:
        for name in ("prefill-0", "decode-0", "decode-1"):
            cluster.join(name.partition("-")[0], name, *FLAGS)
        cluster.wait_until_ready()
        cluster.wait_for_workers(1, 2)
        yield cluster
    finally:
        cluster.stop()


def hit_lengths(cluster: Cluster, asks: list[Ask]) -> list[int]:
    return [cluster.complete(**ask.body)["usage"]["headstart"]["decode_prefix_len"] for ask in asks]


def num_left_by_gateways(cluster: Cluster) -> float:
    """Choices that decode workers ended because their gateway had fallen silent."""
    return sum(cluster.total(name, "gateway_silence_cancels") for name in ("decode-0", "decode-1"))


def start_endless(pool: ThreadPoolExecutor, cluster: Cluster) -> Future[Heard]:
    """A stream that will not end by itself, once it has brought something."""
    begun = Event()
    stream = pool.submit(listen, cluster, greedy(some(Random(70), 50), 7000), lambda heard: begun.set())
    assert begun.wait(PATIENCE_S)
    return stream


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_gateway_that_is_restarted_under_load_finds_its_workers_and_their_caches(
    by_hand: Cluster, number: signal.Signals
) -> None:
    talks = conversations(by_hand, 3, 3)
    deepest = [turns[-1] for turns in talks]
    before = {name: process.pid for name, process in by_hand.joined.items()}
    found = hit_lengths(by_hand, deepest)
    with Load(by_hand, talks) as load, ThreadPoolExecutor(1) as pool:
        load.wait_for_answers(4)
        endless = start_endless(pool, by_hand)
        by_hand.process.send_signal(number)
        by_hand.process.wait(timeout=PATIENCE_S)
        with pytest.raises(BROKEN) as broken:
            endless.result(timeout=PATIENCE_S)
        by_hand.start()
        by_hand.wait_until_ready()
        by_hand.wait_for_workers(1, 2)
        load.wait_for_rounds()
        errors = load.take_errors()
        load.wait_for_rounds()  # the new gateway knows where the deepest turns are
    print(f"\n{number.name}: the long stream ended with {broken.value!r}; {len(errors)} refusals while it was away")
    assert not load.count.errors, "of requests that the new gateway took"
    assert load.count.damage == (0, 0, 0)
    by_hand.wait_until_free()
    assert {name: process.pid for name, process in by_hand.joined.items() if process.poll() is None} == before
    assert all(now >= then > 0 for now, then in zip(hit_lengths(by_hand, deepest), found, strict=True))


def test_requests_of_a_gateway_that_does_not_come_back_are_cancelled_within_its_silence(by_hand: Cluster) -> None:
    left_before = num_left_by_gateways(by_hand)
    with ThreadPoolExecutor(1) as pool:
        endless = start_endless(pool, by_hand)
        by_hand.process.kill()
        by_hand.process.wait()
        with pytest.raises(BROKEN):
            endless.result(timeout=PATIENCE_S)
    time.sleep(CANCELLED_WITHIN_S)
    by_hand.start()
    by_hand.wait_until_ready()
    by_hand.wait_for_workers(1, 2)
    by_hand.wait_until_free()
    assert num_left_by_gateways(by_hand) == left_before + 1


@pytest.mark.parametrize("name", ["decode-1", "prefill-0"])
def test_case_E6_a_worker_that_is_killed_and_restarted_ten_times_under_load_costs_no_token(
    by_hand: Cluster, name: str
) -> None:
    """No launcher tells of the ends: they are found by silence, and proven by the name lock."""
    talks = conversations(by_hand, 3, 3)
    survivors = {other: process.pid for other, process in by_hand.joined.items() if other != name}
    with Load(by_hand, talks) as load:
        for _ in range(NUM_RESTARTS):
            former = by_hand.kill(name)
            by_hand.joined[name].wait()
            by_hand.join(name.partition("-")[0], name, *FLAGS)
            until(lambda former=former: is_back(by_hand.worker(name), former), f"{name} started again", 180)
            load.wait_for_answers(4)
    print(f"\n{name}: {load.count.answers} answers, longest stall {load.count.longest_stall_s:.2f} s")
    assert not load.count.errors
    assert load.count.damage == (0, 0, 0)
    assert {other: process.pid for other, process in by_hand.joined.items() if process.poll() is None} == {
        **survivors,
        name: by_hand.joined[name].pid,
    }
    by_hand.wait_until_free()


def is_back(worker: Worker, former: int) -> bool:
    return bool(worker["state"] == "alive" and worker["incarnation"] > former)


def descendants(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = {int(word) for word in children.read_text().split()} if children.exists() else set()
    return found.union(*(descendants(child) for child in found))


def lives(pid: int) -> bool:
    """A process whose first thread has ended is a zombie; others may still hold its sockets."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_launcher_that_is_killed_under_load_leaves_no_process_and_no_port_and_starts_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, *FLAGS)
    try:
        cluster.wait_until_ready()
        talks = conversations(cluster, 2, 2)
        children = descendants(cluster.process.pid)
        assert len(children) >= 3
        with Load(cluster, talks) as load:
            load.wait_for_answers(4)
            os.kill(cluster.process.pid, signal.SIGKILL)
            cluster.process.wait()
            until(lambda: not any(map(lives, children)), "the end of its children")
            until(lambda: is_free(cluster.port) and is_free(cluster.control_port), "the end of its sockets")
            cluster.start()
            cluster.wait_until_ready()
            load.wait_for_rounds()
            load.take_errors()
            load.wait_for_rounds()
        assert not load.count.errors
        assert load.count.damage == (0, 0, 0)
        cluster.wait_until_free()
    finally:
        cluster.stop()
    assert not descendants(os.getpid()) & children
