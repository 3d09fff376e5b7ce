"""A lost connection between two live workers mends by itself; a drain and a flush meet requests in every state."""

import pytest
from test_ends_in_every_state import IN_EVERY_STATE, Scene, brought_into
from worlds import assert_right, make_world, pages_moved, prompt, serve, settle, state, stats, submit

from headstart.core.errors import ErrorCode
from headstart.core.messages import Drain, Flush, Flushed, Message, PrefillDone, Tokens
from headstart.sim.network import FINE, MessageFate
from headstart.sim.worker import GATEWAY
from headstart.sim.world import World
from headstart.transfer.loopback import Fate

P, D = "prefill-0", "decode-0"


def name(world: World, worker: str) -> str:
    return str(world.workers[worker].ref)


def test_case_E5_a_prefill_worker_that_lost_its_connection_to_a_decode_worker_gets_it_back() -> None:
    world = make_world()
    serve(world, prompt(40, first=1))
    world.links.cut(name(world, P), name(world, D))
    world.run_for(0.1)
    first = serve(world, prompt(40, first=2))
    assert pages_moved(world, first) == 0, "computed at home, since the only prefill worker cannot write"
    second = serve(world, prompt(40, first=3))
    assert pages_moved(world, second) == 10
    settle(world)


def test_case_E5_a_connection_lost_in_the_middle_of_a_prompt() -> None:
    world = make_world()
    handle = submit(world, prompt(200), 8)
    world.run_until(lambda: world.load(P).get("pages_posted", 0) >= 8)
    world.links.cut(name(world, P), name(world, D))
    settle(world)
    assert_right(handle)
    assert pages_moved(world, serve(world, prompt(40, first=3))) == 10


def test_case_E8_a_restarted_prefill_worker_serves_again_with_no_other_restart() -> None:
    world = make_world(timing={"restart_s": 0.5})
    handle = submit(world, prompt(200), 8)
    world.run_for(0.1)
    world.kill(P)
    settle(world)
    assert_right(handle)
    world.run_for(2.0)
    assert pages_moved(world, serve(world, prompt(40, first=3))) == 10


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_behaviour_15_what_a_request_cost_is_known_without_waiting_for_done(delay_s: float) -> None:
    world = make_world(num_decode=2)
    serve(world, prompt(60))
    other = next(n for n in ("decode-0", "decode-1") if not world.load(n).get("accepted"))
    world.judge_messages(
        lambda sender, to, message: MessageFate(delay_s=delay_s) if isinstance(message, PrefillDone) else FINE
    )
    world.kill(next(n for n in ("decode-0", "decode-1") if n != other))
    world.run_for(1.0)
    handle = serve(world, prompt(60), 1)
    assert stats(handle).prefill_prefix_len == 56
    assert stats(handle).cached_tokens == 56
    world.run_for(5.0)
    settle(world)


@IN_EVERY_STATE
def test_behaviour_27_and_case_K7_a_flush_is_refused_in_every_state_and_breaks_nothing(
    scene: tuple[Scene, str],
) -> None:
    build, wanted = scene
    world, handle = build(60.0)
    brought_into(wanted, world, handle)
    answers = flush_everything(world)
    assert not answers[D].ok
    world.check()
    settle(world)
    assert_right(*world.handles)
    answers = flush_everything(world)
    assert all(answer.ok for answer in answers.values())
    assert all(worker.organs.cache.counts().cached == 0 for worker in world.workers.values())
    world.check_idle()


def flush_everything(world: World) -> dict[str, Flushed]:
    """What each worker answers to a Flush, by its name."""
    answers: dict[str, Flushed] = {}

    def listen(sender: str, to: str, message: Message) -> MessageFate:
        if isinstance(message, Flushed):
            answers[sender.partition("#")[0]] = message
        return FINE

    world.judge_messages(listen)
    for worker in world.workers.values():
        world.control.send(GATEWAY, str(worker.ref), Flush(7))
    world.run_for(0.005)
    return answers


def test_case_M4_a_prefill_worker_told_to_end_stays_until_its_open_writes_have_ended() -> None:
    world = make_world(num_prefill=2)
    world.judge_writes(lambda posted: Fate(delay_s=0.5))
    handles = [submit(world, prompt(30, first), 4) for first in range(10)]
    world.run_until(lambda: world.load(P).get("pages_posted", 0) > 0)
    world.control.send(GATEWAY, name(world, P), Drain())
    world.run_for(0.1)
    load = world.workers[P].organs.scheduler.load()
    assert load.num_running > 0, "it does not leave while somebody may still read what it sent"
    later = [submit(world, prompt(30, first), 4) for first in range(20, 24)]
    settle(world)
    assert_right(*handles, *later)
    assert world.load("prefill-1").get("calls", 0) >= 4
    assert world.workers[P].organs.scheduler.load().num_running == 0


def test_case_E19_a_decode_worker_told_to_end_finishes_its_streams_and_new_ones_go_elsewhere() -> None:
    world = make_world(num_decode=2)
    handles = [submit(world, prompt(40, first), 30) for first in range(6)]
    world.run_until(lambda: all(state(world, handle) == "running" for handle in handles))
    admitted = world.load(D)["admitted"]
    world.control.send(GATEWAY, name(world, D), Drain())
    later = [submit(world, prompt(40, first), 5) for first in range(10, 14)]
    settle(world)
    assert_right(*handles, *later)
    assert {handle.error for handle in world.handles} == {None}
    assert world.load(D)["admitted"] == admitted


def test_case_E19_a_drained_worker_alone_refuses_with_a_typed_error() -> None:
    world = make_world()
    handle = submit(world, prompt(40), 20)
    world.run_until(lambda: state(world, handle) == "running")
    world.control.send(GATEWAY, name(world, D), Drain())
    world.run_for(0.01)
    late = submit(world, prompt(40, 1), remaining_s=3.0)
    settle(world)
    assert_right(handle)
    assert late.error in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE)


def test_a_frame_of_tokens_that_the_gateway_refuses_is_made_up_for() -> None:
    world = make_world()
    seen = 0

    def drop_the_third(sender: str, to: str, message: Message) -> MessageFate:
        nonlocal seen
        seen += isinstance(message, Tokens)
        return MessageFate(0) if isinstance(message, Tokens) and seen == 3 else FINE

    world.judge_messages(drop_the_third)
    serve(world, prompt(40), 12)
    settle(world)


def test_frames_of_tokens_that_are_always_refused_end_the_request_with_an_error_long_before_its_deadline() -> None:
    world = make_world()
    world.judge_messages(lambda sender, to, message: MessageFate(0) if isinstance(message, Tokens) else FINE)
    handle = submit(world, prompt(40), 12, remaining_s=600.0)
    world.finish(limit_s=30.0)
    assert handle.error is not None
    settle(world)


@pytest.mark.parametrize(("local", "length", "moved"), [(4, 40, 0), (4, 41, 0), (4, 43, 0), (0, 40, 1), (0, 41, 0)])
def test_a_repeated_prompt_moves_nothing_unless_its_last_page_may_not_be_computed_at_home(
    local: int, length: int, moved: int
) -> None:
    world = make_world(decode={"local_prefill_tokens": local})
    serve(world, prompt(length), 1)
    again = serve(world, prompt(length), 1)
    assert stats(again).decode_prefix_len == (length - 1) // 4 * 4
    assert pages_moved(world, again) == moved
    settle(world)
