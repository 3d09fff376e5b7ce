"""Who gets in, what it is charged, who overtakes whom, and who waits for a leader."""

import pytest
from decode_rig import P0, P1, Rig
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.arrays import int32_array
from headstart.core.errors import ErrorCode
from headstart.core.identity import cache_namespace
from headstart.core.layout import pages_for
from headstart.core.messages import PrefillFailed, Rejected
from headstart.scheduler.decode.waiting import pages_in_reserve, pages_to_lease
from headstart.scheduler.limits import MAX_BYPASSED


def charge(prompt_len: int, hit_len: int, reserve: int, page_size: int, max_len: int = 1 << 20) -> int:
    lease = pages_to_lease(prompt_len, hit_len // page_size, page_size)
    held = hit_len // page_size + lease
    return lease + pages_in_reserve(prompt_len, max_len, reserve, held, page_size)


@pytest.mark.parametrize(
    ("prompt_len", "hit_len", "tokens"), [(14, 0, 14 + 34), (32, 0, 32 + 34), (2064, 2048, 16 + 34)]
)
def test_behaviour_71_the_tail_of_the_last_page_counts_towards_the_reserve(prompt_len: int, hit_len: int, tokens: int):
    assert charge(prompt_len, hit_len, reserve=34, page_size=16) == pages_for(tokens, 16)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 100), st.sampled_from([1, 16, 64]), st.integers(1, 200))
def test_behaviour_69_a_hit_is_never_charged_more_than_a_miss(
    prompt_len: int, hit: int, reserve: int, page_size: int, max_new: int
):
    hit_len = min(hit, prompt_len - 1) // page_size * page_size
    max_len = prompt_len + max_new
    as_hit = charge(prompt_len, hit_len, reserve, page_size, max_len)
    as_miss = charge(prompt_len, 0, reserve, page_size, max_len)
    assert 0 < as_hit + hit_len // page_size == as_miss <= pages_for(max(prompt_len, max_len - 1), page_size)


def test_behaviour_70_a_hit_fits_wherever_a_miss_would():
    rig = Rig(num_pages=6, chunked_prefill_size=100)
    rig.submit("a", range(20), 1)
    rig.run()
    assert rig.cache.counts().cached == 5
    ref = rig.submit("b", range(20), 4)
    rig.run()
    assert rig.stats(ref).decode_prefix_len == 16


def test_behaviour_72_what_is_charged_is_what_is_taken():
    rig = Rig(num_pages=64, page_size=16, num_reserved_decode_tokens=34)
    rig.connect(P0)
    before = rig.cache.num_available()
    rig.submit("a", range(14), 100)
    rig.step()
    board = rig.scheduler.queues
    assert before - (rig.cache.num_available() - board.reserved()) == charge(14, 0, 34, 16)


def test_behaviour_22_who_does_not_fit_waits_and_holds_nothing_until_memory_frees():
    rig = Rig(num_pages=8)
    rig.connect(P0)
    first = rig.submit("first", range(24), 2)
    rig.step()
    second = rig.submit("second", range(500, 520), 2)
    rig.step()
    assert len(rig.calls()) == 1
    assert rig.cache.counts().inflight == 6, "the second holds no page"
    rig.serve(rig.calls()[0])
    rig.run()
    assert rig.finished(first)
    rig.serve(rig.calls()[1])
    rig.run()
    assert rig.finished(second)
    assert rig.is_clean()


def test_behaviour_31_the_only_room_is_taken_by_its_own_prefix():
    rig = Rig(num_pages=6, chunked_prefill_size=100)
    rig.submit("a", range(21), 1)
    rig.run()
    assert (rig.cache.counts().cached, rig.cache.counts().free) == (5, 1)
    ref = rig.submit("b", range(21), 3)
    rig.run()
    assert rig.stats(ref).decode_prefix_len == 20


def test_future_growth_of_the_admitted_is_counted():
    rig = Rig(num_pages=8, num_reserved_decode_tokens=8, chunked_prefill_size=100)
    a, b = rig.submit("a", range(12), 9), rig.submit("b", range(100, 112), 9)
    rig.step()
    assert len(rig.batches[-1].rows) == 1, "both prompts fit, their outputs do not"
    rig.run()
    assert rig.finished(a).stats.num_retractions == rig.finished(b).stats.num_retractions == 0


def test_small_ones_pass_an_oversized_head_of_line():
    rig = Rig(num_pages=16)
    rig.connect(P0)
    rig.submit("holder", range(20), 2)
    rig.step()
    big = rig.submit("big", range(100, 156), 2)
    small = rig.submit("small", range(300, 304), 2)
    rig.step()
    assert [len(call.tokens) for call in rig.calls()] == [19, 3]
    for call in rig.calls():
        rig.serve(call)
    rig.run()
    assert rig.finished(small)
    rig.serve(rig.calls()[-1])
    rig.run()
    assert rig.finished(big)


