"""A lost connection between two live workers mends by itself; a drain and a flush meet requests in every state."""

import pytest
from test_ends_in_every_state import IN_EVERY_STATE, Scene, brought_into

from headstart.core.errors import ErrorCode
from headstart.core.messages import Drain, Flush, Flushed, Message, PrefillDone, Tokens
from headstart.sim.cluster import SimCluster
from headstart.sim.network import NO_FAULT, MessageFault
from headstart.sim.worker import GATEWAY
from headstart.transfer.loopback import Fault
from tests.support.clusters import assert_right, make_cluster, pages_moved, prompt, serve, settle, state, stats, submit

P, D = "prefill-0", "decode-0"


def name(cluster: SimCluster, worker: str) -> str:
    return str(cluster.workers[worker].ref)


@pytest.mark.behaviour("E5")
def test_a_prefill_worker_that_lost_its_connection_to_a_decode_worker_gets_it_back() -> None:
    cluster = make_cluster()
    serve(cluster, prompt(40, first=1))
    cluster.links.cut(name(cluster, P), name(cluster, D))
    cluster.run_for(0.1)
    first = serve(cluster, prompt(40, first=2))
    assert pages_moved(cluster, first) == 0, "computed at home, since the only prefill worker cannot write"
    second = serve(cluster, prompt(40, first=3))
    assert pages_moved(cluster, second) == 10
    settle(cluster)


@pytest.mark.behaviour("E5")
def test_a_connection_lost_in_the_middle_of_a_prompt() -> None:
    cluster = make_cluster()
    handle = submit(cluster, prompt(200), 8)
    cluster.run_until(lambda: cluster.load(P).get("pages_posted", 0) >= 8)
    cluster.links.cut(name(cluster, P), name(cluster, D))
    settle(cluster)
    assert_right(handle)
    assert pages_moved(cluster, serve(cluster, prompt(40, first=3))) == 10


@pytest.mark.behaviour("E8")
def test_a_restarted_prefill_worker_serves_again_with_no_other_restart() -> None:
    cluster = make_cluster(timing={"restart_s": 0.5})
    handle = submit(cluster, prompt(200), 8)
    cluster.run_for(0.1)
    cluster.kill(P)
    settle(cluster)
    assert_right(handle)
    cluster.run_for(2.0)
    assert pages_moved(cluster, serve(cluster, prompt(40, first=3))) == 10


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
@pytest.mark.behaviour("15")
def test_what_a_request_cost_is_known_without_waiting_for_done(delay_s: float) -> None:
    cluster = make_cluster(num_decode=2)
    serve(cluster, prompt(60))
    other = next(n for n in ("decode-0", "decode-1") if not cluster.load(n).get("accepted"))
    cluster.inject_message_faults(
        lambda sender, to, message: MessageFault(delay_s=delay_s) if isinstance(message, PrefillDone) else NO_FAULT
    )
    cluster.kill(next(n for n in ("decode-0", "decode-1") if n != other))
    cluster.run_for(1.0)
    handle = serve(cluster, prompt(60), 1)
    assert stats(handle).prefill_prefix_len == 56
    assert stats(handle).cached_tokens == 56
    cluster.run_for(5.0)
    settle(cluster)


@IN_EVERY_STATE
@pytest.mark.behaviour("27", "K7")
def test_a_flush_is_refused_in_every_state_and_breaks_nothing(
    scene: tuple[Scene, str],
) -> None:
    build, wanted = scene
    cluster, handle = build(60.0)
    brought_into(wanted, cluster, handle)
    answers = flush_everything(cluster)
    assert not answers[D].ok
    cluster.check()
    settle(cluster)
    assert_right(*cluster.handles)
    answers = flush_everything(cluster)
    assert all(answer.ok for answer in answers.values())
    assert all(worker.organs.cache.counts().cached == 0 for worker in cluster.workers.values())
    cluster.check_idle()


def flush_everything(cluster: SimCluster) -> dict[str, Flushed]:
    """What each worker answers to a Flush, by its name."""
    answers: dict[str, Flushed] = {}

    def listen(sender: str, to: str, message: Message) -> MessageFault:
        if isinstance(message, Flushed):
            answers[sender.partition("#")[0]] = message
        return NO_FAULT

    cluster.inject_message_faults(listen)
    for worker in cluster.workers.values():
        cluster.control.send(GATEWAY, str(worker.ref), Flush(7))
    cluster.run_for(0.005)
    return answers


