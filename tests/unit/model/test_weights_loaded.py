"""A model is loaded with every tensor that it has, from the files, or it is refused with their names."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.model.load import load_model
from headstart.model.refused import ModelRefused
from headstart.model.source import WeightSource
from tests.models.tiny import tiny_config, write_config, write_weights

Tensors = dict[str, torch.Tensor]


def write(folder: Path, model_type: str = "llama", **changes: object) -> Path:
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    write_config(folder, config)
    write_weights(folder, config)
    return folder


def change(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in edit(load_file(path)).items()}, path, {"format": "pt"})


def refusal(folder: Path) -> str:
    with pytest.raises(ModelRefused) as refused:
        load_model(WeightSource(folder), torch.float32)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def test_a_complete_folder_loads(tmp_path: Path) -> None:
    load_model(WeightSource(write(tmp_path)), torch.float32)


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.norm.weight"],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    change(write(tmp_path), without(name))
    assert f"lacks 1 tensors: {name}" in refusal(tmp_path)


def test_names_with_a_strange_prefix_are_missing_and_unexpected(tmp_path: Path) -> None:
    change(write(tmp_path), lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()})
    said = refusal(tmp_path)
    assert "lacks 21 tensors: lm_head.weight" in said
    assert "holds 21 tensors that the model has no place for: module.lm_head.weight" in said
    assert "and 17 more" in said


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(write(tmp_path), lambda tensors: tensors | {name: tensors[name][:-1]})
    assert f"{name} [95, 64] for [96, 64]" in refusal(tmp_path)


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    change(write(tmp_path), lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    assert "no place for: model.layers.0.self_attn.q_proj.bias" in refusal(tmp_path)


def test_layers_beyond_the_configuration_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ModelRefused, match=r"no place for: model\.layers\.1\."):
        load_model(WeightSource(tmp_path, overrides='{"num_hidden_layers": 1}'), torch.float32)


def test_tied_embeddings_are_not_missing(tmp_path: Path) -> None:
    model = load_model(WeightSource(write(tmp_path, tie_word_embeddings=True)), torch.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_buffers_that_old_checkpoints_carry_are_no_reason(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(write(tmp_path), lambda tensors: tensors | {name: torch.ones(8)})
    load_model(WeightSource(tmp_path), torch.float32)


def test_a_truncated_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors is truncated" in refusal(tmp_path)
