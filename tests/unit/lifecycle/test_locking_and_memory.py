"""Pages under pressure: behaviours 17-34, 63, 69-72 and 77-79, failure cases G and K7, over whole worlds.

Not here, with the reason: behaviour 30 (no eviction policy by priority is offered), 33 (health is the HTTP gateway's),
76 (no topology lookup: a prefill worker that does not answer Hello is one that does not exist), G8 (retraction offloads
nothing), G13 and G14 (prefill never preempts, and decode never pulls).
"""

import pytest
from worlds import assert_right, make_world, pages, pages_moved, prompt, serve, settle, state, stats, submit

from headstart.core.errors import ErrorCode
from headstart.core.messages import WorkerExited
from headstart.core.request import ChoiceRef
from headstart.sim.client import Handle
from headstart.sim.world import World
from headstart.transfer.loopback import Fate, judge_nth


def flush(world: World) -> tuple[bool, int]:
    answers: list[tuple[bool, int]] = []
    world.gateway.flush(lambda ok, num_pages: answers.append((ok, num_pages)))
    world.run_until(lambda: bool(answers), limit_s=10.0)
    return answers[0]


# ---- locks -----------------------------------------------------------------------------------------------------------


def test_behaviour_17_and_18_and_case_B1_a_miss_and_a_hit_leave_nothing_locked() -> None:
    world = make_world()
    for _ in range(2):
        serve(world, prompt(41))
        settle(world)


@pytest.mark.parametrize("held", [0, 24], ids=["miss", "hit"])
@pytest.mark.parametrize("fate", [Fate(refused=True), Fate(fails=True), Fate(num_notices=0)], ids=str)
def test_behaviour_19_and_20_a_failed_transfer_is_repaired_and_leaves_nothing_locked(held: int, fate: Fate) -> None:
    world = make_world()
    if held:
        serve(world, prompt(held), 1)
    world.judge_writes(lambda posted: fate)
    handle = submit(world, prompt(60))
    world.run_for(0.3)
    assert pages(world).cached + pages(world).pinned <= held // 4 + 15
    world.finish()
    assert_right(handle)
    assert stats(handle).decode_prefix_len == held
    settle(world)


@pytest.mark.parametrize("together", [False, True])
def test_behaviour_21_the_same_hit_many_times_does_not_drift(together: bool) -> None:
    world = make_world()
    serve(world, prompt(41))
    before = pages(world).cached
    for _ in range(6):
        submit(world, prompt(41))
        if not together:
            world.finish()
    settle(world)
    assert_right(*world.handles)
    assert pages(world).cached == before


def test_behaviour_22_what_does_not_fit_after_its_match_waits_and_holds_nothing() -> None:
    world = make_world(decode_pages=20)
    serve(world, prompt(25), 1)
    long = submit(world, prompt(50, first=1), 20)
    world.run_until(lambda: state(world, long) == "running")
    waits = submit(world, prompt(25) + prompt(12, first=2), 4)
    world.run_for(0.05)
    assert state(world, waits) == "waiting"
    assert long.finished is None
    world.finish()
    assert_right(long, waits)
    settle(world)


def test_behaviour_23_and_case_B14_pages_in_use_are_never_evicted() -> None:
    world = make_world(decode_pages=30)
    serve(world, prompt(40), 1)
    pinned = submit(world, [*prompt(40), 1], 30)
    world.run_until(lambda: state(world, pinned) == "running")
    for first in range(1, 9):
        submit(world, prompt(24, first), 3)
    settle(world)
    assert_right(*world.handles)


def test_behaviour_24_and_case_C20_when_eviction_frees_too_little_requests_wait_and_the_worker_lives() -> None:
    world = make_world(decode_pages=16, decode={"num_reserved_decode_tokens": 4})
    handles = [submit(world, prompt(30, first), 16) for first in range(6)]
    settle(world)
    assert_right(*handles)


def test_behaviour_25_and_case_A13_twins_insert_one_copy_and_both_finish() -> None:
    world = make_world()
    twins = [submit(world, prompt(30), 24), submit(world, prompt(30), 24)]
    settle(world)
    assert_right(*twins)
    assert pages(world).cached == (30 + 24 - 1) // 4
    assert world.load("decode-0")["pages_remapped"] >= 5


