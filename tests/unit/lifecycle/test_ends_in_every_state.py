"""However a request ends and whatever state it is in, both sides are free within a second, and never under a write."""

from collections.abc import Callable

import pytest
from worlds import assert_right, make_world, prompt, settle, state, submit

from headstart.core.errors import ErrorCode
from headstart.core.messages import Cancel, CancelTicket, Message, PrefillDone, TicketClosed
from headstart.sim.client import Handle
from headstart.sim.network import FINE, MessageFate
from headstart.sim.world import World
from headstart.transfer.loopback import Fate

Scene = Callable[[float], tuple[World, Handle]]
"""deadline -> a world, and the request that will come into the state."""


def waiting_for_pages(deadline_s: float) -> tuple[World, Handle]:
    world = make_world(decode_pages=20)
    submit(world, prompt(60, first=1), 16)
    world.run_for(0.05)
    return world, submit(world, prompt(41), 8, remaining_s=deadline_s)


def waiting_behind_a_leader(deadline_s: float) -> tuple[World, Handle]:
    world = make_world()
    submit(world, prompt(60))
    world.run_for(0.01)
    return world, submit(world, prompt(60), remaining_s=deadline_s)


def preparing(deadline_s: float) -> tuple[World, Handle]:
    world = make_world()
    return world, submit(world, prompt(200), 8, remaining_s=deadline_s)


def preparing_behind_another_prompt(deadline_s: float) -> tuple[World, Handle]:
    world = make_world(decode_pages=120, prefill_pages=80, prefill={"credit_tokens": 1000})
    submit(world, prompt(200, first=1))
    world.run_for(0.01)
    return world, submit(world, prompt(150), 8, remaining_s=deadline_s)


def ready(deadline_s: float) -> tuple[World, Handle]:
    world = make_world(decode={"max_running_requests": 1})
    submit(world, prompt(20, first=1), 60)
    world.run_for(0.1)
    return world, submit(world, prompt(41), 8, remaining_s=deadline_s)


def running(deadline_s: float) -> tuple[World, Handle]:
    world = make_world()
    return world, submit(world, prompt(41), 60, remaining_s=deadline_s)


def running_its_own_prefill(deadline_s: float) -> tuple[World, Handle]:
    world = make_world(num_prefill=0)
    return world, submit(world, prompt(200), 8, remaining_s=deadline_s)


def retracted(deadline_s: float) -> tuple[World, Handle]:
    world = make_world(decode_pages=26, decode={"num_reserved_decode_tokens": 2})
    for first in range(3):
        submit(world, prompt(20) + prompt(4, first), 40)
    return world, submit(world, prompt(20) + prompt(4, 3), 40, remaining_s=deadline_s)


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


def brought_into(name: str, world: World, handle: Handle) -> None:
    world.run_until(lambda: state(world, handle) == name, limit_s=20.0)
    if name == "preparing":
        world.run_for(0.03)
    assert state(world, handle) == name


def assert_free_within_a_second(world: World, handle: Handle) -> None:
    """Nothing of this request is left anywhere; those beside it go on and end right."""
    world.run_for(1.0)
    assert handle.is_done
    assert state(world, handle) == "gone"
    beside = [other for other in world.handles if other is not handle]
    if all(other.is_done for other in beside):
        world.check_idle()
    settle(world)
    assert_right(*beside)


@IN_EVERY_STATE
def test_behaviour_35_and_case_B3_a_disconnect_in_every_state_frees_both_sides(scene: tuple[Scene, str]) -> None:
    build, name = scene
    world, handle = build(60.0)
    brought_into(name, world, handle)
    world.cancel(handle)
    assert handle.error is ErrorCode.CANCELLED
    assert_free_within_a_second(world, handle)


@IN_EVERY_STATE
def test_a_deadline_in_every_state_frees_both_sides(scene: tuple[Scene, str]) -> None:
    """The same world twice: the first run tells when the state is reached."""
    build, name = scene
    world, handle = build(60.0)
    brought_into(name, world, handle)
    reached_s = world.clock.now() - handle.submitted_at
    world, handle = build(reached_s + 1e-5)
    world.run_for(reached_s + 2e-5)
    assert handle.error is ErrorCode.DEADLINE
    assert_free_within_a_second(world, handle)


@IN_EVERY_STATE
def test_a_silent_gateway_frees_both_sides_after_five_seconds(scene: tuple[Scene, str]) -> None:
    build, name = scene
    world, handle = build(60.0)
    brought_into(name, world, handle)
    world.judge_messages(
        lambda sender, recipient, message: MessageFate(0) if "gateway" in (sender, recipient) else FINE
    )
    world.run_for(7.0)
    assert world.is_free()
    world.judge_messages(lambda sender, recipient, message: FINE)
    settle(world)


@IN_EVERY_STATE
def test_a_lost_cancel_costs_time_but_no_page(scene: tuple[Scene, str]) -> None:
    build, name = scene
    world, handle = build(60.0)
    brought_into(name, world, handle)
    lost: list[Message] = []

    def lose_first(sender: str, recipient: str, message: Message) -> MessageFate:
        if (
            isinstance(message, Cancel | CancelTicket | TicketClosed)
            and sum(type(m) is type(message) for m in lost) < 2
        ):
            lost.append(message)
            return MessageFate(0)
        return FINE

    world.judge_messages(lose_first)
    world.cancel(handle)
    world.run_for(5.0)
    settle(world)
    assert_right(*(other for other in world.handles if other is not handle))


