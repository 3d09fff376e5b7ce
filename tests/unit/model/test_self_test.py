"""The self-test refuses what would answer wrongly, with the number of calls and the difference of logits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from headstart.attention.torch_cpu import CpuAttention
from headstart.executor.build import ExecutorConfig, make_executor
from headstart.executor.pool import KVPool, PoolShape
from headstart.model.hook import ATTENTION_NAME, register_attention
from headstart.model.info import geometry
from headstart.model.refused import ModelRefused
from headstart.model.self_test import ScratchPool, SelfTest, check_model, library_logits, num_test_pages
from headstart.model.source import WeightSource
from tests.models.tiny import tiny_config, write_config, write_weights

PAGE_SIZE = 16


def loaded(config: PretrainedConfig) -> PreTrainedModel:
    """The library's model with our attention and no rule of ours before it."""
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def check(
    model: PreTrainedModel, expected: SelfTest | None = None, context_len: int = 512, page_size: int = PAGE_SIZE
) -> None:
    sizes = geometry(model.config.to_dict())
    shape = PoolShape(num_test_pages(page_size), sizes.num_layers, sizes.num_kv_heads, page_size, sizes.head_dim)
    attention = CpuAttention(KVPool.allocate(shape, torch.float32, "cpu").data.fill_(torch.nan))
    pool = ScratchPool(attention.begin, page_size, sizes.num_layers)
    check_model(model, expected or library_logits(model), pool, torch.float32, context_len)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_model_that_is_right_passes(page_size: int) -> None:
    check(loaded(tiny_config("llama")), page_size=page_size)


@pytest.mark.parametrize("model_type", ["gpt_neox_japanese", "roformer", "xglm"])
def test_a_model_that_goes_round_the_attention_is_refused_with_both_facts(model_type: str) -> None:
    with pytest.raises(ModelRefused, match=rf"'{model_type}'.*calls the attention 0 times.*logits are .* off"):
        check(loaded(tiny_config(model_type)))


def test_a_model_that_calls_the_attention_twice_is_refused() -> None:
    with pytest.raises(ModelRefused, match="layer 0 calls the attention 2 times a step, not once"):
        check(loaded(tiny_config("diffllama")))


def test_a_query_scale_that_counts_from_the_start_of_the_step_is_refused() -> None:
    config = tiny_config("llama4_text")
    config.layer_types = ["full_attention"] * 2
    config.no_rope_layers = [1, 0]
    config.max_position_embeddings = 131_072
    with pytest.raises(ModelRefused, match=r"llama4_text.*at positions 0 and 131069 of one step"):
        check(loaded(config), context_len=131_072)
    config.attn_temperature_tuning = False
    check(loaded(config), context_len=131_072)


def test_one_wrong_weight_is_seen_in_the_logits() -> None:
    model = loaded(tiny_config("llama"))
    expected = library_logits(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3].mul_(1.5)
    with pytest.raises(ModelRefused, match="cold, logits are"):
        check(model, expected)


def test_a_row_that_reads_its_neighbours_keys_is_refused() -> None:
    class Mixed(CpuAttention):
        """Gives every later row the pages of the last one."""

        def begin(self, rows):
            return super().begin([replace(row, pages=rows[-1].pages) if row.start else row for row in rows])

    model = loaded(tiny_config("llama"))
    shape = PoolShape(num_test_pages(PAGE_SIZE), 2, 2, PAGE_SIZE, 16)
    pool = ScratchPool(Mixed(KVPool.allocate(shape, torch.float32, "cpu").data).begin, PAGE_SIZE, 2)
    with pytest.raises(ModelRefused, match="as a single token, logits are"):
        check_model(model, library_logits(model), pool, torch.float32, 512)


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = loaded(tiny_config("llama"))
    expected = library_logits(model)
    with torch.no_grad():
        model.lm_head.weight[7].fill_(torch.nan)
    with pytest.raises(ModelRefused, match="logits are inf off"):
        check(model, expected)


def test_a_step_that_fails_is_one_line_with_the_cause() -> None:
    config = tiny_config("gemma2")
    config.layer_types = ["full_attention"] * 2
    config.attn_logit_softcapping = 2.0
    with pytest.raises(ModelRefused, match=r"gemma2.*not implemented: softcap") as refused:
        check(loaded(config))
    assert "\n" not in str(refused.value)


def test_the_executor_runs_the_test_unless_it_is_told_not_to(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_config(tmp_path, config)
    write_weights(tmp_path, config)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_key_value_heads": 2, "head_dim": 8}))
    executor_config = ExecutorConfig(WeightSource(tmp_path, "dummy"), PAGE_SIZE, 8, dtype="float32")
    make_executor(executor_config).close()
    (tmp_path / "config.json").write_text(json.dumps(content | {"kv_channels": 32, "head_dim": None}))
    with pytest.raises(ModelRefused, match="a step fails"):
        make_executor(executor_config)
    make_executor(replace(executor_config, self_test=False)).close()