@pytest.mark.parametrize("by", ["length", "stop token"])
def test_behaviour_26_and_case_I2_a_request_that_ends_with_its_first_token_takes_one_step(by: str) -> None:
    world = make_world()
    first_token = serve(world, prompt(40), 1).tokens[0]
    steps = world.load("decode-0")["steps"]
    if by == "length":
        serve(world, prompt(40), 1)
    else:
        stopped = serve(world, prompt(40), 9, stop_token_ids=(first_token,))
        assert stopped.tokens == [first_token]
    assert world.load("decode-0")["steps"] == steps + 1
    settle(world)
    assert pages(world).cached == 10


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_case_I1_exactly_as_many_tokens_as_asked(num_tokens: int) -> None:
    handle = serve(make_world(), prompt(20), num_tokens)
    assert len(handle.tokens) == num_tokens
    assert handle.finished is not None
    assert handle.finished.finish_reason == "length"


def test_case_I3_and_behaviour_58_minimum_lengths_and_ignored_stop_ids() -> None:
    world = make_world()
    plain = serve(world, prompt(20), 12)
    stops = tuple(plain.tokens[:2])
    stopped = serve(world, prompt(20), 12, stop_token_ids=stops)
    assert stopped.finished is not None
    assert (len(stopped.tokens), stopped.finished.finish_reason) == (1, "stop")
    at_least = serve(world, prompt(20), 12, stop_token_ids=stops, min_new_tokens=5)
    assert len(at_least.tokens) >= 5
    assert not set(at_least.tokens[:5]) & set(stops)
    assert serve(world, prompt(20), 12).tokens == plain.tokens


def test_case_I4_log_probabilities_are_one_per_token_also_after_a_hit() -> None:
    world = make_world()
    for _ in range(2):
        handle = serve(world, prompt(30), 5, num_top_logprobs=3)
        assert sum(len(delta.logprobs) for delta in handle.deltas) == 5
        assert [len(top) for delta in handle.deltas for top in delta.top_logprobs] == [3] * 5


# ---- flush -----------------------------------------------------------------------------------------------------------


def test_behaviour_27_an_idle_flush_empties_every_tree() -> None:
    world = make_world()
    serve(world, prompt(41))
    settle(world)
    cached = pages(world).cached
    ok, num_pages = flush(world)
    assert ok
    assert num_pages >= cached
    assert pages(world).cached == 0
    assert stats(serve(world, prompt(41))).decode_prefix_len == 0


@pytest.mark.parametrize("when", ["waiting", "preparing", "running"])
def test_behaviour_27_and_case_K7_a_flush_is_refused_in_every_state_of_a_request(when: str) -> None:
    world = make_world(decode_pages=20)
    if when == "waiting":
        submit(world, prompt(60, first=1), 12)
        world.run_for(0.05)
    handle = submit(world, prompt(41), 20)
    world.run_until(lambda: state(world, handle) == when)
    assert flush(world) == (False, 0)
    settle(world)
    assert_right(*world.handles)


# ---- retraction ------------------------------------------------------------------------------------------------------


def pressed(world: World, num_requests: int = 4, num_tokens: int = 40) -> list[Handle]:
    """Requests that grow far beyond what the pool holds together."""
    return [submit(world, prompt(20) + prompt(4, first), num_tokens) for first in range(num_requests)]


SMALL = {"decode_pages": 26, "decode": {"num_reserved_decode_tokens": 2}}


def test_behaviour_28_and_case_G10_retracted_requests_resume_with_the_same_output() -> None:
    world = make_world(**SMALL)
    handles = pressed(world)
    settle(world)
    assert_right(*handles)
    assert sum(stats(handle).num_retractions for handle in handles) >= 2


def test_case_B15_many_retractions_of_one_request_leave_no_lock() -> None:
    world = make_world(decode_pages=26, decode={"num_reserved_decode_tokens": 0})
    handles = pressed(world, 6, 60)
    settle(world)
    assert_right(*handles)
    assert max(stats(handle).num_retractions for handle in handles) >= 2


def test_behaviour_29_and_case_B4_a_retracted_request_that_is_cancelled_is_gone() -> None:
    world = make_world(**SMALL)
    handles = pressed(world)
    world.run_until(lambda: any(state(world, handle) == "retracted" for handle in handles))
    retracted = next(handle for handle in handles if state(world, handle) == "retracted")
    world.cancel(retracted)
    settle(world)
    assert retracted.error is ErrorCode.CANCELLED
    assert_right(*(handle for handle in handles if handle is not retracted))


def test_behaviour_31_a_prompt_whose_own_prefix_fills_the_pool_is_admitted_by_reuse() -> None:
    world = make_world(decode_pages=13)
    serve(world, prompt(41), 8)
    assert stats(serve(world, prompt(41), 8)).decode_prefix_len == 40
    settle(world)


