"""Whatever way a prompt takes through the executor, tokens, logits and KV are the model library's own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headstart.executor.build import ExecutorConfig
from headstart.model.source import WeightSource
from tests.support.executors import World, assert_greedy, assert_same_kv, reference_model, write_small_model

NUM_TOKENS = 12
VOCAB = 311


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module", params=[1, 16, 64], ids=lambda size: f"page{size}")
def world(folder: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    page_size = request.param
    config = ExecutorConfig(
        WeightSource(folder, "dummy", seed=3), page_size, dtype="float32", num_pages=20_000 // page_size
    )
    world = World(config)
    world.executor.pool.data.fill_(torch.nan)  # reading a position that no row has written shows
    yield world
    world.executor.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return reference_model(WeightSource(folder, "dummy", seed=3))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def check(world: World, sequences: list, reference: PreTrainedModel) -> None:
    for sequence in sequences:
        assert_greedy(sequence, reference)
        assert_same_kv(world, sequence, reference)


def test_a_cold_prompt_in_one_chunk(world: World, reference: PreTrainedModel) -> None:
    sequence = world.admit(prompt(0, 150))
    world.generate([sequence], NUM_TOKENS, chunk=512, num_top=VOCAB)
    check(world, [sequence], reference)


@pytest.mark.behaviour("62")
def test_generate_itself_gives_the_same_tokens(world: World, reference: PreTrainedModel) -> None:
    sequence = world.admit(prompt(1, 40))
    world.generate([sequence], NUM_TOKENS, chunk=512)
    ids = torch.tensor([sequence.tokens[: sequence.prompt_len]])
    expected = reference.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert_greedy(sequence, reference)
    assert sequence.tokens == expected[0].tolist()


def test_a_prompt_of_one_token(world: World, reference: PreTrainedModel) -> None:
    sequence = world.admit(prompt(2, 1))
    world.generate([sequence], NUM_TOKENS, chunk=512, num_top=VOCAB)
    check(world, [sequence], reference)


@pytest.mark.parametrize("chunk", [5, 64])
def test_a_prompt_in_chunks(world: World, reference: PreTrainedModel, chunk: int) -> None:
    sequence = world.admit(prompt(3, 133))
    world.generate([sequence], NUM_TOKENS, chunk=chunk, num_top=VOCAB)
    check(world, [sequence], reference)


def test_sixteen_prompts_of_all_lengths_in_one_batch(world: World, reference: PreTrainedModel) -> None:
    sequences = [world.admit(prompt(10 + i, 1 + 11 * i)) for i in range(16)]
    world.generate(sequences, NUM_TOKENS, chunk=32, num_top=VOCAB)
    check(world, sequences, reference)


def test_prompts_that_join_while_others_decode(world: World, reference: PreTrainedModel) -> None:
    sequences = [world.admit(prompt(40 + i, 50 + i)) for i in range(4)]
    world.generate(sequences, NUM_TOKENS, chunk=16, stagger=3, num_top=VOCAB)
    check(world, sequences, reference)


def test_requests_that_share_a_prefix_read_its_pages(world: World, reference: PreTrainedModel) -> None:
    common = prompt(50, 600)
    first = world.admit(common + prompt(51, 5))
    world.generate([first], NUM_TOKENS, chunk=256)
    followers = [world.admit(common + prompt(52 + i, 3 + 20 * i), like=first) for i in range(5)]
    assert all(one.num_computed >= 576 for one in followers)
    world.generate(followers, NUM_TOKENS, chunk=24, stagger=1, num_top=VOCAB)
    check(world, [first, *followers], reference)


def test_a_tree_of_shared_prefixes(world: World, reference: PreTrainedModel) -> None:
    root = world.admit(prompt(60, 320) + prompt(61, 320))
    world.generate([root], 1, chunk=640)
    inner = [world.admit(root.tokens[:320] + prompt(62, 320) + prompt(63 + i, 9), like=root) for i in range(2)]
    world.generate(inner[:1], 1, chunk=640)
    inner[1] = world.admit(inner[1].tokens, like=inner[0])
    leaves = [world.admit(root.tokens[:640] + prompt(70 + i, 4 + i), like=root) for i in range(3)]
    sequences = [*leaves, *inner, world.admit(prompt(80, 30))]
    world.generate(sequences, NUM_TOKENS, chunk=64, num_top=VOCAB)
    check(world, sequences, reference)


@pytest.mark.behaviour("62")
def test_a_second_turn_on_the_pages_of_the_first(world: World, reference: PreTrainedModel) -> None:
    first = world.admit(prompt(90, 70))
    world.generate([first], NUM_TOKENS, chunk=512)
    second = world.admit(first.tokens + prompt(91, 25), like=first)
    world.generate([second], NUM_TOKENS, chunk=512, num_top=VOCAB)
    check(world, [second], reference)


def test_grouped_and_ungrouped_attention_agree(folder: Path) -> None:
    results = []
    for grouped in (True, False):
        source = WeightSource(folder, "dummy", seed=3)
        world = World(ExecutorConfig(source, 16, dtype="float32", num_pages=400, grouped_attention=grouped))
        first = world.admit(prompt(50, 600))
        world.generate([first], 1, chunk=600)
        rest = [world.admit(first.tokens[:600] + prompt(51 + i, 6), like=first) for i in range(4)]
        world.generate(rest, 4, chunk=64, num_top=VOCAB)
        results.append(np.stack([np.stack(one.logprobs) for one in rest]))
        world.executor.close()
    np.testing.assert_allclose(results[0], results[1], atol=1e-3)
