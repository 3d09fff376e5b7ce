"""However a request ends and whatever state it is in, both sides are free within a second, and never under a write."""

from collections.abc import Callable

import pytest

from headstart.core.errors import ErrorCode
from headstart.core.messages import Cancel, CancelTicket, Message, PrefillDone, TicketClosed
from headstart.sim.client import Handle
from headstart.sim.cluster import SimCluster
from headstart.sim.network import NO_FAULT, MessageFault
from headstart.transfer.loopback import Fault
from tests.support.clusters import assert_right, make_cluster, prompt, settle, state, submit

Scene = Callable[[float], tuple[SimCluster, Handle]]
"""deadline -> a cluster, and the request that will come into the state."""


def waiting_for_pages(deadline_s: float) -> tuple[SimCluster, Handle]:
    cluster = make_cluster(decode_pages=20)
    submit(cluster, prompt(60, first=1), 16)
    cluster.run_for(0.05)
    return cluster, submit(cluster, prompt(41), 8, remaining_s=deadline_s)


def waiting_behind_a_leader(deadline_s: float) -> tuple[SimCluster, Handle]:
    cluster = make_cluster()
    submit(cluster, prompt(60))
    cluster.run_for(0.01)
    return cluster, submit(cluster, prompt(60), remaining_s=deadline_s)


def preparing(deadline_s: float) -> tuple[SimCluster, Handle]:
    cluster = make_cluster()
    return cluster, submit(cluster, prompt(200), 8, remaining_s=deadline_s)


def preparing_behind_another_prompt(deadline_s: float) -> tuple[SimCluster, Handle]:
    cluster = make_cluster(decode_pages=120, prefill_pages=80, prefill={"credit_tokens": 1000})
    submit(cluster, prompt(200, first=1))
    cluster.run_for(0.01)
    return cluster, submit(cluster, prompt(150), 8, remaining_s=deadline_s)


def ready(deadline_s: float) -> tuple[SimCluster, Handle]:
    cluster = make_cluster(decode={"max_running_requests": 1})
    submit(cluster, prompt(20, first=1), 60)
    cluster.run_for(0.1)
    return cluster, submit(cluster, prompt(41), 8, remaining_s=deadline_s)


def running(deadline_s: float) -> tuple[SimCluster, Handle]:
    cluster = make_cluster()
    return cluster, submit(cluster, prompt(41), 60, remaining_s=deadline_s)


def running_its_own_prefill(deadline_s: float) -> tuple[SimCluster, Handle]:
    cluster = make_cluster(num_prefill=0)
    return cluster, submit(cluster, prompt(200), 8, remaining_s=deadline_s)


def retracted(deadline_s: float) -> tuple[SimCluster, Handle]:
    cluster = make_cluster(decode_pages=26, decode={"num_reserved_decode_tokens": 2})
    for first in range(3):
        submit(cluster, prompt(20) + prompt(4, first), 40)
    return cluster, submit(cluster, prompt(20) + prompt(4, 3), 40, remaining_s=deadline_s)


SCENES: dict[str, tuple[Scene, str]] = {
    "waiting for pages": (waiting_for_pages, "waiting"),
    "waiting behind a leader": (waiting_behind_a_leader, "waiting"),
    "preparing": (preparing, "preparing"),
    "preparing, not yet computed": (preparing_behind_another_prompt, "preparing"),
    "ready": (ready, "ready"),
    "running": (running, "running"),
    "running its own prefill": (running_its_own_prefill, "running"),
    "retracted": (retracted, "retracted"),
}
IN_EVERY_STATE = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())


def brought_into(name: str, cluster: SimCluster, handle: Handle) -> None:
    cluster.run_until(lambda: state(cluster, handle) == name, limit_s=20.0)
    if name == "preparing":
        cluster.run_for(0.03)
    assert state(cluster, handle) == name


def assert_free_within_a_second(cluster: SimCluster, handle: Handle) -> None:
    """Nothing of this request is left anywhere; those beside it go on and end right."""
    cluster.run_for(1.0)
    assert handle.is_done
    assert state(cluster, handle) == "gone"
    beside = [other for other in cluster.handles if other is not handle]
    if all(other.is_done for other in beside):
        cluster.check_idle()
    settle(cluster)
    assert_right(*beside)


