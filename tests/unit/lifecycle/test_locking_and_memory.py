"""Pages under pressure: behaviours 17-34, 63, 69-72 and 77-79, failure cases G and K7, over whole clusters.

Not here, with the reason: behaviour 30 (no eviction policy by priority is offered), 33 (health is the HTTP gateway's),
76 (no topology lookup: a prefill worker that does not answer Hello is one that does not exist), G8 (retraction offloads
nothing), G13 and G14 (prefill never preempts, and decode never pulls).
"""

import pytest

from headstart.core.errors import ErrorCode
from headstart.core.messages import WorkerExited
from headstart.core.request import ChoiceRef
from headstart.sim.client import Handle
from headstart.sim.cluster import SimCluster
from headstart.transfer.loopback import Fault, inject_nth
from tests.support.clusters import (
    assert_right,
    make_cluster,
    pages,
    pages_moved,
    prompt,
    serve,
    settle,
    state,
    stats,
    submit,
)


def flush(cluster: SimCluster) -> tuple[bool, int]:
    answers: list[tuple[bool, int]] = []
    cluster.gateway.flush(lambda ok, num_pages: answers.append((ok, num_pages)))
    cluster.run_until(lambda: bool(answers), limit_s=10.0)
    return answers[0]


# ---- locks -----------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("17", "18", "B1")
def test_a_miss_and_a_hit_leave_nothing_locked() -> None:
    cluster = make_cluster()
    for _ in range(2):
        serve(cluster, prompt(41))
        settle(cluster)


@pytest.mark.parametrize("held", [0, 24], ids=["miss", "hit"])
@pytest.mark.parametrize("fault", [Fault(refused=True), Fault(fails=True), Fault(num_notices=0)], ids=str)
@pytest.mark.behaviour("19", "20")
def test_a_failed_transfer_is_repaired_and_leaves_nothing_locked(held: int, fault: Fault) -> None:
    cluster = make_cluster()
    if held:
        serve(cluster, prompt(held), 1)
    cluster.inject_write_faults(lambda posted: fault)
    handle = submit(cluster, prompt(60))
    cluster.run_for(0.3)
    assert pages(cluster).cached + pages(cluster).pinned <= held // 4 + 15
    cluster.finish()
    assert_right(handle)
    assert stats(handle).decode_prefix_len == held
    settle(cluster)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.behaviour("21")
def test_the_same_hit_many_times_does_not_drift(together: bool) -> None:
    cluster = make_cluster()
    serve(cluster, prompt(41))
    before = pages(cluster).cached
    for _ in range(6):
        submit(cluster, prompt(41))
        if not together:
            cluster.finish()
    settle(cluster)
    assert_right(*cluster.handles)
    assert pages(cluster).cached == before


@pytest.mark.behaviour("22")
def test_what_does_not_fit_after_its_match_waits_and_holds_nothing() -> None:
    cluster = make_cluster(decode_pages=20)
    serve(cluster, prompt(25), 1)
    long = submit(cluster, prompt(50, first=1), 20)
    cluster.run_until(lambda: state(cluster, long) == "running")
    waits = submit(cluster, prompt(25) + prompt(12, first=2), 4)
    cluster.run_for(0.05)
    assert state(cluster, waits) == "waiting"
    assert long.finished is None
    cluster.finish()
    assert_right(long, waits)
    settle(cluster)


@pytest.mark.behaviour("23", "B14")
def test_pages_in_use_are_never_evicted() -> None:
    cluster = make_cluster(decode_pages=30)
    serve(cluster, prompt(40), 1)
    pinned = submit(cluster, [*prompt(40), 1], 30)
    cluster.run_until(lambda: state(cluster, pinned) == "running")
    for first in range(1, 9):
        submit(cluster, prompt(24, first), 3)
    settle(cluster)
    assert_right(*cluster.handles)


