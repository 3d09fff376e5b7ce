"""Two steps in flight: the second one's rows follow the first one's, and what comes to nothing is dropped whole."""

import pytest

from headstart.core.batch import BatchOutput, PendingToken, Sampled
from headstart.core.errors import ErrorCode
from headstart.core.messages import Finished
from tests.support.decode_rig import Rig
from tests.support.decode_walk import Walk


def two_in_flight(**changes) -> Rig:
    return Rig(**{"max_steps": 2, "local_prefill_tokens": 100, **changes})


def launch_two(rig: Rig) -> None:
    rig.advance()
    assert rig.launch()
    assert rig.launch()


def num_inflight(rig: Rig) -> int:
    return rig.cache.counts().inflight


def test_a_decode_row_takes_the_token_that_the_row_before_it_draws() -> None:
    rig = two_in_flight()
    ref = rig.submit("a", range(6), max_new=5)
    launch_two(rig)
    (first,), (second,) = (batch.rows for batch in rig.batches)
    assert (second.pending, len(second.tokens), second.num_new) == (PendingToken(1, first.row_id), 0, 1)
    assert second.start == first.start + first.num_new == 6
    assert first.sample is not None
    assert second.sample is not None
    assert [first.sample.output_index, second.sample.output_index] == [0, 1]
    assert first.sample.context.tolist() == second.sample.context.tolist() == list(range(6))
    rig.run()
    assert rig.answer(ref) == [6, 7, 8, 9, 10]


def test_a_chunk_follows_the_chunk_in_flight() -> None:
    rig = two_in_flight(local_prefill_tokens=0, chunked_prefill_size=8)
    ref = rig.submit("a", range(20), max_new=2)
    launch_two(rig)
    rows = [row for batch in rig.batches for row in batch.rows]
    assert [(row.start, row.num_new, row.sample is None) for row in rows] == [(0, 8, True), (8, 8, True)]
    rig.run()
    assert rig.answer(ref) == [20, 21]


def test_a_row_that_ends_by_length_with_what_is_in_flight_is_not_launched_again() -> None:
    rig = two_in_flight()
    ref = rig.submit("a", range(6), max_new=3)
    rig.run()
    assert len(rig.batches) == 3
    assert rig.answer(ref) == [6, 7, 8]
    assert rig.counter("dropped_rows") == 0


def test_the_row_behind_a_stop_id_is_dropped_token_and_kv_together() -> None:
    rig = two_in_flight()
    ref = rig.submit("a", range(6), max_new=50, stop_token_ids=(9,))
    rig.step_until(lambda: rig.terminal(ref))
    assert rig.answer(ref) == [6, 7, 8, 9]
    assert rig.finished(ref).stop_token_id == 9
    assert num_inflight(rig) == 3, "the younger step may still write"
    assert rig.cached_pages(range(12)) == 2, "nine tokens have KV"
    rig.run()
    assert rig.counter("dropped_rows") == 1
    assert rig.is_clean()
    assert rig.cached_pages(range(12)) == 2


def test_a_cancelled_choice_keeps_its_pages_until_the_last_step_that_has_its_row_is_over() -> None:
    rig = two_in_flight()
    ref = rig.submit("a", range(6), max_new=50, cacheable=False)
    launch_two(rig)
    rig.cancel(ref)
    assert rig.failed(ref) is ErrorCode.CANCELLED
    held = num_inflight(rig)
    assert held == rig.cache.num_pages - rig.cache.counts().free > 0
    rig.land()
    assert num_inflight(rig) == held
    rig.land()
    assert rig.is_clean()
    assert rig.counter("dropped_rows") == 2


def test_pages_of_one_that_left_wait_for_no_step_that_does_not_have_its_row() -> None:
    rig = two_in_flight()
    ref = rig.submit("a", range(6), max_new=1, cacheable=False)
    other = rig.submit("b", range(100, 106), max_new=9, cacheable=False)
    launch_two(rig)
    assert [len(batch.rows) for batch in rig.batches] == [2, 1]
    rig.cancel(ref)
    assert num_inflight(rig) > 0
    rig.land()
    assert num_inflight(rig) == 0
    rig.run()
    assert rig.answer(other) == list(range(106, 115))