def test_behaviour_34_idle_after_traffic_nothing_leaks_and_all_is_well() -> None:
    world = make_world()
    for first in range(8):
        submit(world, prompt(30, first))
    world.finish()
    world.run_for(5.0)
    world.check_idle()
    serve(world, prompt(30))


@pytest.mark.parametrize("seed", range(3))
def test_behaviour_63_a_working_set_far_beyond_the_pool_is_served_under_constant_eviction(seed: int) -> None:
    world = make_world(seed=seed, decode_pages=60, prefill_pages=60, decode={"max_queued_requests": 200})
    handles = [submit(world, prompt(24, group % 16) + prompt(6, group), 6) for group in range(128)]
    settle(world)
    assert_right(*handles)


# ---- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 8, 9, 24, 25])
def test_behaviour_69_and_70_a_hit_is_admitted_wherever_a_miss_is(length: int) -> None:
    """The pool holds exactly one request: whoever was admitted cold is admitted again by reuse, alone or not."""
    num_pages = -(-(length + 8 - 1) // 4)
    world = make_world(decode_pages=num_pages)
    for _ in range(3):
        serve(world, prompt(length), 8)
        serve(world, prompt(length // 2) + prompt(length - length // 2, first=3), 8)
    settle(world)


def test_behaviour_71_and_72_a_pool_of_just_the_charged_pages_holds_the_request_and_one_page_less_refuses_it() -> None:
    enough = make_world(page_size=16, decode_pages=3, prefill_pages=8, decode={"num_reserved_decode_tokens": 34})
    serve(enough, prompt(14), 35)
    settle(enough)
    short = make_world(page_size=16, decode_pages=2, prefill_pages=8, decode={"num_reserved_decode_tokens": 34})
    handle = submit(short, prompt(14), 35)
    short.finish()
    assert handle.error is ErrorCode.TOO_LONG


def test_behaviour_77_many_prompts_admitted_in_one_pass_share_no_slot() -> None:
    world = make_world(decode_pages=200, prefill_pages=200)
    handles = [submit(world, prompt(17, first), 8) for first in range(16)]
    settle(world)
    assert_right(*handles)


def test_behaviour_78_an_old_long_request_is_not_starved_by_short_ones() -> None:
    world = make_world(decode_pages=40)
    running = [submit(world, prompt(16, first), 30) for first in range(4)]
    world.run_for(0.1)
    long = submit(world, prompt(100, first=9), 8)
    for first in range(300):
        submit(world, prompt(12, first), 4)
        world.run_for(0.02)
        if long.is_done:
            break
    assert_right(long)
    settle(world)
    assert_right(*running)


def test_behaviour_79_a_twin_that_arrives_mid_transfer_waits_for_pages_that_have_landed() -> None:
    world = make_world()
    world.judge_writes(judge_nth({0: Fate(delay_s=0.5)}))
    leader = submit(world, prompt(60))
    world.run_until(lambda: state(world, leader) == "preparing")
    follower = submit(world, prompt(60))
    world.run_for(0.2)
    assert not follower.tokens
    settle(world)
    assert_right(leader, follower)
    assert world.load("decode-0")["pages_moved"] <= 15 + 1


@pytest.mark.parametrize("end", ["cancelled", "killed", "failed"])
def test_behaviour_79_a_leader_that_fails_does_not_poison_its_followers(end: str) -> None:
    world = make_world(timing={"restart_s": 0.1})
    world.judge_writes(judge_nth({1: Fate(fails=True)} if end == "failed" else {1: Fate(delay_s=0.5)}))
    leader = submit(world, prompt(60))
    followers = [submit(world, prompt(60)) for _ in range(3)]
    world.run_until(lambda: state(world, leader) == "preparing")
    world.run_for(0.02)
    if end == "cancelled":
        world.cancel(leader)
    elif end == "killed":
        world.kill("prefill-0")
    settle(world)
    assert_right(*followers, *([] if end == "cancelled" else [leader]))


# ---- group G ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "fits"), [(247, True), (248, True), (249, False), (400, False)])
def test_case_G1_a_request_beyond_the_context_is_refused_before_any_page_moves(length: int, fits: bool) -> None:
    world = make_world(decode_pages=80, prefill_pages=80)
    handle = submit(world, prompt(length), 8)
    world.finish()
    assert (handle.error is None) == fits
    assert fits or handle.error is ErrorCode.TOO_LONG
    assert fits or world.load("prefill-0").get("pages_posted", 0) == 0


def test_case_G1_a_prompt_that_no_prefill_worker_can_hold_is_computed_by_the_decode_worker() -> None:
    world = make_world(prefill={"capacity_tokens": 50})
    handle = serve(world, prompt(120))
    assert pages_moved(world, handle) == 0


def test_case_G2_and_G3_outputs_ten_times_longer_than_reserved_make_progress_every_second() -> None:
    world = make_world(decode_pages=60, decode={"num_reserved_decode_tokens": 8})
    handles = [submit(world, prompt(20, first), 80) for first in range(12)]
    seen = 0
    while not all(handle.is_done for handle in handles):
        world.run_for(1.0)
        now = sum(len(handle.tokens) for handle in handles)
        assert now > seen or all(handle.is_done for handle in handles)
        seen = now
    assert_right(*handles)
    settle(world)


def test_case_G5_room_for_two_and_twenty_at_a_time() -> None:
    world = make_world(decode_pages=20, prefill_pages=20)
    for batch in range(10):
        for first in range(20):
            submit(world, prompt(26, 20 * batch + first), 5)
        world.finish()
    settle(world)
    assert_right(*world.handles)


def worst_ttft(num_long: int) -> float:
    """Of 60 short requests that arrive over a second, behind `num_long` of 200 tokens, in a pool of 320."""
    world = make_world(decode_pages=80, prefill_pages=80, prefill={"credit_tokens": 4 * 256})
    for first in range(num_long):
        submit(world, prompt(200, first), 8)
    short = []
    for first in range(60):
        short.append(submit(world, prompt(12, 10 + first), 4))
        world.run_for(1 / 60)
    settle(world)
    assert_right(*world.handles)
    return sorted(handle.ttft_s or 0.0 for handle in short)[-1]


def test_case_G6_long_prompts_do_not_keep_short_ones_out() -> None:
    """Most of each prefill step is theirs, and pages are not leased for long prompts that have to wait for another."""
    assert worst_ttft(4) <= 3 * worst_ttft(0)


def test_case_G7_a_lone_request_that_outgrows_the_pool_ends_alone_with_a_typed_error() -> None:
    world = make_world(decode_pages=20)
    alone = submit(world, prompt(40), 100)
    other = submit(world, prompt(12, first=1), 8)
    settle(world)
    assert alone.error is ErrorCode.TOO_LONG
    assert_right(other)


def test_case_G12_a_request_whose_kv_arrives_when_the_pool_is_exactly_full_waits_with_its_state() -> None:
    world = make_world(decode_pages=21, decode={"num_reserved_decode_tokens": 0})
    old = submit(world, prompt(40), 30)
    world.run_until(lambda: state(world, old) == "running")
    arrived = submit(world, prompt(40, first=1), 6)
    settle(world)
    assert_right(old, arrived)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 53])
@pytest.mark.parametrize("num_prefill", [0, 1])
def test_case_G16_every_prompt_length_around_page_and_chunk(length: int, num_prefill: int) -> None:
    world = make_world(num_prefill=num_prefill)
    serve(world, prompt(length))
    settle(world)


def test_case_G16_an_empty_prompt_is_refused() -> None:
    world = make_world()
    handle = submit(world, [])
    world.finish()
    assert handle.error is ErrorCode.INVALID


# ---- siblings --------------------------------------------------------------------------------------------------------


def test_case_I5_four_choices_survive_a_failed_transfer_and_prefill_the_prompt_once() -> None:
    world = make_world()
    world.judge_writes(judge_nth({1: Fate(fails=True)}))
    siblings = [submit(world, prompt(60), ref=ChoiceRef("n", choice)) for choice in range(4)]
    settle(world)
    assert_right(*siblings)
    load = world.load("prefill-0")
    assert load["tokens_computed"] <= 59 + 59


def test_case_I5_four_choices_move_the_shared_prompt_once() -> None:
    world = make_world()
    siblings = [submit(world, prompt(60), ref=ChoiceRef("n", choice)) for choice in range(4)]
    settle(world)
    assert_right(*siblings)
    assert world.load("decode-0")["pages_moved"] <= 15 + 3
    assert world.load("prefill-0")["tokens_computed"] <= 59 + 3 * 3


def test_a_stranger_cannot_declare_a_worker_dead() -> None:
    world = make_world()
    handle = submit(world, prompt(40), 20)
    world.run_for(0.05)
    world.control.send("decode-0#1", "gateway", WorkerExited(world.workers["prefill-0"].ref, 0))
    world.finish()
    assert_right(handle)