@pytest.mark.behaviour("24", "C20")
def test_when_eviction_frees_too_little_requests_wait_and_the_worker_lives() -> None:
    cluster = make_cluster(decode_pages=16, decode={"num_reserved_decode_tokens": 4})
    handles = [submit(cluster, prompt(30, first), 16) for first in range(6)]
    settle(cluster)
    assert_right(*handles)


@pytest.mark.behaviour("25", "A13")
def test_twins_insert_one_copy_and_both_finish() -> None:
    cluster = make_cluster()
    twins = [submit(cluster, prompt(30), 24), submit(cluster, prompt(30), 24)]
    settle(cluster)
    assert_right(*twins)
    assert pages(cluster).cached == (30 + 24 - 1) // 4
    assert cluster.load("decode-0")["pages_remapped"] >= 5


@pytest.mark.parametrize("by", ["length", "stop token"])
@pytest.mark.behaviour("26", "I2")
def test_a_request_that_ends_with_its_first_token_takes_one_step(by: str) -> None:
    cluster = make_cluster()
    first_token = serve(cluster, prompt(40), 1).tokens[0]
    steps = cluster.load("decode-0")["steps"]
    if by == "length":
        serve(cluster, prompt(40), 1)
    else:
        stopped = serve(cluster, prompt(40), 9, stop_token_ids=(first_token,))
        assert stopped.tokens == [first_token]
    assert cluster.load("decode-0")["steps"] == steps + 1
    settle(cluster)
    assert pages(cluster).cached == 10


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.behaviour("I1")
def test_exactly_as_many_tokens_as_asked(num_tokens: int) -> None:
    handle = serve(make_cluster(), prompt(20), num_tokens)
    assert len(handle.tokens) == num_tokens
    assert handle.finished is not None
    assert handle.finished.finish_reason == "length"


@pytest.mark.behaviour("58", "I3")
def test_minimum_lengths_and_ignored_stop_ids() -> None:
    cluster = make_cluster()
    plain = serve(cluster, prompt(20), 12)
    stops = tuple(plain.tokens[:2])
    stopped = serve(cluster, prompt(20), 12, stop_token_ids=stops)
    assert stopped.finished is not None
    assert (len(stopped.tokens), stopped.finished.finish_reason) == (1, "stop")
    at_least = serve(cluster, prompt(20), 12, stop_token_ids=stops, min_new_tokens=5)
    assert len(at_least.tokens) >= 5
    assert not set(at_least.tokens[:5]) & set(stops)
    assert serve(cluster, prompt(20), 12).tokens == plain.tokens


@pytest.mark.behaviour("I4")
def test_log_probabilities_are_one_per_token_also_after_a_hit() -> None:
    cluster = make_cluster()
    for _ in range(2):
        handle = serve(cluster, prompt(30), 5, num_top_logprobs=3)
        assert sum(len(delta.logprobs) for delta in handle.deltas) == 5
        assert [len(top) for delta in handle.deltas for top in delta.top_logprobs] == [3] * 5


# ---- flush -----------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("27")
def test_an_idle_flush_empties_every_tree() -> None:
    cluster = make_cluster()
    serve(cluster, prompt(41))
    settle(cluster)
    cached = pages(cluster).cached
    ok, num_pages = flush(cluster)
    assert ok
    assert num_pages >= cached
    assert pages(cluster).cached == 0
    assert stats(serve(cluster, prompt(41))).decode_prefix_len == 0


@pytest.mark.parametrize("when", ["waiting", "preparing", "running"])
@pytest.mark.behaviour("27", "K7")
def test_a_flush_is_refused_in_every_state_of_a_request(when: str) -> None:
    cluster = make_cluster(decode_pages=20)
    if when == "waiting":
        submit(cluster, prompt(60, first=1), 12)
        cluster.run_for(0.05)
    handle = submit(cluster, prompt(41), 20)
    cluster.run_until(lambda: state(cluster, handle) == when)
    assert flush(cluster) == (False, 0)
    settle(cluster)
    assert_right(*cluster.handles)


# ---- retraction ------------------------------------------------------------------------------------------------------


