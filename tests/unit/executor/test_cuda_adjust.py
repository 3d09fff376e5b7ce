"""Penalties, truncation and counts of a batch, beside the CPU sampler's of one row at a time."""

import numpy as np
import pytest
import torch

from headstart.core.arrays import int32_array
from headstart.core.batch import PendingToken, Row, SampleSpec
from headstart.core.request import SamplingParams
from headstart.executor.cuda.adjust import Penalties, Truncation, logprobs_of
from headstart.executor.cuda.history import TokenHistory
from headstart.executor.cuda.positions import Kinds, Position, positions_of, write_columns
from headstart.executor.sampler import _adjusted, _truncate

VOCAB = 200
CPU = torch.device("cpu")


def logits(seed: int, rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32))


def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


@pytest.mark.parametrize("seed", range(20))
def test_floors_leave_what_the_cpu_sampler_leaves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(
            temperature=float(rng.uniform(0.1, 3)),
            top_k=int(rng.integers(0, VOCAB + 3)),
            top_p=float(rng.choice([1.0, rng.uniform(0.01, 1)])),
            min_p=float(rng.choice([0.0, rng.uniform(0, 1)])),
        )
        for _ in range(16)
    ]
    rows = logits(seed, 16)
    rows[3, 40:] = -torch.inf
    rows[4] = rows[4].round()  # many equal ones
    truncation = Truncation(
        column([one.temperature for one in params]),
        column([one.top_k for one in params], torch.int64),
        column([one.top_p for one in params]),
        column([one.min_p for one in params]),
    )
    for row, floor, one in zip(rows.numpy(), truncation.floors(rows).numpy(), params, strict=True):
        weights = np.exp((row.astype(np.float64) - row.max()) / one.temperature)
        _truncate(weights, one)
        assert np.array_equal((row >= floor) & np.isfinite(row), weights > 0)


def test_floors_of_small_top_k_need_no_whole_sort() -> None:
    rng = np.random.default_rng(5)
    rows = torch.from_numpy(rng.normal(0, 1, (6, 5000)).astype(np.float32)).bfloat16().float()
    rows[5] = 1.0  # all tied
    top_k = column([1, 20, 20, 50, 400, 30], torch.int64)
    truncation = Truncation(
        column([0.7] * 6), top_k, column([1.0, 1.0, 0.8, 0.5, 0.9, 0.6]), column([0, 0, 0.1, 0, 0.02, 0])
    )
    assert torch.equal(truncation.floors(rows, most=400), truncation.floors(rows))


class Counting:
    """A penalised row from step to step."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2, seed=seed)
        self.tokens = self.rng.integers(0, VOCAB, 12).tolist()

    def position(self, place: int, pending: bool) -> Position:
        pending = pending and len(self.tokens) > 12  # a prompt's tokens are known
        context = int32_array(self.tokens[:-1] if pending else self.tokens)
        spec = SampleSpec(self.params, 0, len(self.tokens) - 12, context, 12)
        tokens = int32_array([] if pending else self.tokens[-1:])
        waits = PendingToken(1, 1) if pending else None
        return Position(place, Row(place, tokens, len(self.tokens) - 1, int32_array([0]), spec, pending=waits), spec, 0)

    def expected(self, row: torch.Tensor) -> np.ndarray:
        return _adjusted(row, SampleSpec(self.params, 0, 0, int32_array(self.tokens), 12))


def test_counts_go_on_from_step_to_step_whatever_is_pending() -> None:
    rng, history = np.random.default_rng(0), TokenHistory(VOCAB, 4, CPU)
    rows = [Counting(seed) for seed in range(3)]
    for step in range(30):
        active = [row for row in rows if rng.random() < 0.8]
        if not active:
            continue
        positions = [row.position(place, rng.random() < 0.5) for place, row in enumerate(active)]
        seen, counts = history.advance(positions, torch.tensor([row.tokens[-1] for row in active]))
        params = [row.params for row in active]
        penalties = Penalties(
            column([one.repetition_penalty for one in params]),
            column([one.frequency_penalty for one in params]),
            column([one.presence_penalty for one in params]),
        )
        raw = logits(step, len(active))
        adjusted = penalties.apply(raw, seen, counts)
        for got, row, one in zip(adjusted, raw, active, strict=True):
            np.testing.assert_allclose(got.numpy(), one.expected(row), rtol=1e-6, atol=1e-6)
        for row in active:
            row.tokens.append(int(rng.integers(0, VOCAB)))


def test_more_sequences_than_slots_are_counted_anew() -> None:
    history = TokenHistory(VOCAB, 2, CPU)
    rows = [Counting(seed) for seed in range(5)]
    for _ in range(2):
        for row in rows:
            seen, counts = history.advance([row.position(0, False)], torch.tensor(row.tokens[-1:]))
            assert set(seen[0].nonzero().flatten().tolist()) == set(row.tokens)
            assert int(counts.sum()) == len(row.tokens) - 12


def test_drafts_are_counted_as_far_as_they_come_before_the_position() -> None:
    row = Counting(1)
    spec = SampleSpec(row.params, 0, 0, int32_array(row.tokens), 12)
    tokens = int32_array([row.tokens[-1], 7, 8])
    positions = list(positions_of(Row(0, tokens, 11, int32_array([0]), spec, num_drafts=2), 0))
    _, counts = TokenHistory(VOCAB, 8, CPU).advance(positions, torch.zeros(3, dtype=torch.int64))
    assert [one.nonzero().flatten().tolist() for one in counts] == [[], [7], [7, 8]]


def test_columns_tell_how_each_place_is_drawn() -> None:
    plain = SampleSpec(SamplingParams(seed=2**64 - 1, temperature=0.5), 3, 9, int32_array([1]), 1)
    greedy = SampleSpec(SamplingParams(temperature=0.0, top_p=0.5), 0, 0, int32_array([1]), 1)
    cut = SampleSpec(SamplingParams(top_p=0.5), 0, 0, int32_array([1]), 1)
    named = SampleSpec(SamplingParams(), 0, 0, int32_array([1]), 1, banned_ids=(4,))
    rows = [Row(i, int32_array([1]), 0, int32_array([0]), one) for i, one in enumerate((plain, greedy, cut, named))]
    positions = [Position(i, row, row.sample, 0) for i, row in enumerate(rows)]  # type: ignore[arg-type]
    block = np.zeros((4, 8), np.int64)
    assert write_columns(block, positions, Kinds()) == positions[2:]
    assert block[0, 3:].tolist() == [2, -1, np.float64(0.5).view(np.int64), 9, 3]
    assert block[1, 3:5].tolist() == [1, 0]
    assert not block[2:].any()


def test_logprobs_are_those_of_the_raw_logits() -> None:
    rows = logits(0, 2)
    chosen, values, ids = logprobs_of(rows, torch.tensor([4, 5]), 3)
    expected = torch.log_softmax(rows, -1)
    torch.testing.assert_close(chosen, torch.stack((expected[0, 4], expected[1, 5])))
    torch.testing.assert_close(values, expected.topk(3).values)
    assert torch.equal(ids, expected.topk(3).indices)
    assert len(logprobs_of(rows, torch.tensor([4, 5]), 0)) == 1
