"""What is drawn, and on what it may depend."""

import numpy as np
import pytest
import torch

from headstart.core.arrays import EMPTY, int32_array
from headstart.core.batch import SampleSpec
from headstart.core.request import SamplingParams
from headstart.executor.sampler import SampleTask, sample, uniforms

VOCAB = 64


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32))


def task(row_id: int = 0, index: int = 0, choice: int = 0, context=EMPTY, prompt_len: int = 0, **kwargs) -> SampleTask:
    spec = {name: kwargs.pop(name) for name in ("banned_ids", "num_top_logprobs") if name in kwargs}
    return SampleTask(row_id, SampleSpec(SamplingParams(**kwargs), choice, index, context, prompt_len, **spec))


def drawn(row: torch.Tensor, count: int = 300, **kwargs) -> np.ndarray:
    tasks = [task(i, index=i, seed=5, **kwargs) for i in range(count)]
    return np.array([one.token_ids[0] for one in sample(row.expand(count, -1), tasks)])


def test_random_numbers_depend_on_seed_choice_and_index_alone() -> None:
    assert np.array_equal(uniforms(1, 2, 3, 10), uniforms(1, 2, 3, 20)[:10])
    neighbours = [
        uniforms(seed, choice, index, 8) for seed in (2**64 - 2, 2**64 - 1) for choice in (0, 1) for index in (0, 1)
    ]
    assert len(np.unique(neighbours)) == 8 * 8  # those of one output are not those of the next, shifted
    assert all(((numbers >= 0) & (numbers < 1)).all() for numbers in neighbours)


def test_random_numbers_are_uniform_over_tokens_and_over_outputs() -> None:
    numbers = np.array([uniforms(9, 0, i, 40) for i in range(1000)])
    for one_way in (numbers.ravel()[:4000], numbers[:, :4].ravel()):
        assert np.abs(np.histogram(one_way, 10, (0, 1))[0] - 400).max() < 90


def test_what_is_drawn_survives_another_rounding_of_flat_logits() -> None:
    """A stream that moved goes on with other logits by a rounding: drawing by rank in a sum over all tokens before one
    would change one draw in nine here."""
    rng = np.random.default_rng(11)
    rows = torch.from_numpy(rng.normal(0, 1, (200, 8000)).astype(np.float32))
    tasks = [task(i, index=i, seed=3) for i in range(200)]
    before, after = sample(rows, tasks), sample(rows.bfloat16(), tasks)
    assert sum(one.token_ids[0] != other.token_ids[0] for one, other in zip(before, after, strict=True)) <= 4


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    rows = logits(1, rows=5)
    alone = [sample(rows[i : i + 1], [task(i, index=i, seed=i)])[0] for i in range(5)]
    order = [3, 0, 4, 1, 2]
    together = sample(rows[order], [task(i, index=i, seed=i) for i in order])
    assert {one.row_id: one.token_ids[0] for one in together} == {one.row_id: one.token_ids[0] for one in alone}


def test_tokens_come_in_proportion_to_their_probability() -> None:
    row = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    counts = np.bincount(drawn(row, 2000), minlength=4) / 2000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.04)


def test_temperature_zero_takes_the_largest() -> None:
    row = logits(2)
    assert set(drawn(row, 20, temperature=0.0)) == {int(row.argmax())}