def pressed(cluster: SimCluster, num_requests: int = 4, num_tokens: int = 40) -> list[Handle]:
    """Requests that grow far beyond what the pool holds together."""
    return [submit(cluster, prompt(20) + prompt(4, first), num_tokens) for first in range(num_requests)]


SMALL = {"decode_pages": 26, "decode": {"num_reserved_decode_tokens": 2}}


@pytest.mark.behaviour("28", "G8", "G10")
def test_retracted_requests_resume_with_the_same_output() -> None:
    cluster = make_cluster(**SMALL)
    handles = pressed(cluster)
    settle(cluster)
    assert_right(*handles)
    assert sum(stats(handle).num_retractions for handle in handles) >= 2


@pytest.mark.behaviour("B15")
def test_many_retractions_of_one_request_leave_no_lock() -> None:
    cluster = make_cluster(decode_pages=26, decode={"num_reserved_decode_tokens": 0})
    handles = pressed(cluster, 6, 60)
    settle(cluster)
    assert_right(*handles)
    assert max(stats(handle).num_retractions for handle in handles) >= 2


@pytest.mark.behaviour("29", "B4")
def test_a_retracted_request_that_is_cancelled_is_gone() -> None:
    cluster = make_cluster(**SMALL)
    handles = pressed(cluster)
    cluster.run_until(lambda: any(state(cluster, handle) == "retracted" for handle in handles))
    retracted = next(handle for handle in handles if state(cluster, handle) == "retracted")
    cluster.cancel(retracted)
    settle(cluster)
    assert retracted.error is ErrorCode.CANCELLED
    assert_right(*(handle for handle in handles if handle is not retracted))


@pytest.mark.behaviour("31")
def test_a_prompt_whose_own_prefix_fills_the_pool_is_admitted_by_reuse() -> None:
    cluster = make_cluster(decode_pages=13)
    serve(cluster, prompt(41), 8)
    assert stats(serve(cluster, prompt(41), 8)).decode_prefix_len == 40
    settle(cluster)


@pytest.mark.behaviour("34")
def test_idle_after_traffic_nothing_leaks_and_all_is_well() -> None:
    cluster = make_cluster()
    for first in range(8):
        submit(cluster, prompt(30, first))
    cluster.finish()
    cluster.run_for(5.0)
    cluster.check_idle()
    serve(cluster, prompt(30))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.behaviour("63")
def test_a_working_set_far_beyond_the_pool_is_served_under_constant_eviction(seed: int) -> None:
    cluster = make_cluster(seed=seed, decode_pages=60, prefill_pages=60, decode={"max_queued_requests": 200})
    handles = [submit(cluster, prompt(24, group % 16) + prompt(6, group), 6) for group in range(128)]
    settle(cluster)
    assert_right(*handles)


