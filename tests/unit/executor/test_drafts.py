"""A row that ends in guessed tokens draws what it would have drawn without them, several at once."""

from collections.abc import Iterator

import numpy as np
import pytest

from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, PendingToken, Row, Sampled, SampleSpec
from headstart.core.errors import InvariantError
from headstart.core.request import SamplingParams
from headstart.executor.build import ExecutorConfig
from headstart.executor.drafts import accepted
from headstart.model.source import WeightSource
from tests.unit.executor.world import World, write_small_model

PROMPT = np.random.default_rng(1).integers(1, 311, 37).tolist()
PARAMS = SamplingParams(seed=11, temperature=0.8, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5)
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = write_small_model(tmp_path_factory.mktemp("model"), "qwen3")
    world = World(ExecutorConfig(WeightSource(folder, "dummy"), 16, dtype="float32", num_pages=64, self_test=False))
    yield world
    world.executor.close()


def step(world: World, tokens: list[int], start: int, pages: list[int], drafts: list[int]) -> Sampled:
    """Give a row the tokens from `start` on, then `drafts`."""
    spec = SampleSpec(PARAMS, 0, len(tokens) - len(PROMPT), int32_array(tokens), len(PROMPT), num_top_logprobs=2)
    row = Row(5, int32_array([*tokens[start:], *drafts]), start, int32_array(pages), spec, num_drafts=len(drafts))
    (sampled,) = world.run([row]).sampled
    return sampled


def without_drafts(world: World, pages: list[int]) -> list[Sampled]:
    tokens, found = list(PROMPT), []
    for _ in range(NUM_TOKENS):
        found.append(step(world, tokens, len(tokens) - 1 if found else 0, pages, []))
        tokens.append(found[-1].token_ids[0])
    return found


def test_drafts_change_nothing_but_the_number_of_steps(world: World) -> None:
    expected = [one.token_ids[0] for one in without_drafts(world, list(range(4)))]
    logprobs = [one.logprobs[0] for one in without_drafts(world, list(range(4)))]
    tokens, steps, got_logprobs, rng = list(PROMPT), 0, [], np.random.default_rng(0)
    while len(tokens) < len(PROMPT) + NUM_TOKENS:
        known = expected[len(tokens) - len(PROMPT) :][:3]
        drafts = [token if rng.random() < 0.7 else (token + 1) % 311 for token in known]
        one = step(world, tokens, len(tokens) - 1 if steps else 0, list(range(10, 14)), drafts)
        right = next((i for i, (a, b) in enumerate(zip(drafts, known, strict=True)) if a != b), len(drafts))
        assert len(one.token_ids) == right + 1 == len(one.logprobs) == len(one.top_logprobs)
        tokens += one.token_ids
        got_logprobs += one.logprobs
        steps += 1
    assert tokens[len(PROMPT) :][:NUM_TOKENS] == expected
    assert got_logprobs[:NUM_TOKENS] == pytest.approx(logprobs, abs=1e-3)
    assert steps < NUM_TOKENS


def drawn(*tokens: int | None) -> list[Sampled]:
    return [Sampled(5, () if token is None else (token,), error="bad" if token is None else None) for token in tokens]


@pytest.mark.parametrize(
    ("drafts", "tokens", "kept"),
    [([], [7], (7,)), ([3], [7, 8], (7,)), ([7], [7, 8], (7, 8)), ([7, 9, 4], [7, 8, 9, 9], (7, 8))],
)
def test_tokens_count_up_to_the_first_wrong_draft(drafts: list[int], tokens: list[int], kept: tuple[int, ...]) -> None:
    row = Row(5, int32_array([1, *drafts]), 0, int32_array([0]), num_drafts=len(drafts))
    assert accepted(row, drawn(*tokens)).token_ids == kept


def test_a_position_that_fails_ends_the_row_there() -> None:
    row = Row(5, int32_array([1, 7, 8]), 0, int32_array([0]), num_drafts=2)
    assert accepted(row, drawn(7, None, 9)).token_ids == (7,)
    assert accepted(row, drawn(None, 8, 9)).error == "bad"


def test_one_step_in_flight_takes_no_pending_tokens(world: World) -> None:
    row = Row(0, int32_array([]), 3, int32_array([0]), pending=PendingToken(1, 0))
    with pytest.raises(InvariantError, match="waits for a token"):
        world.executor.launch(Batch(99, (row,)))
