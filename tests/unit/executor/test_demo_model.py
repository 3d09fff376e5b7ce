"""The demo model, greedy in fp32, against the model library."""

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from headstart.executor.build import ExecutorConfig
from headstart.model.source import DEMO_MODEL, WeightSource, resolve_model
from tests.support.executors import World, assert_greedy, reference_model

NUM_TOKENS = 24
TOPICS = ["tea", "the moon", "prime numbers", "Lisbon", "glaciers", "bees", "chess", "sleep", "steam", "rice"]
QUESTIONS = [
    "What is {}?",
    "Write one sentence about {}.",
    "def about_{}():\n    return",
    "List three facts on {}: 1.",
    "<|im_start|>user\nTell me of {}.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    source = WeightSource(resolve_model(DEMO_MODEL))
    world = World(ExecutorConfig(source, 16, dtype="float32", num_pages=600))
    yield world
    world.executor.close()


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return reference_model(WeightSource(resolve_model(DEMO_MODEL)))


def check(world: World, reference: PreTrainedModel, texts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model(DEMO_MODEL) / "tokenizer.json"))
    sequences = [world.admit(tokenizer.encode(text).ids) for text in texts]
    world.generate(sequences, NUM_TOKENS, chunk=64)
    for sequence in sequences:
        assert_greedy(sequence, reference)


def texts(count: int) -> list[str]:
    return [QUESTIONS[i % len(QUESTIONS)].format(TOPICS[i // len(QUESTIONS) % len(TOPICS)]) for i in range(count)]


@pytest.mark.behaviour("62")
def test_twelve_prompts(world: World, reference: PreTrainedModel) -> None:
    check(world, reference, texts(12))


@pytest.mark.full
def test_fifty_prompts(world: World, reference: PreTrainedModel) -> None:
    for first in range(0, 50, 10):
        check(world, reference, texts(50)[first : first + 10])
