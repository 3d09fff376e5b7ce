"""What a workload asks, counted from its requests."""

import pytest

from headstart.bench.workload import Length, MultiTurn, NoReuse, Session, SharedPrefix, TokenSpan, Turn
from headstart.plan.residency import PrefixedLoad
from headstart.plan.workload_stats import PathIndex, delta_tokens, held, placed, planned_requests, prompt_work

GROUPS = SharedPrefix(8, 32, Length(700), Length(100), Length(50))


def test_a_path_is_known_as_far_as_another_began_with_it() -> None:
    index = PathIndex()
    assert index.add([TokenSpan(1, 0, 100), TokenSpan(2, 0, 30)]) == 130
    assert index.known([TokenSpan(1, 0, 100), TokenSpan(3, 0, 30)]) == 100
    assert index.known([TokenSpan(1, 0, 60), TokenSpan(3, 0, 30)]) == 60
    assert index.known([TokenSpan(2, 0, 30)]) == 0


def test_a_path_that_leaves_another_in_the_middle_of_a_piece_adds_only_what_follows() -> None:
    index = PathIndex()
    index.add([TokenSpan(1, 0, 100), TokenSpan(2, 0, 30)])
    assert index.add([TokenSpan(1, 0, 60), TokenSpan(3, 0, 10)]) == 10
    assert index.add([TokenSpan(1, 0, 100), TokenSpan(2, 0, 40)]) == 10
    assert index.known([TokenSpan(1, 0, 60), TokenSpan(3, 0, 10)]) == 70
    assert index.known([TokenSpan(1, 0, 100), TokenSpan(2, 0, 40)]) == 140


def test_a_turn_is_asked_with_all_that_its_session_keeps() -> None:
    session = Session(
        "s", (Turn((TokenSpan(1, 0, 10),), 5), Turn((TokenSpan(2, 0, 3),), 4), Turn((TokenSpan(1, 8, 7),), 2, keep=8))
    )
    first, second, third = planned_requests([session])
    assert [ask.prompt_len for ask in (first, second, third)] == [10, 18, 15]
    assert third.prompt == (TokenSpan(1, 0, 15),)
    assert second.total_len == 22


def test_batches_of_shared_prefixes_hold_what_the_closed_form_says() -> None:
    asks = planned_requests(GROUPS.build(1).measured)
    load = PrefixedLoad(8, 700, 100, 50)
    for num_rows in (4, 16, 64):
        batch, resident = held(asks, num_rows, whole=False), held(asks, num_rows, whole=True)
        assert batch.each == load.read_tokens(num_rows, shared=False)
        assert batch.unique == pytest.approx(load.read_tokens(num_rows, shared=True), rel=0.1)
        assert resident.unique == pytest.approx(load.resident_tokens(num_rows, shared=True), rel=0.1)


def test_each_prefill_worker_computes_each_prefix_once() -> None:
    asks = planned_requests(GROUPS.build(1).measured)
    for num_workers in (1, 3):
        work = prompt_work(asks, num_workers)
        assert sum(job.num_cached == 0 for job in work) == 8 * num_workers
        assert all(job.num_new + job.num_cached == 799 for job in work)


def test_what_the_warm_up_asked_is_computed_no_more() -> None:
    workload = GROUPS.build(1)
    work = prompt_work(planned_requests(workload.measured), 1, warm=planned_requests(workload.warmup))
    assert all(job.num_cached == 700 for job in work)


def test_a_prefill_worker_computes_the_previous_answer_again_and_a_decode_worker_has_it() -> None:
    asks = planned_requests(MultiTurn(1, 2, Length(100), Length(10), Length(20)).build(1).measured)
    assert [job.num_new for job in prompt_work(asks, 1)] == [99, 29]
    assert delta_tokens([asks]) == (100 + 10) / 2
    assert delta_tokens([asks], warm=asks[:1]) == 10


def test_groups_gather_on_decode_workers_that_hold_them() -> None:
    asks = planned_requests(SharedPrefix(8, 32, Length(20_000), Length(100), Length(50)).build(1).measured)
    places = placed(asks, 4, at_once=64)
    assert sum(map(len, places)) == len(asks)
    assert sum(len({ask.prompt[0] for ask in place}) for place in places) == 8
    assert all(place for place in places)


def test_requests_without_a_common_prefix_go_round() -> None:
    asks = planned_requests(NoReuse(12, Length(100), Length(10)).build(1).measured)
    assert [len(place) for place in placed(asks, 3, at_once=6)] == [4, 4, 4]
