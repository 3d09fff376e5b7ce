"""Position scaling depends on a row's own positions only: no neighbour and no cached prefix changes an answer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from headstart.core.errors import WorkerError
from headstart.executor.build import ExecutorConfig
from headstart.model.info import fix_context, parse_overrides, read_model_config, read_model_info, rope_settings
from headstart.model.load import load_model
from headstart.model.refused import ModelRefused
from headstart.model.source import WeightSource
from tests.models.sweep import assert_generated, prompt
from tests.models.tiny import VOCAB, tiny_config, write_config, write_weights
from tests.unit.executor.world import Sequence_, World

ORIGINAL, LONGEST = 128, 512
LONG = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}


def write_scaled(folder: Path, model_type: str, rope: dict[str, object]) -> Path:
    """A tiny model whose rope parameters are `rope`, with the weights it would have without them."""
    config = tiny_config(model_type)
    config.original_max_position_embeddings = ORIGINAL
    write_config(folder, config)
    write_weights(folder, config)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"rope_parameters": rope}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scaled(tmp_path_factory.mktemp("phi3"), "phi3", LONGROPE)


def library(folder: Path, **rope: object) -> PreTrainedModel:
    """The library's model alone, with changed rope parameters."""
    overrides = {"rope_parameters": LONGROPE | rope}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **overrides)
    model.generation_config.eos_token_id = None
    return model.eval()


def world_of(folder: Path, context_length: int | str) -> World:
    overrides = fix_context(folder, "", context_length)
    return World(ExecutorConfig(WeightSource(folder, overrides=overrides), 16, num_pages=128, dtype="float32"))


@pytest.fixture(scope="module")
def cut(folder: Path) -> Iterator[World]:
    world = world_of(folder, "auto")
    yield world
    world.executor.close()


@pytest.fixture(scope="module")
def long(folder: Path) -> Iterator[World]:
    world = world_of(folder, LONGEST)
    yield world
    world.executor.close()


def run(world: World, *sequences: Sequence_, num_tokens: int = 5) -> None:
    world.generate(list(sequences), num_tokens, chunk=64, stagger=1, num_top=VOCAB)


def test_the_context_is_cut_where_the_short_factors_end(folder: Path) -> None:
    overrides = parse_overrides(fix_context(folder, "", "auto"))
    assert read_model_info(folder, overrides).context_len == ORIGINAL
    assert read_model_info(folder, parse_overrides(fix_context(folder, "", 300))).context_len == 300
    assert read_model_info(folder, parse_overrides(fix_context(folder, "", 9999))).context_len == LONGEST


def test_within_the_cut_context_answers_are_the_librarys(folder: Path, cut: World) -> None:
    short, other = cut.admit(prompt(0, 60)), cut.admit(prompt(1, 110))
    run(cut, short, other)
    warm = cut.admit(prompt(0, 60), like=short)
    run(cut, warm)
    for sequence in (short, other, warm):
        assert_generated(sequence, library(folder))


def test_a_long_prompt_on_a_cached_short_prefix_answers_as_cold(folder: Path, long: World) -> None:
    first = long.admit(prompt(2, 97))
    run(long, first)
    warm = long.admit([*first.tokens[:97], *prompt(3, 103)], like=first)
    assert warm.num_computed == 96
    cold = long.admit(warm.tokens)
    run(long, warm)
    run(long, cold)
    assert warm.outputs == cold.outputs
    assert_generated(warm, library(folder))  # of a prompt this long the library itself uses the long factors


def test_a_short_prompt_answers_beside_a_long_one_as_alone(folder: Path, long: World) -> None:
    beside = [long.admit(prompt(5, 300)), long.admit(prompt(4, 60))]
    run(long, *beside)
    alone = long.admit(prompt(4, 60))
    run(long, alone)
    assert beside[1].outputs == alone.outputs
    with_long_factors = library(folder, short_factor=LONG)
    assert_generated(alone, with_long_factors)
    assert_generated(beside[0], with_long_factors)


def test_an_answer_that_crosses_the_original_context_stays_right(folder: Path, long: World) -> None:
    crossing = long.admit(prompt(6, 100))
    run(long, crossing, num_tokens=60)
    with torch.inference_mode():
        logits = library(folder, short_factor=LONG)(torch.tensor([crossing.tokens])).logits[0]
    for i, token in enumerate(crossing.outputs):
        row = logits[99 + i]
        assert float(row.max() - row[token]) < 2e-3


def test_dynamic_scaling_never_begins_within_the_served_context(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path, "llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})
    world = world_of(folder, "auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    sequences = [world.admit(prompt(7, 400)), world.admit(prompt(8, 40))]
    run(world, *sequences)
    for sequence in sequences:
        assert_generated(sequence, model)
    rotary = world.executor.model.model.rotary_emb
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1, 1, 64), torch.tensor([[5000]]))
    assert torch.equal(rotary.inv_freq, before)
    world.executor.close()


def test_workers_of_different_contexts_have_different_rope_settings(folder: Path) -> None:
    settings = {
        rope_settings(read_model_config(folder, parse_overrides(fix_context(folder, "", length))))
        for length in ("auto", 300, LONGEST)
    }
    assert len(settings) == 3


def test_a_model_without_two_sets_of_factors_keeps_its_overrides(tmp_path: Path) -> None:
    write_config(tmp_path, tiny_config("llama"))
    assert fix_context(tmp_path, '{"rope_theta": 5.0}', 64) == '{"rope_theta": 5.0}'


def test_scaling_that_the_fix_does_not_reach_is_refused_by_the_self_test(tmp_path: Path) -> None:
    rope = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.5}
    folder = write_scaled(tmp_path, "phimoe", rope)
    with pytest.raises(ModelRefused, match=r"phimoe.* at positions 0 and 509 of one step"):
        world_of(folder, LONGEST)
    world = world_of(folder, "auto")
    sequence = world.admit(prompt(9, 60))
    run(world, sequence)
    assert_generated(sequence, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval())
    world.executor.close()


def test_a_position_is_encoded_alike_whatever_else_is_in_the_step(folder: Path) -> None:
    model = load_model(WeightSource(folder, overrides=fix_context(folder, "", LONGEST)), torch.float32)
    hidden = torch.zeros(1, 1, 64)
    alone = model.model.rotary_emb(hidden, torch.tensor([[5]]))
    beside = model.model.rotary_emb(hidden, torch.tensor([[5, 400]]))
    assert all(torch.equal(one, both[:, :1]) for one, both in zip(alone, beside, strict=True))


def test_an_unknown_rope_type_is_refused_by_name(tmp_path: Path) -> None:
    write_scaled(tmp_path, "llama", {"rope_type": "spiral", "rope_theta": 10000.0})
    with pytest.raises(WorkerError, match="rope type 'spiral'"):
        load_model(WeightSource(tmp_path), torch.float32)