def test_behaviour_78_a_stream_of_small_ones_does_not_starve_a_big_one():
    rig = Rig(num_pages=16, chunked_prefill_size=1000, max_queued_requests=1000)
    rig.submit("holder", range(8), 8)
    big = rig.submit("big", range(100, 158), 2)
    number = 0
    while rig.terminal(big) is None:
        number += 1
        rig.submit(f"small{number}", [200 + number % 700] * 6, 6)
        rig.step()
        assert number < 40 * MAX_BYPASSED
    rig.run(5000)
    assert rig.is_clean()


def test_behaviour_79_an_identical_prompt_waits_for_the_one_that_is_being_fetched():
    rig = Rig()
    rig.connect(P0)
    leader, follower = rig.submit("a", range(43), 2), rig.submit("b", range(43), 2)
    rig.step()
    (call,) = rig.calls()
    rig.notice(call, 0, 5)
    rig.step()
    assert len(rig.calls()) == 1
    rig.notice(call, 5, 6)
    rig.step()
    assert rig.calls()[1].start == 40, "it matches what was committed, and fetches its own tail"
    rig.serve(rig.calls()[1])
    rig.run()
    assert rig.answer(leader) == rig.answer(follower)
    assert rig.stats(follower).decode_prefix_len == 40


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_behaviour_79_a_leader_that_ends_does_not_poison_its_followers(how: str):
    rig = Rig()
    rig.connect(P0)
    leader = rig.submit("a", range(43), 2)
    followers = [rig.submit(name, range(43), 2) for name in "bc"]
    rig.step()
    if how == "cancelled":
        rig.cancel(leader)
    else:
        rig.fail(rig.calls()[0], ErrorCode.INVALID)
    rig.step()
    assert rig.calls()[1].start == 0, "the first follower leads now"
    assert len(rig.calls()) == 2
    rig.serve(rig.calls()[1])
    rig.step()
    rig.serve(rig.calls()[2])
    rig.run()
    assert [rig.answer(ref) for ref in followers] == [[43, 44]] * 2


def test_a_follower_with_another_tail_waits_only_for_the_shared_part():
    rig = Rig()
    rig.connect(P0)
    rig.submit("a", range(43), 2)
    rig.submit("b", [*range(18), *range(500, 530)], 2)
    rig.step()
    (call,) = rig.calls()
    rig.notice(call, 0, 4)
    rig.step()
    assert rig.calls()[1].start == 16


def test_siblings_prefill_a_prompt_once():
    rig = Rig()
    rig.connect(P0)
    refs = [rig.submit("n4", range(43), 2, choice=choice) for choice in range(4)]
    rig.step()
    rig.serve(rig.calls()[0])
    rig.step()
    for call in rig.calls()[1:]:
        assert call.start == 40
        rig.serve(call)
    rig.run()
    assert all(rig.answer(ref) == [43, 44] for ref in refs)
    assert rig.is_clean()


def test_a_follower_stops_waiting_when_half_its_time_is_gone():
    rig = Rig()
    rig.connect(P0)
    rig.submit("a", range(43), 2)
    follower = rig.submit("b", range(43), 2, remaining_s=10.0)
    rig.step()
    rig.advance(5.0)
    rig.run()
    assert rig.answer(follower) == [43, 44], "computed here: nobody has time to fetch it"


def test_without_credit_a_request_waits_and_takes_it_when_a_call_ends():
    rig = Rig()
    rig.connect(P0, credit=60)
    rig.submit("a", range(43), 1)
    second = rig.submit("b", range(100, 143), 1)
    rig.step()
    assert len(rig.calls()) == 1
    assert rig.scheduler.load().num_waiting == 2
    rig.serve(rig.calls()[0])
    rig.step()
    rig.serve(rig.calls()[1])
    rig.run()
    assert rig.finished(second)


def test_a_pair_without_open_calls_may_always_make_one():
    rig = Rig()
    rig.connect(P0, credit=1)
    rig.submit("a", range(43), 1)
    rig.step()
    assert len(rig.calls()) == 1


def test_the_first_ranked_worker_with_credit_is_called():
    rig = Rig()
    rig.connect(P0, P1, credit=60)
    rig.submit("a", range(43), 1, ranking=("prefill-1", "prefill-0"))
    rig.submit("b", range(100, 143), 1, ranking=("prefill-1", "prefill-0"))
    rig.step()
    assert len(rig.calls(P1)) == len(rig.calls(P0)) == 1
    assert rig.calls(P1)[0].tokens[0] == 0


def test_a_prompt_that_no_prefill_worker_can_hold_is_computed_here_at_once():
    rig = Rig()
    rig.connect(P0, capacity=30)
    ref = rig.submit("a", range(43), 1)
    rig.run()
    assert rig.calls() == []
    assert rig.answer(ref) == [43]


