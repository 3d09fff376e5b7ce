"""A request from Submit to Finished: cold, repeated, shared, multi-turn, local and remote."""

import pytest
from decode_rig import GATEWAY, P0, P1, PAGE_BYTES, Rig

from headstart.core.arrays import int32_array
from headstart.core.identity import cache_namespace
from headstart.core.messages import Finished, Tokens
from headstart.core.request import FinishReason


def finish_remotely(rig: Rig, name: str, prompt: list[int] | range, max_new: int = 2, **fields: object):
    """Submit, let prefill worker 0 serve whatever is asked of it, and run to the end."""
    num_calls = len(rig.calls())
    ref = rig.submit(name, prompt, max_new, **fields)
    rig.step()
    for call in rig.calls()[num_calls:]:
        rig.serve(call)
    rig.run()
    return ref, rig.calls()[num_calls:]


def connected(**limits: float) -> Rig:
    rig = Rig(**limits)
    rig.connect(P0)
    return rig


def test_a_request_without_any_prefill_worker_is_computed_here_in_chunks():
    rig = Rig(chunked_prefill_size=4)
    ref = rig.submit("a", range(10), max_new=3)
    rig.run()
    assert rig.answer(ref) == [10, 11, 12]
    assert [batch.num_tokens for batch in rig.batches] == [4, 4, 2, 1, 1]
    assert rig.finished(ref).finish_reason == FinishReason.LENGTH
    assert rig.is_clean()


def test_behaviour_1_a_cold_prompt_moves_every_page_and_leaves_prompt_and_output_behind():
    rig = connected()
    ref, (call,) = finish_remotely(rig, "a", range(43))
    assert (call.start, call.tokens.tolist(), len(call.dst_pages)) == (0, list(range(42)), 11)
    assert rig.answer(ref) == [43, 44]
    assert rig.stats(ref).bytes_moved == 11 * PAGE_BYTES
    assert (rig.stats(ref).decode_prefix_len, rig.stats(ref).miss_reason) == (0, "cold")
    assert rig.cached_pages(range(45)) == (43 + 2 - 1) // 4
    assert rig.is_clean()


def test_behaviour_2_a_repeated_prompt_moves_one_partial_page():
    rig = connected()
    first, _ = finish_remotely(rig, "a", range(43))
    second, (call,) = finish_remotely(rig, "b", range(43))
    assert (call.start, len(call.dst_pages)) == (40, 1)
    assert rig.answer(second) == rig.answer(first)
    assert rig.stats(second).decode_prefix_len == 40
    assert rig.is_clean()


def test_a_repeated_prompt_with_a_short_delta_makes_no_call_at_all():
    rig = connected(local_prefill_tokens=3)
    first, _ = finish_remotely(rig, "a", range(43))
    second, calls = finish_remotely(rig, "b", range(43))
    assert calls == []
    assert rig.stats(second).bytes_moved == 0
    assert rig.answer(second) == rig.answer(first)


def test_behaviour_3_an_empty_delta_goes_straight_to_its_first_decode_row():
    rig = connected()
    finish_remotely(rig, "a", range(41))
    ref, calls = finish_remotely(rig, "b", range(41), max_new=1)
    assert calls == []
    assert rig.batches[-1].num_tokens == 1
    assert rig.answer(ref) == [41]
    assert rig.stats(ref).decode_prefix_len == 40
    assert rig.stats(ref).miss_reason == ""


def test_behaviour_3_a_prompt_of_exactly_k_pages_hits_all_but_the_last():
    rig = connected(local_prefill_tokens=4)
    finish_remotely(rig, "a", range(40))
    ref, calls = finish_remotely(rig, "b", range(40))
    assert calls == []
    assert rig.stats(ref).decode_prefix_len == 36


def test_behaviour_4_a_prompt_shorter_than_a_page_never_hits():
    rig = connected()
    for name in "ab":
        ref, (call,) = finish_remotely(rig, name, range(3), max_new=1)
        assert len(call.dst_pages) == 1
        assert rig.stats(ref).decode_prefix_len == 0
    assert rig.cache.counts().cached == 0


def test_behaviour_5_and_6_a_shared_prefix_is_hit_in_whole_pages():
    rig = connected()
    finish_remotely(rig, "a", [*range(14), *range(100, 110)])
    ref, (call,) = finish_remotely(rig, "b", [*range(14), *range(200, 210)])
    assert call.start == 12
    assert rig.stats(ref).decode_prefix_len == 12
    assert rig.stats(ref).miss_reason == "diverged"


def test_behaviour_7_the_next_turn_hits_prompt_and_output_but_the_last_token():
    rig = connected()
    prompt, len_before = list(range(21)), 0
    for turn in range(6):
        ref, calls = finish_remotely(rig, f"turn{turn}", prompt, max_new=9)
        if turn:
            assert rig.stats(ref).decode_prefix_len == (len_before - 1) // 4 * 4
            assert rig.stats(ref).miss_reason == "new"
            assert rig.stats(ref).bytes_moved == sum(len(call.dst_pages) for call in calls) * PAGE_BYTES
        prompt = [*prompt, *rig.answer(ref)]
        len_before = len(prompt)
        prompt = [*prompt, *range(800 + 5 * turn, 805 + 5 * turn)]
    assert rig.is_clean()