@pytest.mark.behaviour("M4")
def test_a_prefill_worker_told_to_end_stays_until_its_open_writes_have_ended() -> None:
    cluster = make_cluster(num_prefill=2)
    cluster.inject_write_faults(lambda posted: Fault(delay_s=0.5))
    handles = [submit(cluster, prompt(30, first), 4) for first in range(10)]
    cluster.run_until(lambda: cluster.load(P).get("pages_posted", 0) > 0)
    cluster.control.send(GATEWAY, name(cluster, P), Drain())
    cluster.run_for(0.1)
    load = cluster.workers[P].organs.scheduler.load()
    assert load.num_running > 0, "it does not leave while somebody may still read what it sent"
    later = [submit(cluster, prompt(30, first), 4) for first in range(20, 24)]
    settle(cluster)
    assert_right(*handles, *later)
    assert cluster.load("prefill-1").get("calls", 0) >= 4
    assert cluster.workers[P].organs.scheduler.load().num_running == 0


@pytest.mark.behaviour("E19")
def test_a_decode_worker_told_to_end_finishes_its_streams_and_new_ones_go_elsewhere() -> None:
    cluster = make_cluster(num_decode=2)
    handles = [submit(cluster, prompt(40, first), 30) for first in range(6)]
    cluster.run_until(lambda: all(state(cluster, handle) == "running" for handle in handles))
    admitted = cluster.load(D)["admitted"]
    cluster.control.send(GATEWAY, name(cluster, D), Drain())
    later = [submit(cluster, prompt(40, first), 5) for first in range(10, 14)]
    settle(cluster)
    assert_right(*handles, *later)
    assert {handle.error for handle in cluster.handles} == {None}
    assert cluster.load(D)["admitted"] == admitted


@pytest.mark.behaviour("E19")
def test_a_drained_worker_alone_refuses_with_a_typed_error() -> None:
    cluster = make_cluster()
    handle = submit(cluster, prompt(40), 20)
    cluster.run_until(lambda: state(cluster, handle) == "running")
    cluster.control.send(GATEWAY, name(cluster, D), Drain())
    cluster.run_for(0.01)
    late = submit(cluster, prompt(40, 1), remaining_s=3.0)
    settle(cluster)
    assert_right(handle)
    assert late.error in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE)


def test_a_frame_of_tokens_that_the_gateway_refuses_is_made_up_for() -> None:
    cluster = make_cluster()
    seen = 0

    def drop_the_third(sender: str, to: str, message: Message) -> MessageFault:
        nonlocal seen
        seen += isinstance(message, Tokens)
        return MessageFault(0) if isinstance(message, Tokens) and seen == 3 else NO_FAULT

    cluster.inject_message_faults(drop_the_third)
    serve(cluster, prompt(40), 12)
    settle(cluster)


def test_frames_of_tokens_that_are_always_refused_end_the_request_with_an_error_long_before_its_deadline() -> None:
    cluster = make_cluster()
    cluster.inject_message_faults(
        lambda sender, to, message: MessageFault(0) if isinstance(message, Tokens) else NO_FAULT
    )
    handle = submit(cluster, prompt(40), 12, remaining_s=600.0)
    cluster.finish(limit_s=30.0)
    assert handle.error is not None
    settle(cluster)


@pytest.mark.parametrize(("local", "length", "moved"), [(4, 40, 0), (4, 41, 0), (4, 43, 0), (0, 40, 1), (0, 41, 0)])
def test_a_repeated_prompt_moves_nothing_unless_its_last_page_may_not_be_computed_at_home(
    local: int, length: int, moved: int
) -> None:
    cluster = make_cluster(decode={"local_prefill_tokens": local})
    serve(cluster, prompt(length), 1)
    again = serve(cluster, prompt(length), 1)
    assert stats(again).decode_prefix_len == (length - 1) // 4 * 4
    assert pages_moved(cluster, again) == moved
    settle(cluster)
