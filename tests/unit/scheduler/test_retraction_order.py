"""Who resumes first after a retraction, and what is told of those that wait for it."""

import pytest

from tests.support.decode_rig import Rig


def first_step_with(rig: Rig, low: int, high: int, since: int = 0) -> int | None:
    """The first step from `since` on with a row of tokens in [low, high)."""
    for step, batch in enumerate(rig.batches):
        if step >= since and any(low <= int(row.tokens[0]) < high for row in batch.rows):
            return step
    return None


@pytest.mark.behaviour("28")
def test_a_retracted_choice_is_not_overtaken_by_a_new_one_that_would_fit() -> None:
    rig = Rig(num_pages=8, chunked_prefill_size=100)
    rig.submit("a", range(9), 20)
    retracted = rig.submit("b", range(100, 109), 20)
    rig.step_until(lambda: rig.counter("retractions"))
    since = len(rig.batches)
    rig.submit("c", range(200, 203), 2)
    rig.run()
    resumed, new = first_step_with(rig, 100, 200, since), first_step_with(rig, 200, 300, since)
    assert rig.stats(retracted).num_retractions == 1
    assert resumed is not None
    assert new is not None
    assert since < resumed <= new


@pytest.mark.behaviour("28")
def test_a_retracted_choice_resumes_before_an_older_one_that_never_ran() -> None:
    rig = Rig(num_pages=12, chunked_prefill_size=100)
    rig.submit("a", range(9), 34)
    rig.step()
    big = rig.submit("big", range(300, 343), 2)
    small = rig.submit("b", range(100, 109), 30)
    rig.step_until(lambda: rig.counter("retractions"))
    since = len(rig.batches)
    rig.run()
    resumed, admitted = first_step_with(rig, 100, 200, since), first_step_with(rig, 300, 400)
    assert rig.finished(big)
    assert rig.finished(small)
    assert resumed is not None
    assert admitted is not None
    assert resumed < admitted


def test_the_load_counts_all_tokens_that_a_retracted_choice_must_see_again() -> None:
    rig = Rig(num_pages=8, chunked_prefill_size=100)
    rig.submit("a", range(9), 20)
    retracted = rig.submit("b", range(100, 109), 20)
    rig.step_until(lambda: rig.counter("retractions"))
    load = rig.scheduler.load()
    assert load.num_running == load.num_waiting == 1
    assert load.queued_tokens == 9 + len(rig.answer(retracted))


def test_the_oldest_never_gives_way_however_much_it_holds() -> None:
    rig = Rig(num_pages=16, chunked_prefill_size=100)
    oldest = rig.submit("a", range(3), 40)
    younger = [rig.submit(name, range(100 * n, 100 * n + 24), 16) for n, name in enumerate("bc", 1)]
    rig.run()
    assert rig.counter("retractions") > 0
    assert rig.stats(oldest).num_retractions == 0
    assert all(rig.finished(ref) for ref in younger)
    assert rig.is_clean()
