"""What an answer says of its prompt: what was found and what was computed add up to it, on every path."""

from random import Random

import pytest
from decode_rig import P0, P1, Rig

from headstart.core.arrays import int32_array
from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished
from headstart.core.request import ChoiceRef
from headstart.scheduler.decode.metrics import ChoiceMetrics


def stats_of(rig: Rig, ref):
    terminal = rig.terminal(ref)
    assert isinstance(terminal, Finished | Failed)
    return terminal.stats


def test_positions_computed_twice_count_once_and_those_behind_the_prompt_not_at_all():
    metrics = ChoiceMetrics(0.0, prompt_len=40)
    metrics.computed(10, 30)
    metrics.computed(20, 25)
    metrics.computed(35, 60)
    assert (metrics.num_computed, metrics.cached_tokens) == (25, 15)
    metrics.computed(0, 60)
    assert (metrics.num_computed, metrics.cached_tokens) == (40, 0)


def test_what_is_computed_after_the_first_token_is_no_cost_of_the_prompt():
    metrics = ChoiceMetrics(0.0, prompt_len=31)
    metrics.computed(20, 31)
    metrics.timestamp("first_token", 1.0)
    metrics.computed(0, 31)
    assert (metrics.num_computed, metrics.cached_tokens) == (11, 20)


@pytest.mark.parametrize("seed", range(30))
def test_found_and_computed_add_up_to_the_prompt_whatever_comes_between(seed: int):
    """Computed here, in chunks, with retractions, resumed outputs and shared prefixes."""
    rng = Random(seed)
    rig = Rig(num_pages=rng.randint(9, 30), chunked_prefill_size=rng.choice([3, 7, 50]), max_steps=1 + seed % 2)
    computed: dict[ChoiceRef, set[int]] = {}
    prompts: dict[ChoiceRef, int] = {}
    for number in range(12):
        prompt = [*range(rng.randint(0, 20)), 500 + number % 3, *range(600, 600 + rng.randint(0, 6))]
        num_known = rng.choice([0, 0, 3, 9])
        known = [(prompt[-1] + 1 + k) % 1000 for k in range(num_known)]
        ref = rig.submit(f"r{number}", prompt, num_known + rng.randint(1, 6), output_ids=int32_array(known))
        prompts[ref] = len(prompt)
        for _ in range(rng.randint(0, 6)):
            step(rig, computed)
    while step(rig, computed):
        pass
    for ref, prompt_len in prompts.items():
        stats = stats_of(rig, ref)
        assert 0 <= stats.decode_prefix_len <= prompt_len
        assert 0 <= stats.cached_tokens <= prompt_len
        assert stats.cached_tokens + len(computed[ref] & set(range(prompt_len))) == prompt_len


def step(rig: Rig, computed: dict[ChoiceRef, set[int]]) -> bool:
    """A pass, and which positions it computed for whom before a first token. False if nothing runs."""
    rig.advance()
    while len(rig.in_flight) < rig.max_steps and rig.launch():
        pass
    if not rig.in_flight:
        return False
    for row in rig.scheduler.queues.steps[0].rows:
        if not row.entry.has_left and "first_token" not in row.entry.choice.metrics.timestamps:
            computed.setdefault(row.entry.choice.ref, set()).update(range(row.start, row.stop))
    rig.land()
    return True


def test_a_resumed_request_counts_its_prompt_and_not_the_outputs_that_came_with_it():
    rig = Rig(local_prefill_tokens=0)
    ref = rig.submit("a", range(20), 30, output_ids=int32_array(list(range(20, 45))))
    rig.run()
    assert rig.stats(ref).cached_tokens == 0
    again = rig.submit("b", range(20), 30, output_ids=int32_array(list(range(20, 45))))
    rig.run()
    assert rig.stats(again).cached_tokens == rig.stats(again).decode_prefix_len == 20


def test_a_retry_on_another_worker_counts_no_token_twice():
    rig = Rig(num_pages=64)
    rig.connect(P0, P1)
    ref = rig.submit("a", range(41), 1)
    rig.advance()
    (first,) = rig.calls()
    rig.notice(first, 0, 6)
    rig.fail(first)
    (second,) = rig.calls(P1)
    assert second.start == 24
    rig.serve(second, P1)
    rig.run()
    assert rig.stats(ref).cached_tokens == 0


def test_a_request_that_ends_before_anything_was_computed_reports_nothing_cached():
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(41), 1)
    rig.cancel(ref)
    other = rig.submit("b", range(41), 1)
    rig.advance()
    rig.cancel(other)
    assert stats_of(rig, ref).cached_tokens == stats_of(rig, other).cached_tokens == 0


def test_a_request_that_fails_on_the_way_reports_what_was_found_as_far_as_it_came():
    rig = Rig()
    rig.connect(P0)
    ref = rig.submit("a", range(41), 1)
    rig.advance()
    (call,) = rig.calls()
    rig.notice(call, 0, 4, prefix_len=8)
    rig.cancel(ref)
    assert rig.failed(ref) is ErrorCode.CANCELLED
    assert stats_of(rig, ref).cached_tokens == 8