def test_behaviour_36_and_case_A1_pages_of_an_aborted_request_are_not_given_away_under_a_live_write() -> None:
    world = make_world(decode_pages=24)
    world.judge_writes(lambda posted: Fate(delay_s=3.0))
    aborted = submit(world, prompt(61), 4)
    world.run_until(lambda: world.links.num_open_writes() > 0)
    world.run_for(0.2)
    world.cancel(aborted)
    world.judge_writes(lambda posted: Fate())
    world.run_for(0.1)
    under_write = world.links.pages_under_write("decode-0#1")
    assert under_write
    canary = submit(world, prompt(40, first=1), 20)
    while world.links.pages_under_write("decode-0#1"):
        world.step()
        world.check()
    world.run_for(0.5)
    counts = world.workers["decode-0"].organs.cache.counts()
    assert counts.inflight == 0
    settle(world)
    assert_right(canary)


def test_case_B8_a_request_aborted_during_its_load_gets_its_pages_back_by_proof_of_the_writers_end() -> None:
    world = make_world()
    world.judge_writes(lambda posted: Fate(delay_s=5.0))
    handle = submit(world, prompt(61), 4)
    world.run_until(lambda: world.links.num_open_writes() > 0)
    world.cancel(handle)
    world.kill("prefill-0")
    world.run_for(1.0)
    assert world.workers["decode-0"].organs.cache.counts().inflight == 0
    world.check()


def test_behaviour_37_killed_prefill_under_load_every_request_finishes_and_a_restarted_one_is_used() -> None:
    world = make_world(num_prefill=1, decode_pages=200)
    handles = [submit(world, prompt(60, first), 8) for first in range(8)]
    world.run_for(0.15)
    world.kill("prefill-0")
    handles += [submit(world, prompt(60, 20 + first), 8) for first in range(4)]
    world.finish()
    assert_right(*handles)
    world.restart("prefill-0")
    world.run_for(1.0)
    later = submit(world, prompt(60, 50), 8)
    settle(world)
    assert_right(later)
    assert world.load("prefill-0")["completed_calls"] == 1


def test_behaviour_37_another_prefill_workers_requests_are_unaffected() -> None:
    world = make_world(num_prefill=2, decode_pages=200)
    handles = [submit(world, prompt(60, first), 8) for first in range(8)]
    world.run_for(0.1)
    world.kill("prefill-1")
    settle(world)
    assert_right(*handles)


def test_behaviour_38_a_killed_decode_worker_costs_its_prefill_worker_nothing() -> None:
    world = make_world(num_decode=2)
    handles = [submit(world, prompt(60, first), 8) for first in range(8)]
    world.run_for(0.1)
    world.kill("decode-1")
    settle(world)
    assert_right(*handles)


@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.1, 0.2, 0.3])
def test_a_decode_worker_that_dies_hands_its_streams_over_without_a_seam(after_s: float) -> None:
    world = make_world(num_decode=2)
    handles = [submit(world, prompt(40, first), 30) for first in range(6)]
    world.run_for(after_s)
    world.kill("decode-0")
    settle(world)
    assert_right(*handles)


def test_a_request_whose_two_workers_died_is_not_tried_on_a_third() -> None:
    world = make_world(num_decode=3)
    killer = submit(world, prompt(40), 200)
    for _ in range(2):
        world.run_until(lambda: state(world, killer) == "running")
        (name,) = [
            n for n, w in world.workers.items() if n.startswith("decode") and w.organs.scheduler.load().num_running
        ]
        world.kill(name)
        world.run_for(0.3)
    assert killer.error is ErrorCode.WORKER_LOST
    settle(world)


def test_behaviour_40_a_prefill_worker_that_never_answers_fails_nothing() -> None:
    world = make_world()
    world.stall("prefill-0")
    handle = submit(world, prompt(60), 8, remaining_s=20.0)
    world.finish()
    assert_right(handle)
    world.resume("prefill-0")
    settle(world)


def test_case_F2_a_hundred_requests_cancelled_at_random_points_four_times() -> None:
    world = make_world(decode_pages=120, prefill_pages=120, decode={"max_queued_requests": 200}, seed=7)
    for round_ in range(4):
        handles = [submit(world, prompt(30, first % 40), 8) for first in range(100)]
        for number, handle in enumerate(handles):
            world.run_for(0.003 * ((number * 7 + round_) % 5))
            if not handle.is_done:
                world.cancel(handle)
        settle(world)
    probe = submit(world, prompt(30, 99))
    settle(world)
    assert_right(probe)


def test_case_B9_done_said_twice_before_its_notices_is_taken_once() -> None:
    world = make_world()
    world.judge_writes(lambda posted: Fate(notice_delay_s=0.2))
    world.judge_messages(lambda sender, to, message: MessageFate(2) if isinstance(message, PrefillDone) else FINE)
    handle = submit(world, prompt(30))
    while not handle.is_done:
        world.step()
        world.check()
    assert_right(handle)
    settle(world)