@IN_EVERY_STATE
@pytest.mark.behaviour("35", "B3")
def test_a_disconnect_in_every_state_frees_both_sides(scene: tuple[Scene, str]) -> None:
    build, name = scene
    cluster, handle = build(60.0)
    brought_into(name, cluster, handle)
    cluster.cancel(handle)
    assert handle.error is ErrorCode.CANCELLED
    assert_free_within_a_second(cluster, handle)


@IN_EVERY_STATE
def test_a_deadline_in_every_state_frees_both_sides(scene: tuple[Scene, str]) -> None:
    """The same cluster twice: the first run tells when the state is reached."""
    build, name = scene
    cluster, handle = build(60.0)
    brought_into(name, cluster, handle)
    reached_s = cluster.clock.now() - handle.submitted_at
    cluster, handle = build(reached_s + 1e-5)
    cluster.run_for(reached_s + 2e-5)
    assert handle.error is ErrorCode.DEADLINE
    assert_free_within_a_second(cluster, handle)


@IN_EVERY_STATE
def test_a_silent_gateway_frees_both_sides_after_five_seconds(scene: tuple[Scene, str]) -> None:
    build, name = scene
    cluster, handle = build(60.0)
    brought_into(name, cluster, handle)
    cluster.inject_message_faults(
        lambda sender, recipient, message: MessageFault(0) if "gateway" in (sender, recipient) else NO_FAULT
    )
    cluster.run_for(7.0)
    assert cluster.is_free()
    cluster.inject_message_faults(lambda sender, recipient, message: NO_FAULT)
    settle(cluster)


@IN_EVERY_STATE
def test_a_lost_cancel_costs_time_but_no_page(scene: tuple[Scene, str]) -> None:
    build, name = scene
    cluster, handle = build(60.0)
    brought_into(name, cluster, handle)
    lost: list[Message] = []

    def lose_first(sender: str, recipient: str, message: Message) -> MessageFault:
        if (
            isinstance(message, Cancel | CancelTicket | TicketClosed)
            and sum(type(m) is type(message) for m in lost) < 2
        ):
            lost.append(message)
            return MessageFault(0)
        return NO_FAULT

    cluster.inject_message_faults(lose_first)
    cluster.cancel(handle)
    cluster.run_for(5.0)
    settle(cluster)
    assert_right(*(other for other in cluster.handles if other is not handle))


@pytest.mark.behaviour("36", "A1")
def test_pages_of_an_aborted_request_are_not_given_away_under_a_live_write() -> None:
    cluster = make_cluster(decode_pages=24)
    cluster.inject_write_faults(lambda posted: Fault(delay_s=3.0))
    aborted = submit(cluster, prompt(61), 4)
    cluster.run_until(lambda: cluster.links.num_open_writes() > 0)
    cluster.run_for(0.2)
    cluster.cancel(aborted)
    cluster.inject_write_faults(lambda posted: Fault())
    cluster.run_for(0.1)
    under_write = cluster.links.pages_under_write("decode-0#1")
    assert under_write
    canary = submit(cluster, prompt(40, first=1), 20)
    while cluster.links.pages_under_write("decode-0#1"):
        cluster.step()
        cluster.check()
    cluster.run_for(0.5)
    counts = cluster.workers["decode-0"].organs.cache.counts()
    assert counts.inflight == 0
    settle(cluster)
    assert_right(canary)


@pytest.mark.behaviour("B8")
def test_a_request_aborted_during_its_load_gets_its_pages_back_by_proof_of_the_writers_end() -> None:
    cluster = make_cluster()
    cluster.inject_write_faults(lambda posted: Fault(delay_s=5.0))
    handle = submit(cluster, prompt(61), 4)
    cluster.run_until(lambda: cluster.links.num_open_writes() > 0)
    cluster.cancel(handle)
    cluster.kill("prefill-0")
    cluster.run_for(1.0)
    assert cluster.workers["decode-0"].organs.cache.counts().inflight == 0
    cluster.check()