def test_a_conversation_that_went_on_two_ways_diverged_where_it_forks():
    rig = connected()
    common = list(range(20))
    first, _ = finish_remotely(rig, "a", common, max_new=1)
    second, _ = finish_remotely(rig, "b", [*common, *range(200, 220)], max_new=1)
    third, _ = finish_remotely(rig, "c", [*common, *range(300, 320)], max_new=1)
    assert [rig.stats(ref).miss_reason for ref in (first, second, third)] == ["cold", "new", "diverged"]


def test_behaviour_14_another_namespace_never_hits():
    rig = connected()
    finish_remotely(rig, "a", range(43))
    salted = cache_namespace(tenant_salt=b"other")
    ref, (call,) = finish_remotely(rig, "b", range(43), namespace=salted)
    assert call.start == 0
    assert call.namespace == salted
    assert rig.stats(ref).decode_prefix_len == 0


@pytest.mark.parametrize(("prefill_hit", "cached"), [(0, 0), (8, 8), (40, 40)])
@pytest.mark.parametrize("done_comes_first", [True, False])
def test_behaviour_15_cached_tokens_are_those_that_nobody_computed(
    prefill_hit: int, cached: int, done_comes_first: bool
):
    rig = connected()
    finish_remotely(rig, "a", range(22), max_new=1)
    ref = rig.submit("b", range(43), 1)
    rig.step()
    call = rig.calls()[-1]
    rig.notice(call, prefix_len=prefill_hit)
    if done_comes_first:
        rig.done(call, prefix_len=prefill_hit)
    rig.run()
    assert rig.stats(ref).cached_tokens == cached
    assert rig.stats(ref).prefill_prefix_len == prefill_hit


def test_cached_tokens_of_a_local_delta_are_the_decode_hit():
    rig = Rig(local_prefill_tokens=100)
    rig.submit("a", range(43))
    rig.run()
    ref = rig.submit("b", range(43))
    rig.run()
    assert rig.stats(ref).cached_tokens == 40


def test_behaviour_16_rows_use_the_pages_behind_the_hit():
    rig = connected()
    finish_remotely(rig, "a", range(43))
    _, (call,) = finish_remotely(rig, "b", [*range(40), *range(300, 309)])
    first = next(b for b in reversed(rig.batches) if b.rows[0].start == 48)
    assert first.rows[0].pages[10:12].tolist() == call.dst_pages.tolist()


def test_behaviour_17_and_18_a_miss_and_a_hit_that_succeed_leave_nothing_pinned():
    rig = connected()
    finish_remotely(rig, "miss", range(43))
    assert rig.is_clean()
    finish_remotely(rig, "hit", range(43))
    assert rig.is_clean()


def test_behaviour_73_new_pages_begin_behind_the_whole_hit():
    rig = connected()
    finish_remotely(rig, "a", range(43))
    rig.submit("b", range(43), 1)
    rig.step()
    call = rig.calls()[-1]
    (entry,) = rig.scheduler.queues.preparing.values()
    assert entry.lease.num_shared == call.start // 4 == 10
    assert call.dst_pages.tolist() == entry.lease.pages[10:].tolist()


def test_behaviour_21_the_same_hit_many_times_leaves_no_trace():
    rig = connected()
    finish_remotely(rig, "a", range(43))
    before = rig.cache.counts()
    for number in range(6):
        finish_remotely(rig, f"again{number}", range(43), max_new=1)
        assert rig.cache.counts() == before
    for number in range(6):
        rig.submit(f"together{number}", range(43), 1)
    rig.step()
    for call in rig.calls()[-6:]:
        rig.serve(call)
    rig.run()
    assert rig.cache.counts() == before


def test_behaviour_25_two_that_computed_the_same_span_share_one_copy_in_the_end():
    rig = Rig(chunked_prefill_size=100)
    a = rig.submit("a", [*range(12), 100], 4, cacheable=True)
    b = rig.submit("b", [*range(12), 200], 4, cacheable=False)
    rig.run()
    assert rig.finished(a).num_tokens == rig.finished(b).num_tokens == 4
    assert rig.cache.counts().cached == (13 + 4 - 1) // 4


@pytest.mark.parametrize("stop_ids", [(), (43,)])
def test_behaviour_26_a_choice_may_end_at_its_first_token(stop_ids: tuple[int, ...]):
    rig = connected()
    ref, _ = finish_remotely(rig, "a", range(43), max_new=1 if not stop_ids else 9, stop_token_ids=stop_ids)
    assert rig.answer(ref) == [43]
    assert rig.finished(ref).finish_reason == (FinishReason.STOP if stop_ids else FinishReason.LENGTH)
    assert rig.finished(ref).stop_token_id == (43 if stop_ids else None)
    assert rig.cached_pages(range(43)) == 10
    assert rig.is_clean()