def test_top_k_keeps_the_k_largest() -> None:
    row = logits(3)
    assert set(drawn(row, top_k=3, temperature=5.0)) == set(row[0].topk(3).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    row = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert set(drawn(row, top_p=0.65)) == {0, 1}
    assert set(drawn(row, top_p=0.71)) == {0, 1, 2}
    assert set(drawn(row, top_p=1e-9)) == {0}


def test_top_p_of_a_flat_distribution_over_many_tokens() -> None:
    row = torch.linspace(0, 0.1, 5000).unsqueeze(0)
    weights = torch.softmax(row[0], 0).sort(descending=True).values.cumsum(0)
    kept = int((weights < 0.5).sum()) + 1
    assert drawn(row, top_p=0.5).min() >= 5000 - kept


def test_min_p_is_relative_to_the_most_likely() -> None:
    row = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert set(drawn(row, min_p=0.25)) == {0, 1, 2}


@pytest.mark.behaviour("58")
def test_presence_and_frequency_count_outputs_only() -> None:
    row = torch.tensor([[2.0, 1.9, 1.0, 0.0]])
    greedy = {"temperature": 0.0, "context": int32_array([0, 1, 1]), "prompt_len": 1}
    assert sample(row, [task(presence_penalty=0.5, **greedy)])[0].token_ids[0] == 0
    assert sample(row, [task(presence_penalty=-0.5, **greedy)])[0].token_ids[0] == 1
    assert sample(row, [task(frequency_penalty=-0.06, **greedy)])[0].token_ids[0] == 1
    assert sample(row, [task(frequency_penalty=-0.04, **greedy)])[0].token_ids[0] == 0


@pytest.mark.behaviour("58")
def test_repetition_counts_the_prompt_too() -> None:
    row = torch.tensor([[2.0, 1.9, -0.5, -0.6]])
    greedy = {"temperature": 0.0, "prompt_len": 2}
    assert sample(row, [task(repetition_penalty=1.2, context=int32_array([0, 2]), **greedy)])[0].token_ids[0] == 1
    below = torch.tensor([[-5.0, -5.0, -0.5, -0.6]])
    assert sample(below, [task(repetition_penalty=1.5, context=int32_array([0, 2]), **greedy)])[0].token_ids[0] == 3


def test_bias_and_bans_move_the_argmax() -> None:
    row = torch.tensor([[2.0, 1.9, 1.0, 0.0]])
    assert sample(row, [task(temperature=0.0, logit_bias={3: 5.0})])[0].token_ids[0] == 3
    assert sample(row, [task(temperature=0.0, banned_ids=(0, 1))])[0].token_ids[0] == 2


def test_only_allowed_tokens_are_drawn_and_banned_ones_never() -> None:
    row = logits(6)
    allowed = (3, 17, 40)
    assert set(drawn(row, allowed_token_ids=allowed, temperature=2.0)) == set(allowed)
    assert set(drawn(row, allowed_token_ids=allowed, banned_token_ids=(17,), temperature=2.0)) == {3, 40}
    best = int(row.argmax())
    assert best not in drawn(row, banned_token_ids=(best,))
    assert sample(row, [task(temperature=0.0, allowed_token_ids=allowed)])[0].token_ids[0] in allowed


def test_an_allow_list_leaves_the_odds_among_its_tokens_as_they_are() -> None:
    row = torch.full((1, VOCAB), 50.0)
    row[0, 3], row[0, 4] = 1.0, 1.0 + np.log(3.0)
    counts = np.bincount(drawn(row, 2000, allowed_token_ids=(3, 4)), minlength=5)
    assert counts[3] + counts[4] == 2000
    assert counts[4] / counts[3] == pytest.approx(3.0, rel=0.2)


def test_an_allow_list_that_is_banned_or_unknown_fails_its_row_alone() -> None:
    rows = logits(8, rows=3)
    tasks = [task(0, allowed_token_ids=(5,), banned_token_ids=(5,)), task(1, allowed_token_ids=(VOCAB,)), task(2)]
    assert [one.error is None for one in sample(rows, tasks)] == [False, False, True]


@pytest.mark.behaviour("55")
def test_logprobs_are_the_models_own() -> None:
    row = logits(6)
    expected = torch.log_softmax(row[0], 0)
    one = sample(row, [task(temperature=0.0, logit_bias={7: 100.0}, num_top_logprobs=4)])[0]
    assert one.token_ids[0] == 7
    assert one.logprobs[0] == pytest.approx(float(expected[7]), abs=1e-6)
    assert [token for token, _ in one.top_logprobs[0]] == expected.topk(4).indices.tolist()
    assert sample(row, [task(num_top_logprobs=0)])[0].top_logprobs == ()
    assert sample(row, [task()])[0].logprobs == ()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_broken_row_fails_alone(poison: float) -> None:
    rows = logits(7, rows=3)
    rows[1, 5] = poison
    results = sample(rows, [task(i, temperature=0.0) for i in range(3)])
    assert [one.error is None for one in results] == [True, False, True]
    assert results[2].token_ids[0] == int(rows[2].argmax())


def test_a_row_with_nothing_left_or_an_unknown_token_fails_alone() -> None:
    rows = logits(8, rows=3)
    everything = tuple(range(VOCAB))
    results = sample(rows, [task(0, banned_ids=everything), task(1, logit_bias={VOCAB: 1.0}), task(2)])
    assert [one.error is None for one in results] == [False, False, True]


def test_extreme_logits_still_draw_a_likely_token() -> None:
    row = torch.full((1, VOCAB), -1e30)
    row[0, 9] = 1e30
    assert set(drawn(row, 20, temperature=0.01)) == {9}