@pytest.mark.behaviour("37")
def test_killed_prefill_under_load_every_request_finishes_and_a_restarted_one_is_used() -> None:
    cluster = make_cluster(num_prefill=1, decode_pages=200)
    handles = [submit(cluster, prompt(60, first), 8) for first in range(8)]
    cluster.run_for(0.15)
    cluster.kill("prefill-0")
    handles += [submit(cluster, prompt(60, 20 + first), 8) for first in range(4)]
    cluster.finish()
    assert_right(*handles)
    cluster.restart("prefill-0")
    cluster.run_for(1.0)
    later = submit(cluster, prompt(60, 50), 8)
    settle(cluster)
    assert_right(later)
    assert cluster.load("prefill-0")["completed_calls"] == 1


@pytest.mark.behaviour("37")
def test_another_prefill_workers_requests_are_unaffected() -> None:
    cluster = make_cluster(num_prefill=2, decode_pages=200)
    handles = [submit(cluster, prompt(60, first), 8) for first in range(8)]
    cluster.run_for(0.1)
    cluster.kill("prefill-1")
    settle(cluster)
    assert_right(*handles)


@pytest.mark.behaviour("38")
def test_a_killed_decode_worker_costs_its_prefill_worker_nothing() -> None:
    cluster = make_cluster(num_decode=2)
    handles = [submit(cluster, prompt(60, first), 8) for first in range(8)]
    cluster.run_for(0.1)
    cluster.kill("decode-1")
    settle(cluster)
    assert_right(*handles)


@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.1, 0.2, 0.3])
def test_a_decode_worker_that_dies_hands_its_streams_over_without_a_seam(after_s: float) -> None:
    cluster = make_cluster(num_decode=2)
    handles = [submit(cluster, prompt(40, first), 30) for first in range(6)]
    cluster.run_for(after_s)
    cluster.kill("decode-0")
    settle(cluster)
    assert_right(*handles)


def test_a_request_whose_two_workers_died_is_not_tried_on_a_third() -> None:
    cluster = make_cluster(num_decode=3)
    killer = submit(cluster, prompt(40), 200)
    for _ in range(2):
        cluster.run_until(lambda: state(cluster, killer) == "running")
        (name,) = [
            n for n, w in cluster.workers.items() if n.startswith("decode") and w.organs.scheduler.load().num_running
        ]
        cluster.kill(name)
        cluster.run_for(0.3)
    assert killer.error is ErrorCode.WORKER_LOST
    settle(cluster)


@pytest.mark.behaviour("40")
def test_a_prefill_worker_that_never_answers_fails_nothing() -> None:
    cluster = make_cluster()
    cluster.stall("prefill-0")
    handle = submit(cluster, prompt(60), 8, remaining_s=20.0)
    cluster.finish()
    assert_right(handle)
    cluster.resume("prefill-0")
    settle(cluster)


@pytest.mark.behaviour("F2")
def test_a_hundred_requests_cancelled_at_random_points_four_times() -> None:
    cluster = make_cluster(decode_pages=120, prefill_pages=120, decode={"max_queued_requests": 200}, seed=7)
    for round_ in range(4):
        handles = [submit(cluster, prompt(30, first % 40), 8) for first in range(100)]
        for number, handle in enumerate(handles):
            cluster.run_for(0.003 * ((number * 7 + round_) % 5))
            if not handle.is_done:
                cluster.cancel(handle)
        settle(cluster)
    probe = submit(cluster, prompt(30, 99))
    settle(cluster)
    assert_right(probe)


@pytest.mark.behaviour("B9")
def test_done_said_twice_before_its_notices_is_taken_once() -> None:
    cluster = make_cluster()
    cluster.inject_write_faults(lambda posted: Fault(notice_delay_s=0.2))
    cluster.inject_message_faults(
        lambda sender, to, message: MessageFault(2) if isinstance(message, PrefillDone) else NO_FAULT
    )
    handle = submit(cluster, prompt(30))
    while not handle.is_done:
        cluster.step()
        cluster.check()
    assert_right(handle)
    settle(cluster)