def test_a_row_that_fails_takes_the_row_behind_it_along_and_nobody_else() -> None:
    rig = two_in_flight()
    bad, good = rig.submit("a", range(6), max_new=8), rig.submit("b", range(50, 56), max_new=8)
    rig.model = lambda row: "NaN" if row.tokens[-1] == 8 else (int(row.tokens[-1]) + 1) % 1000
    rig.run()
    assert rig.failed(bad) is ErrorCode.INTERNAL
    assert rig.answer(bad) == [6, 7, 8]
    assert rig.answer(good) == list(range(56, 64))
    assert rig.counter("dropped_rows") == 1


def test_pages_that_a_commit_gives_up_are_kept_while_a_younger_step_reads_them() -> None:
    rig = two_in_flight()
    refs = [rig.submit(name, range(6), max_new=60) for name in "ab"]
    rig.step_until(lambda: rig.counter("pages_remapped") > 1)
    assert rig.in_flight
    assert num_inflight(rig) >= 8, "output pages enter the tree eight at a time"
    rig.run()
    assert rig.answer(refs[0]) == rig.answer(refs[1]) == list(range(6, 66))
    assert rig.is_clean()


def test_one_victim_is_enough_where_its_pages_come_back_with_the_step_in_flight() -> None:
    rig = two_in_flight(num_pages=9, num_reserved_decode_tokens=0)
    refs = [rig.submit(name, range(100 * k, 100 * k + 6), max_new=20, cacheable=False) for k, name in enumerate("abc")]
    rig.step_until(lambda: rig.counter("retractions"))
    assert rig.counter("retractions") == 1
    rig.step()
    assert rig.counter("retractions") == 1
    rig.run()
    for k, ref in enumerate(refs):
        assert rig.answer(ref) == [100 * k + 6 + i for i in range(20)]


def test_a_retracted_choice_comes_back_while_its_old_rows_are_in_flight() -> None:
    rig = two_in_flight(num_pages=8)
    refs = [rig.submit(name, range(100 * k, 100 * k + 6), max_new=14) for k, name in enumerate("ab")]
    rig.run()
    assert rig.counter("retractions") > 0
    assert rig.counter("dropped_rows") > 0
    for k, ref in enumerate(refs):
        assert rig.answer(ref) == [100 * k + 6 + i for i in range(14)]


def test_an_output_that_is_not_the_oldest_steps_is_counted_and_changes_nothing() -> None:
    rig = two_in_flight()
    ref = rig.submit("a", range(6), max_new=5)
    launch_two(rig)
    rig.scheduler.update(BatchOutput(2, (Sampled(0, (7,)),)))
    assert rig.counter("stray_outputs") == 1
    rig.run()
    assert rig.answer(ref) == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("seed", range(8))
def test_the_same_tokens_whatever_is_in_flight(seed: int) -> None:
    told = []
    for max_steps, num_drafts in [(1, 0), (2, 0), (1, 3), (2, 3)]:
        walk = Walk(seed, max_steps, num_drafts)
        for _ in range(12):
            walk.submit()
        walk.settle()
        walk.judge()
        ended = {ref: walk.rig.terminal(ref) for ref in walk.submitted}
        told.append({ref: walk.rig.answer(ref) for ref, end in ended.items() if isinstance(end, Finished)})
    assert told[0]
    assert told[0] == told[1] == told[2] == told[3]


def test_a_row_of_which_nothing_came_back_ends_its_choice_alone() -> None:
    rig = two_in_flight()
    ref = rig.submit("a", range(6), max_new=8)
    rig.model = lambda row: Sampled(row.row_id, ())
    rig.run()
    assert rig.failed(ref) is ErrorCode.INTERNAL
    assert rig.is_clean()


def test_min_new_tokens_bans_stop_ids_of_the_pending_rows_output_too() -> None:
    rig = two_in_flight()
    rig.submit("a", range(6), max_new=4, min_new_tokens=2, stop_token_ids=(999,))
    rig.run()
    banned = [row.sample.banned_ids for batch in rig.batches for row in batch.rows if row.sample]
    assert banned == [(999,), (999,), (), ()]
