"""The demo model through both workers, prompts computed by prefill and moved, greedy in fp32, against the library."""

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from headstart.executor.build import ExecutorConfig
from headstart.model.source import DEMO_MODEL, WeightSource, resolve_model
from tests.support.executors import assert_greedy, reference_model
from tests.support.stacks import Engine, StackSpec, StackWorld, engines
from tests.unit.executor.test_demo_model import NUM_TOKENS, texts

Engines = tuple[Engine, Engine]


@pytest.fixture(scope="module")
def pair() -> Iterator[Engines]:
    with engines(ExecutorConfig(WeightSource(resolve_model(DEMO_MODEL)), 16, 128, dtype="float32")) as pair:
        yield pair


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return reference_model(WeightSource(resolve_model(DEMO_MODEL)))


def check(pair: Engines, reference: PreTrainedModel, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model(DEMO_MODEL) / "tokenizer.json"))
    world = StackWorld(*pair, StackSpec(chunk=64))
    answers = world.ask(*(tokenizer.encode(text).ids for text in texts), num_tokens=NUM_TOKENS)
    for answer in answers:
        assert_greedy(answer.sequence(), reference)
        start, end = answer.stats.decode_prefix_len, len(answer.request.prompt) - 1
        assert answer.stats.bytes_moved == world.bytes_for(start, end)
    assert world.counters().get("local_prefill_tokens", 0) == 0


@pytest.mark.behaviour("62")
def test_twelve_prompts(pair: Engines, reference: PreTrainedModel) -> None:
    check(pair, reference, texts(12))


@pytest.mark.full
@pytest.mark.behaviour("62")
def test_fifty_prompts(pair: Engines, reference: PreTrainedModel) -> None:
    for first in range(0, 50, 10):
        check(pair, reference, texts(50)[first : first + 10])