def test_waiting_for_credit_ends_when_half_the_time_is_gone():
    rig = Rig()
    rig.connect(P0, credit=50)
    rig.submit("a", range(43), 1)
    second = rig.submit("b", range(100, 143), 1, remaining_s=8.0)
    rig.step()
    assert rig.wakeup <= 4.0
    rig.advance(4.0)
    rig.run()
    assert rig.answer(second) == [143]


def test_busy_sends_it_back_to_the_line_and_is_no_failure():
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(43), 1)
    rig.step()
    rig.tell(PrefillFailed(rig.calls()[0].ref, ErrorCode.BUSY, "full"), str(P0))
    assert rig.is_clean()
    rig.step()
    assert len(rig.calls()) == 1, "not at once"
    rig.advance(rig.wakeup - rig.now)
    rig.step()
    rig.serve(rig.calls()[1])
    rig.run()
    assert rig.finished(ref)


def test_behaviour_51_what_can_never_fit_is_refused():
    rig = Rig(num_pages=10, context_len=38)
    assert rig.failed(rig.submit("context", range(30), 9)) is ErrorCode.TOO_LONG
    rig = Rig(num_pages=10)
    assert rig.failed(rig.submit("pool", range(40), 2)) is ErrorCode.TOO_LONG
    fits = rig.submit("fits", range(40), 1)
    rig.run()
    assert rig.finished(fits)


def test_a_full_queue_is_busy():
    rig = Rig(num_pages=8, max_queued_requests=2)
    rig.connect(P0)
    rig.submit("holder", range(30), 1)
    rig.step()
    refs = [rig.submit(f"w{n}", range(100 * n, 100 * n + 30), 1) for n in range(1, 4)]
    assert rig.failed(refs[2]) is ErrorCode.BUSY
    assert len(rig.said(Rejected)) == 1


@pytest.mark.parametrize(
    "fields",
    [{"prompt": []}, {"max_new": 0}, {"remaining_s": float("nan")}, {"remaining_s": -1.0}, {"prompt": [3, -1]}],
)
def test_malformed_requests_are_refused(fields: dict):
    rig = Rig()
    prompt, max_new = fields.pop("prompt", [1, 2]), fields.pop("max_new", 1)
    assert rig.failed(rig.submit("a", prompt, max_new, **fields)) is ErrorCode.INVALID


def test_behaviour_77_one_eviction_serves_a_whole_pass():
    rig = Rig(num_pages=64, watches=True, chunked_prefill_size=1000, max_running_requests=16)
    for n in range(16):
        rig.submit(f"old{n}", range(20 * n, 20 * n + 16), 1)
    rig.run()
    assert rig.cache.counts().free == 0
    for n in range(16):
        rig.submit(f"new{n}", range(500 + 20 * n, 500 + 20 * n + 12), 1)
    before = rig.cache.num_calls["make_room"]
    rig.advance()
    assert rig.cache.num_calls["make_room"] == before + 1
    assert rig.scheduler.load().num_waiting == 16
    assert rig.cache.counts().private == 16 * 3


def test_what_a_whole_pass_takes_counts_as_its_owners_before_anybodys_pages_go():
    rig = Rig(num_pages=64, owner_pages=24, chunked_prefill_size=1000, max_running_requests=16)
    victim, greedy = (cache_namespace(tenant_salt=salt) for salt in (b"victim", b"greedy"))
    for n in range(4):
        rig.submit(f"victim{n}", range(100 * n, 100 * n + 25), 1, namespace=victim)
    rig.run()
    for n in range(4, 8):
        rig.submit(f"own{n}", range(100 * n, 100 * n + 25), 1, namespace=greedy)
    rig.run()
    kept = sum(rig.cached_pages(range(100 * n, 100 * n + 25), victim) for n in range(4))
    assert (kept, rig.cache.counts().free) == (24, 16)
    for n in range(8, 13):
        rig.submit(f"more{n}", range(100 * n, 100 * n + 32), 1, namespace=greedy)
    rig.advance()
    assert rig.cache.counts().private == 5 * 8
    assert sum(rig.cached_pages(range(100 * n, 100 * n + 25), victim) for n in range(4)) == kept


def test_a_long_waiting_line_is_not_matched_again_every_step():
    rig = Rig(num_pages=16, watches=True, chunked_prefill_size=1000, max_queued_requests=2000)
    rig.submit("runs", range(12), 40)
    rig.step()
    for n in range(300):
        rig.submit(f"w{n}", int32_array([n] * 30), 20)
    rig.advance()
    before = rig.cache.num_calls["match"]
    for _ in range(5):
        rig.step()
    assert rig.cache.num_calls["match"] == before