def test_behaviour_32_an_uncacheable_request_neither_leaves_nor_finds_anything():
    rig = connected()
    finish_remotely(rig, "probe", range(43), cacheable=False)
    assert rig.cache.counts().cached == 0
    ref, (call,) = finish_remotely(rig, "real", range(43))
    assert (call.start, call.cacheable) == (0, True)
    probe, (call,) = finish_remotely(rig, "probe2", range(43), cacheable=False)
    assert (call.start, call.cacheable) == (0, False)
    assert rig.stats(probe).miss_reason == "uncacheable"
    assert rig.answer(probe) == rig.answer(ref)


def test_a_prefix_that_was_here_once_is_missed_as_evicted():
    rig = Rig(num_pages=12, chunked_prefill_size=100)
    for name, start in (("a", 0), ("other", 500), ("again", 0)):
        ref = rig.submit(name, range(start, start + 40), 1)
        rig.run()
    assert rig.stats(ref).miss_reason == "evicted"


def test_chunks_of_a_prompt_are_matchable_as_their_notices_arrive_in_order():
    rig = connected()
    rig.submit("a", range(43), 1)
    rig.step()
    (call,) = rig.calls()
    rig.notice(call, first=4, count=4)
    assert rig.cached_pages(range(43)) == 0, "nothing before it has arrived"
    rig.notice(call, first=0, count=2)
    assert rig.cached_pages(range(43)) == 2
    rig.notice(call, first=2, count=2)
    assert rig.cached_pages(range(43)) == 8
    rig.notice(call, first=8, count=3)
    rig.run()
    assert rig.said(Finished)


def test_a_resumed_request_continues_at_the_next_output():
    rig = connected()
    finish_remotely(rig, "a", range(43), max_new=6)
    ref, (call,) = finish_remotely(
        rig, "b", [*range(43)], max_new=6, attempt=1, output_ids=int32_array([43, 44, 45]), ranking=("prefill-0",)
    )
    assert call.start == 44
    deltas = [delta for message in rig.said(Tokens) for delta in message.deltas if delta.ref == ref]
    assert [(delta.index, delta.token_ids) for delta in deltas] == [(3, (46,)), (4, (47,)), (5, (48,))]
    assert rig.finished(ref).num_tokens == 6


@pytest.mark.parametrize("outputs", [[43, 44], [43, 7]])
def test_a_request_whose_outputs_are_complete_already_finishes_at_once(outputs: list[int]):
    rig = Rig()
    ref = rig.submit("a", range(43), 2, output_ids=int32_array(outputs), stop_token_ids=(7,))
    assert rig.finished(ref).finish_reason == (FinishReason.STOP if 7 in outputs else FinishReason.LENGTH)
    assert rig.said(Tokens) == []


@pytest.mark.parametrize("max_new", [1, 2, 3])
def test_exactly_max_new_tokens_come_out(max_new: int):
    rig = Rig()
    ref = rig.submit("a", range(10), max_new)
    rig.run()
    assert len(rig.answer(ref)) == max_new == rig.finished(ref).num_tokens


def test_stop_ids_are_banned_until_min_new_tokens_and_end_the_choice_after():
    rig = Rig()
    ref = rig.submit("a", range(10), 20, min_new_tokens=2, stop_token_ids=(10, 11, 13))
    banned = []
    while not rig.terminal(ref):
        batch = rig.step()
        banned += [row.sample.banned_ids for row in batch.rows if row.sample]
    assert banned == [(10, 11, 13), (10, 11, 13), (), ()]
    assert rig.answer(ref) == [10, 11, 12, 13]


def test_one_message_carries_all_tokens_of_a_step():
    rig = Rig(chunked_prefill_size=100)
    for name in "abc":
        rig.submit(name, [ord(name), *range(5)], 3)
    rig.step()
    (message,) = rig.said(Tokens, GATEWAY)
    assert len(message.deltas) == 3


def test_short_deltas_share_one_budget_per_step():
    rig = Rig(local_prefill_tokens=8, page_size=4)
    rig.connect(P0, P1)
    refs = [rig.submit(name, [ord(name), *range(6)], 2) for name in "abc"]
    assert rig.step().num_tokens <= 8 + 3
    rig.run()
    assert rig.calls() == []
    assert all(len(rig.answer(ref)) == 2 for ref in refs)


def test_a_retained_step_does_not_admit_more_rows_than_may_run():
    rig = Rig(max_running_requests=2, chunked_prefill_size=100)
    refs = [rig.submit(name, [ord(name), *range(5)], 3) for name in "abcdef"]
    rig.run()
    assert max(len(batch.rows) for batch in rig.batches) == 2
    assert all(rig.finished(ref) for ref in refs)