# ---- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 8, 9, 24, 25])
@pytest.mark.behaviour("69", "70")
def test_a_hit_is_admitted_wherever_a_miss_is(length: int) -> None:
    """The pool holds exactly one request: whoever was admitted cold is admitted again by reuse, alone or not."""
    num_pages = -(-(length + 8 - 1) // 4)
    cluster = make_cluster(decode_pages=num_pages)
    for _ in range(3):
        serve(cluster, prompt(length), 8)
        serve(cluster, prompt(length // 2) + prompt(length - length // 2, first=3), 8)
    settle(cluster)


@pytest.mark.behaviour("71", "72")
def test_a_pool_of_just_the_charged_pages_holds_the_request_and_one_page_less_refuses_it() -> None:
    enough = make_cluster(page_size=16, decode_pages=3, prefill_pages=8, decode={"num_reserved_decode_tokens": 34})
    serve(enough, prompt(14), 35)
    settle(enough)
    short = make_cluster(page_size=16, decode_pages=2, prefill_pages=8, decode={"num_reserved_decode_tokens": 34})
    handle = submit(short, prompt(14), 35)
    short.finish()
    assert handle.error is ErrorCode.TOO_LONG


@pytest.mark.behaviour("77")
def test_many_prompts_admitted_in_one_pass_share_no_slot() -> None:
    cluster = make_cluster(decode_pages=200, prefill_pages=200)
    handles = [submit(cluster, prompt(17, first), 8) for first in range(16)]
    settle(cluster)
    assert_right(*handles)


@pytest.mark.behaviour("78")
def test_an_old_long_request_is_not_starved_by_short_ones() -> None:
    cluster = make_cluster(decode_pages=40)
    running = [submit(cluster, prompt(16, first), 30) for first in range(4)]
    cluster.run_for(0.1)
    long = submit(cluster, prompt(100, first=9), 8)
    for first in range(300):
        submit(cluster, prompt(12, first), 4)
        cluster.run_for(0.02)
        if long.is_done:
            break
    assert_right(long)
    settle(cluster)
    assert_right(*running)


@pytest.mark.behaviour("79")
def test_a_twin_that_arrives_mid_transfer_waits_for_pages_that_have_landed() -> None:
    cluster = make_cluster()
    cluster.inject_write_faults(inject_nth({0: Fault(delay_s=0.5)}))
    leader = submit(cluster, prompt(60))
    cluster.run_until(lambda: state(cluster, leader) == "preparing")
    follower = submit(cluster, prompt(60))
    cluster.run_for(0.2)
    assert not follower.tokens
    settle(cluster)
    assert_right(leader, follower)
    assert cluster.load("decode-0")["pages_moved"] <= 15 + 1


@pytest.mark.parametrize("end", ["cancelled", "killed", "failed"])
@pytest.mark.behaviour("79")
def test_a_leader_that_fails_does_not_poison_its_followers(end: str) -> None:
    cluster = make_cluster(timing={"restart_s": 0.1})
    cluster.inject_write_faults(inject_nth({1: Fault(fails=True)} if end == "failed" else {1: Fault(delay_s=0.5)}))
    leader = submit(cluster, prompt(60))
    followers = [submit(cluster, prompt(60)) for _ in range(3)]
    cluster.run_until(lambda: state(cluster, leader) == "preparing")
    cluster.run_for(0.02)
    if end == "cancelled":
        cluster.cancel(leader)
    elif end == "killed":
        cluster.kill("prefill-0")
    settle(cluster)
    assert_right(*followers, *([] if end == "cancelled" else [leader]))


# ---- group G ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "fits"), [(247, True), (248, True), (249, False), (400, False)])
@pytest.mark.behaviour("51", "G1")
def test_a_request_beyond_the_context_is_refused_before_any_page_moves(length: int, fits: bool) -> None:
    cluster = make_cluster(decode_pages=80, prefill_pages=80)
    handle = submit(cluster, prompt(length), 8)
    cluster.finish()
    assert (handle.error is None) == fits
    assert fits or handle.error is ErrorCode.TOO_LONG
    assert fits or cluster.load("prefill-0").get("pages_posted", 0) == 0


@pytest.mark.behaviour("G1")
def test_a_prompt_that_no_prefill_worker_can_hold_is_computed_by_the_decode_worker() -> None:
    cluster = make_cluster(prefill={"capacity_tokens": 50})
    handle = serve(cluster, prompt(120))
    assert pages_moved(cluster, handle) == 0


@pytest.mark.behaviour("G2", "G3")
def test_outputs_ten_times_longer_than_reserved_make_progress_every_second() -> None:
    cluster = make_cluster(decode_pages=60, decode={"num_reserved_decode_tokens": 8})
    handles = [submit(cluster, prompt(20, first), 80) for first in range(12)]
    seen = 0
    while not all(handle.is_done for handle in handles):
        cluster.run_for(1.0)
        now = sum(len(handle.tokens) for handle in handles)
        assert now > seen or all(handle.is_done for handle in handles)
        seen = now
    assert_right(*handles)
    settle(cluster)


@pytest.mark.behaviour("G5")
def test_room_for_two_and_twenty_at_a_time() -> None:
    cluster = make_cluster(decode_pages=20, prefill_pages=20)
    for batch in range(10):
        for first in range(20):
            submit(cluster, prompt(26, 20 * batch + first), 5)
        cluster.finish()
    settle(cluster)
    assert_right(*cluster.handles)


def worst_ttft(num_long: int) -> float:
    """Of 60 short requests that arrive over a second, behind `num_long` of 200 tokens, in a pool of 320."""
    cluster = make_cluster(decode_pages=80, prefill_pages=80, prefill={"credit_tokens": 4 * 256})
    for first in range(num_long):
        submit(cluster, prompt(200, first), 8)
    short = []
    for first in range(60):
        short.append(submit(cluster, prompt(12, 10 + first), 4))
        cluster.run_for(1 / 60)
    settle(cluster)
    assert_right(*cluster.handles)
    return sorted(handle.ttft_s or 0.0 for handle in short)[-1]


@pytest.mark.behaviour("G6")
def test_long_prompts_do_not_keep_short_ones_out() -> None:
    """Most of each prefill step is theirs, and pages are not leased for long prompts that have to wait for another."""
    assert worst_ttft(4) <= 3 * worst_ttft(0)


@pytest.mark.behaviour("G7")
def test_a_lone_request_that_outgrows_the_pool_ends_alone_with_a_typed_error() -> None:
    cluster = make_cluster(decode_pages=20)
    alone = submit(cluster, prompt(40), 100)
    other = submit(cluster, prompt(12, first=1), 8)
    settle(cluster)
    assert alone.error is ErrorCode.TOO_LONG
    assert_right(other)


@pytest.mark.behaviour("G12")
def test_a_request_whose_kv_arrives_when_the_pool_is_exactly_full_waits_with_its_state() -> None:
    cluster = make_cluster(decode_pages=21, decode={"num_reserved_decode_tokens": 0})
    old = submit(cluster, prompt(40), 30)
    cluster.run_until(lambda: state(cluster, old) == "running")
    arrived = submit(cluster, prompt(40, first=1), 6)
    settle(cluster)
    assert_right(old, arrived)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 53])
@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.behaviour("G16")
def test_every_prompt_length_around_page_and_chunk(length: int, num_prefill: int) -> None:
    cluster = make_cluster(num_prefill=num_prefill)
    serve(cluster, prompt(length))
    settle(cluster)


@pytest.mark.behaviour("G16")
def test_an_empty_prompt_is_refused() -> None:
    cluster = make_cluster()
    handle = submit(cluster, [])
    cluster.finish()
    assert handle.error is ErrorCode.INVALID


# ---- siblings --------------------------------------------------------------------------------------------------------


@pytest.mark.behaviour("I5")
def test_four_choices_survive_a_failed_transfer_and_prefill_the_prompt_once() -> None:
    cluster = make_cluster()
    cluster.inject_write_faults(inject_nth({1: Fault(fails=True)}))
    siblings = [submit(cluster, prompt(60), ref=ChoiceRef("n", choice)) for choice in range(4)]
    settle(cluster)
    assert_right(*siblings)
    load = cluster.load("prefill-0")
    assert load["tokens_computed"] <= 59 + 59


@pytest.mark.behaviour("I5")
def test_four_choices_move_the_shared_prompt_once() -> None:
    cluster = make_cluster()
    siblings = [submit(cluster, prompt(60), ref=ChoiceRef("n", choice)) for choice in range(4)]
    settle(cluster)
    assert_right(*siblings)
    assert cluster.load("decode-0")["pages_moved"] <= 15 + 3
    assert cluster.load("prefill-0")["tokens_computed"] <= 59 + 3 * 3


def test_a_stranger_cannot_declare_a_worker_dead() -> None:
    cluster = make_cluster()
    handle = submit(cluster, prompt(40), 20)
    cluster.run_for(0.05)
    cluster.control.send("decode-0#1", "gateway", WorkerExited(cluster.workers["prefill-0"].ref, 0))
    cluster.finish()
    assert_right(handle)
