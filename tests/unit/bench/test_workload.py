"""Workloads: what a seed fixes, and what bench_serving's length options mean."""

from collections import Counter
from random import Random

import pytest

from headstart.bench.presets import PRESETS, scaled, with_prefix_share
from headstart.bench.workload import Length, MultiTurn, NoReuse, SharedPrefix, TokenSource, TokenSpan

SOURCE = TokenSource(1000, 30_000)
SMALL = SharedPrefix(3, 4, Length(64), Length(16, 0.5), Length(8))
SHAPES = [SMALL, MultiTurn(3, 4, Length(50, 0.2), Length(10), Length(6)), NoReuse(5, Length(40, 0.5), Length(4))]


def prompts(workload):
    return [SOURCE.tokens(session.turns[0].fresh) for session in workload.measured]


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_seeds_give_equal_workloads_and_other_seeds_other_tokens(shape):
    assert shape.build(7) == shape.build(7)
    assert prompts(shape.build(7)) == prompts(shape.build(7))
    assert not {tuple(p) for p in prompts(shape.build(7))} & {tuple(p) for p in prompts(shape.build(8))}


def test_a_range_ratio_draws_from_that_share_of_the_length_up_to_all_of_it():
    draws = {Length(10, 0.5).draw(Random(seed)) for seed in range(200)}
    assert draws == {5, 6, 7, 8, 9, 10}
    assert {Length(10).draw(Random(seed)) for seed in range(50)} == {10}
    assert {Length(10, 0.0).draw(Random(seed)) for seed in range(200)} == set(range(1, 11))
    assert Length(0, 0.5).draw(Random(1)) == 0


def test_prompts_of_a_group_share_the_system_prompt_and_nothing_else():
    workload = SMALL.build(1)
    for session, prompt in zip(workload.measured, prompts(workload), strict=True):
        for other, theirs in zip(workload.measured, prompts(workload), strict=True):
            if session is not other:
                shared = next((i for i, (a, b) in enumerate(zip(prompt, theirs, strict=False)) if a != b), 0)
                assert shared == (64 if session.group == other.group else 0)


def test_prompts_are_shuffled_unless_ordered():
    def groups(ordered):
        shape = SharedPrefix(4, 8, Length(8), Length(4), Length(2), ordered=ordered)
        return [session.group for session in shape.build(1).measured]

    assert groups(ordered=True) == sorted(groups(ordered=True))
    assert groups(ordered=False) != sorted(groups(ordered=False))
    assert Counter(groups(ordered=False)) == Counter(groups(ordered=True))


def test_zipf_draws_low_ranks_more_often_and_keeps_the_questions():
    zipf = SharedPrefix(8, 100, Length(8), Length(4), Length(2), group_distribution="zipf", zipf_alpha=1.0)
    workload = zipf.build(1)
    counts = Counter(session.group for session in workload.measured)
    assert len(workload.measured) == 800
    assert counts[0] > 1.5 * counts[1] > 1.5 * counts[3]
    assert len({SOURCE.tokens(s.turns[0].fresh[1:])[0:4].__repr__() for s in workload.measured}) == 800


def test_warm_up_meets_every_group_once_with_questions_of_its_own():
    workload = SMALL.build(1)
    assert [session.group for session in workload.warmup] == [0, 1, 2]
    questions = {SOURCE.tokens(s.turns[0].fresh)[64:].__repr__() for s in (*workload.warmup, *workload.measured)}
    assert len(questions) == len(workload.warmup) + len(workload.measured)


def test_turns_of_shared_prefix_send_the_system_prompt_once():
    (session, *_) = SharedPrefix(1, 1, Length(64), Length(16), Length(8), num_turns=3).build(1).measured
    assert [sum(piece.length for piece in turn.fresh) for turn in session.turns] == [80, 16, 16]


def test_a_stream_is_the_same_however_it_is_cut():
    whole = SOURCE.tokens((TokenSpan(5, 0, 100),))
    assert SOURCE.tokens((TokenSpan(5, 0, 30), TokenSpan(5, 30, 70))) == whole
    assert SOURCE.tokens((TokenSpan(5, 90, 10),)) == whole[90:]
    assert SOURCE.tokens((TokenSpan(6, 0, 100),)) != whole
    assert all(1000 <= token < 30_000 for token in whole)
    assert SOURCE.tokens(()) == []


def test_the_published_shape_of_sglang_19746():
    workload = PRESETS["sglang-19746"].build(42)
    lengths = [[sum(p.length for p in s.turns[0].fresh), s.turns[0].output_len] for s in workload.measured]
    assert len(workload.measured) == 1000
    assert len(workload.warmup) == 20
    assert 54_300 < sum(prompt for prompt, _ in lengths) / 1000 < 54_700
    assert 330 < sum(output for _, output in lengths) / 1000 < 370


def test_the_published_shape_of_sglang_22234_has_640_requests_at_any_scale():
    shape = scaled(PRESETS["sglang-22234"], 10)
    workload = shape.build(1)
    assert len(workload.measured) == 640
    assert all(350 <= session.turns[0].fresh[0].length <= 700 for session in workload.measured)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 0.999])
def test_a_prefix_share_moves_the_border_and_keeps_the_prompt_length(share):
    shape = with_prefix_share(SharedPrefix(1, 2, Length(60), Length(40), Length(8)), share)
    assert shape.system.tokens + shape.question.tokens == 100
    assert shape.system.tokens == min(round(100 * share), 99)
    assert len(prompts(shape.build(1))[0]) == 100
