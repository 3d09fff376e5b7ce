"""A rewrite takes a module only if it knows all of its code and parts; answers stay the library's."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from headstart.executor.build import ExecutorConfig
from headstart.model.forms import drops_keywords, has_only, reads_parameters_of, runs_code_of
from headstart.model.fuse import FusedAttention, FusedMLP, FusedNorm, fuse
from headstart.model.linear import Float16Linear, pack_linears, round_linears
from headstart.model.load import load_model
from headstart.model.source import WeightSource
from tests.models.sweep import assert_generated, prompt, reference_model
from tests.models.tiny import VOCAB, tiny_config, write_config, write_weights
from tests.unit.executor.world import World

ROTARY = ("apply_rotary_pos_emb", "rotate_half")


def write(folder: Path, model_type: str, **changes: object) -> Path:
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    write_config(folder, config)
    write_weights(folder, config)
    return folder


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def loaded(folder: Path) -> PreTrainedModel:
    return load_model(WeightSource(folder), torch.float32)


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[PreTrainedModel]:
    return loaded(write(tmp_path, "llama"))


def test_the_common_form_is_taken_whole(llama: PreTrainedModel) -> None:
    fuse(llama)
    assert (count(llama, FusedAttention), count(llama, FusedMLP), count(llama, FusedNorm)) == (2, 2, 5)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("olmo", {"clip_qkv": 0.02}),
        ("glm4_moe", {}),
        ("cohere", {}),
        ("smollm3", {}),
    ],
)
def test_attention_with_a_rule_of_its_own_stays_and_is_served_like_generate(
    tmp_path: Path, model_type: str, changes: dict[str, object]
) -> None:
    folder = write(tmp_path, model_type, **changes)
    world = World(ExecutorConfig(WeightSource(folder), 16, num_pages=64, dtype="float32"))
    assert count(world.executor.model, FusedAttention) == 0
    sequence = world.admit(prompt(0, 40))
    world.generate([sequence], 6, chunk=17, num_top=VOCAB)
    assert_generated(sequence, reference_model(folder))
    world.executor.close()


def test_the_clip_of_olmo_changes_answers(tmp_path: Path) -> None:
    ids = torch.tensor([prompt(0, 40)])
    clipped = reference_model(write(tmp_path / "clipped", "olmo", clip_qkv=0.02))
    free = AutoModelForCausalLM.from_pretrained(tmp_path / "clipped", clip_qkv=None, attn_implementation="eager")
    with torch.inference_mode():
        assert float((clipped(ids).logits - free(ids).logits).abs().max()) > 0.05


def test_a_class_with_the_same_code_is_known_and_one_with_another_is_not(llama: PreTrainedModel) -> None:
    class Clipped(LlamaAttention):
        def forward(self, hidden_states, **keywords):
            return super().forward(hidden_states.clamp(-1, 1), **keywords)

    attention = llama.model.layers[0].self_attn
    assert runs_code_of(attention, (LlamaAttention,), ROTARY)
    assert not runs_code_of(Clipped(llama.config, 0), (LlamaAttention,), ROTARY)
    assert not runs_code_of(llama.model.layers[0].mlp, (LlamaAttention,), ROTARY)


def test_another_helper_function_makes_another_form(tmp_path: Path) -> None:
    glm = loaded(write(tmp_path, "glm4_moe")).model.layers[0].self_attn
    assert not runs_code_of(glm, (LlamaAttention,), ROTARY)


def test_a_part_parameter_buffer_or_hook_that_is_not_known_keeps_the_module(llama: PreTrainedModel) -> None:
    layers = llama.model.layers
    layers[0].self_attn.extra = nn.Dropout(0.0)
    layers[1].self_attn.register_parameter("sinks", nn.Parameter(torch.zeros(4)))
    layers[0].mlp.register_forward_hook(lambda module, given, result: result * 2)
    layers[1].mlp.act_fn = nn.GELU()
    llama.model.norm.register_buffer("shift", torch.zeros(64))
    fuse(llama)
    assert (count(llama, FusedAttention), count(llama, FusedMLP), count(llama, FusedNorm)) == (0, 0, 4)


def test_a_sliding_window_keeps_the_module(tmp_path: Path) -> None:
    model = loaded(write(tmp_path, "mistral"))
    model.config.sliding_window = 8
    fuse(model)
    assert (count(model, FusedAttention), count(model, FusedMLP)) == (0, 2)


def test_has_only_names_every_part(llama: PreTrainedModel) -> None:
    assert has_only(llama.model.norm, set(), {"weight"})
    assert not has_only(llama.model.norm, set())
    assert not has_only(llama.model.layers[0].mlp, {"gate_proj"})
    assert runs_code_of(llama.model.norm, (LlamaRMSNorm,))
    assert runs_code_of(llama.model.layers[0].mlp, (LlamaMLP,))


def test_a_linear_layer_whose_weights_its_parent_reads_is_not_packed() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Linear(8, 8)
            self.down_proj = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.up_proj(x.to(self.up_proj.weight.dtype)))

    model = Reader().requires_grad_(False)
    assert reads_parameters_of(Reader, "up_proj")
    assert not reads_parameters_of(Reader, "down_proj")
    assert pack_linears(model) == 1
    assert type(model.down_proj) is Float16Linear


@pytest.mark.parametrize("rewrite", [pack_linears, round_linears])
def test_a_router_keeps_its_weights_when_others_are_rounded(tmp_path: Path, rewrite: object) -> None:
    model = loaded(write(tmp_path, "hunyuan_v1_moe"))
    before = model.model.layers[0].mlp.gate.wg.weight.clone()
    rewrite(model)
    assert torch.equal(model.model.layers[0].mlp.gate.wg.weight, before)


@pytest.mark.parametrize("model_type", ["hunyuan_v1_moe", "qwen3_moe", "gpt2", "starcoder2"])
def test_float16_weights_serve_close_to_the_library(tmp_path: Path, model_type: str) -> None:
    folder = write(tmp_path, model_type)
    world = World(ExecutorConfig(WeightSource(folder), 16, num_pages=64, dtype="float16"))
    sequence = world.admit(prompt(0, 40))
    world.generate([sequence], 1, chunk=64, num_top=VOCAB)
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([sequence.tokens[:40]])).logits[0, -1]
    expected = torch.log_softmax(logits, -1).numpy()
    assert abs(sequence.logprobs[0] - expected).max() < 0.05
    world.executor.close()


def test_a_parent_that_keeps_keywords_to_itself_is_found(tmp_path: Path, llama: PreTrainedModel) -> None:
    stablelm = loaded(write(tmp_path / "stablelm", "stablelm"))
    assert drops_keywords(type(stablelm.model.layers[0]), "self_attn")
    assert not drops_keywords(type(llama.model.layers[0]), "self_attn")
