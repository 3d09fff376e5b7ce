"""When pages run out while choices run: who gives way, and that nobody's answer shows it."""

import pytest
from decode_rig import P0, P1, Rig

from headstart.core.errors import ErrorCode
from headstart.core.messages import TicketClosed


def expected(start: int, count: int) -> list[int]:
    return [start + k for k in range(count)]


def test_behaviour_28_memory_pressure_retracts_and_resumes_with_the_same_answer():
    rig = Rig(num_pages=8, chunked_prefill_size=100)
    a, b = rig.submit("a", range(9), 20), rig.submit("b", range(100, 109), 20)
    rig.run()
    assert rig.answer(a) == expected(9, 20)
    assert rig.answer(b) == expected(109, 20)
    assert rig.stats(a).num_retractions == 0, "the oldest never gives way"
    assert rig.stats(b).num_retractions >= 1
    assert rig.is_clean()


def test_retraction_keeps_whole_pages_matchable_and_resuming_hits_them():
    rig = Rig(num_pages=10, chunked_prefill_size=100)
    rig.submit("a", range(9), 20)
    b = rig.submit("b", range(100, 117), 20)
    rig.step_until(lambda: rig.counter("retractions"))
    held = rig.cached_pages([*range(100, 117), *rig.answer(b)])
    assert held >= 4
    before = len(rig.batches)
    rig.run()
    resumed = [row for batch in rig.batches[before:] for row in batch.rows if row.start and len(row.tokens) > 1]
    assert rig.answer(b) == expected(117, 20)
    assert all(row.start >= 4 for row in resumed)


def test_constant_retraction_with_shared_prefixes_changes_no_answer():
    rig = Rig(num_pages=10, chunked_prefill_size=100)
    refs = [rig.submit(f"r{n}", [*range(12), 100 * n + 200, 100 * n + 201], 14) for n in range(5)]
    rig.run(3000)
    assert rig.counter("retractions") > 0
    for n, ref in enumerate(refs):
        assert rig.answer(ref) == expected(100 * n + 202, 14)
    assert rig.is_clean()


def test_ready_choices_give_way_before_preparing_and_running_ones():
    rig = Rig(num_pages=8, max_running_requests=2, chunked_prefill_size=100)
    a = rig.submit("a", range(8), 12)
    b = rig.submit("b", range(100, 108), 12)
    c = rig.submit("c", range(200, 208), 2)
    rig.run()
    assert rig.stats(c).num_retractions >= 1
    assert rig.stats(a).num_retractions == 0
    assert [len(rig.answer(ref)) for ref in (a, b, c)] == [12, 12, 2]


def test_a_growing_row_cancels_the_youngest_preparing_one_and_sits_out_while_its_pages_come():
    rig = Rig(num_pages=10, local_prefill_tokens=3)
    rig.connect(P0)
    a = rig.submit("a", range(4), 30)
    rig.step()
    b = rig.submit("b", range(100, 132), 1)
    rig.step()
    (call,) = rig.calls()
    rig.step_until(rig.cancels)
    assert rig.step() is None, "the row sits out: eight pages are on their way back"
    assert rig.cache.counts().inflight == len(call.dst_pages)
    rig.tell(TicketClosed(call.ref), str(P0))
    rig.run()
    assert rig.answer(a) == expected(4, 30)
    rig.serve(rig.calls()[-1])
    rig.run()
    assert rig.answer(b) == [132]
    assert rig.stats(b).num_retractions == 0
    assert rig.is_clean()


def test_a_row_sits_out_only_a_while_for_pages_that_do_not_come():
    rig = Rig(num_pages=12, local_prefill_tokens=3)
    rig.connect(P0)
    a, c = rig.submit("a", range(4), 30), rig.submit("c", range(600, 604), 9)
    rig.step()
    rig.submit("b", range(100, 132), 1)
    rig.step()
    rig.step_until(rig.cancels)
    sat_out = rig.answer(a)
    rig.advance(2.5)
    rig.run()
    assert len(rig.answer(a)) > len(sat_out)
    assert rig.terminal(c) is None, "the younger gave way"
    rig.tell(TicketClosed(rig.calls()[0].ref), str(P0))
    rig.run_served()
    assert rig.answer(a) == expected(4, 30)
    assert rig.answer(c) == expected(604, 9)


def test_behaviour_29_a_retracted_choice_can_be_cancelled():
    rig = Rig(num_pages=8, chunked_prefill_size=100)
    a, b = rig.submit("a", range(9), 20), rig.submit("b", range(100, 109), 20)
    rig.step_until(lambda: rig.counter("retractions"))
    rig.cancel(b)
    assert rig.failed(b) is ErrorCode.CANCELLED
    rig.run()
    assert rig.answer(a) == expected(9, 20)
    assert rig.is_clean()


def test_g7_a_choice_alone_with_a_pool_that_a_silent_writer_keeps_ends_alone():
    rig = Rig(num_pages=12, local_prefill_tokens=3)
    rig.connect(P0)
    gone = rig.submit("gone", range(100, 131), 1)
    rig.step()
    rig.cancel(gone)
    assert rig.cache.counts().inflight == 8
    a = rig.submit("a", range(4), 40, remaining_s=20.0)
    rig.run()
    assert rig.terminal(a) is None, "pages may come back yet"
    rig.advance(20.0)
    assert rig.failed(a) is ErrorCode.DEADLINE
    rig.tell(TicketClosed(rig.calls()[0].ref), str(P0))
    assert rig.is_clean()


def test_behaviour_23_pages_of_the_running_are_never_evicted():
    rig = Rig(num_pages=12, chunked_prefill_size=100)
    a = rig.submit("a", range(16), 20)
    rig.step()
    for n in range(6):
        rig.submit(f"n{n}", range(100 + 20 * n, 113 + 20 * n), 1)
    rig.run()
    assert rig.answer(a) == expected(16, 20)


def test_behaviour_24_eviction_that_frees_too_little_lets_the_request_wait():
    rig = Rig(num_pages=6, chunked_prefill_size=100)
    a = rig.submit("a", range(16), 4)
    rig.step()
    b = rig.submit("b", range(100, 116), 4)
    rig.step()
    assert rig.scheduler.load().num_waiting == 1
    rig.run()
    assert rig.finished(a)
    assert rig.finished(b)


def test_g12_received_when_the_pool_is_exactly_full():
    rig = Rig(num_pages=8, local_prefill_tokens=3)
    rig.connect(P0, P1)
    a, b = rig.submit("a", range(16), 8), rig.submit("b", range(100, 116), 8)
    rig.run_served()
    assert rig.answer(a) == expected(16, 8)
    assert rig.answer(b) == expected(116, 8)
    assert rig.is_clean()


@pytest.mark.parametrize("reserve", [0, 4, 64])
def test_g2_outputs_much_longer_than_guessed_all_finish(reserve: int):
    rig = Rig(num_pages=24, num_reserved_decode_tokens=reserve, chunked_prefill_size=32)
    refs = [rig.submit(f"r{n}", range(30 * n, 30 * n + 8), 60) for n in range(8)]
    rig.run(5000)
    assert all(rig.answer(ref) == [(30 * n + 8 + k) % 1000 for k in range(60)] for n, ref in enumerate(refs))
    assert rig.is_clean()
