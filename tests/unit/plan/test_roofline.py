"""Data sheets and model shapes against bounds worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.config.errors import ConfigError
from headstart.plan.gpu_specs import CARDS, card_named
from headstart.plan.models import PRESETS, model_named
from headstart.plan.roofline import Assumptions, Sharding, pool_tokens, sheet_model
from headstart.sim.cost import StepShape

BOUND = Assumptions(bandwidth_share=1.0, flops_share=800 / 989, step_overhead_s=0.0, request_overhead_s=0.0)
"""The sheet's own memory rate and 800 TFLOP/s, nothing else."""


@pytest.mark.parametrize(
    ("model", "billions", "weight_gb", "kv_bytes"),
    [
        ("Qwen3-1.7B", 1.41, 3.44, 114_688),
        ("Qwen3-8B", 6.95, 15.14, 147_456),
        ("Qwen3-32B", 31.2, 63.97, 262_144),
        ("MiniMax-M2.5", 9.8, None, 253_952),
    ],
)
def test_a_shape_counts_parameters_and_kv(model: str, billions: float, weight_gb: float | None, kv_bytes: int) -> None:
    shape = model_named(model)
    assert shape.weights.per_token == pytest.approx(billions * 1e9, rel=0.01)
    assert shape.kv_bytes_per_token("bfloat16") == kv_bytes
    assert shape.kv_bytes_per_token("fp8") * 2 == kv_bytes
    if weight_gb is not None:
        assert (shape.weights.dense + shape.weights.head) * 2 == pytest.approx(weight_gb * 1e9, rel=0.001)


def test_a_mixture_of_experts_keeps_all_of_them_and_uses_few() -> None:
    weights = model_named("MiniMax-M2.5").weights
    assert weights.total == pytest.approx(229e9, rel=0.01)
    assert weights.expert_share == 8 / 256


@pytest.mark.parametrize(
    ("model", "tp", "tokens"),
    [("Qwen3-1.7B", 1, 580e3), ("Qwen3-8B", 1, 364e3), ("Qwen3-32B", 2, 284e3), ("Qwen3-32B", 4, 818e3)],
)
def test_a_pool_takes_what_weights_leave(model: str, tp: int, tokens: float) -> None:
    assert pool_tokens(card_named("H100"), model_named(model), Sharding(tp), 0.9) == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(
    ("model", "tp", "prefix_len", "suffix_len", "cold_ms", "warm_ms"),
    [
        ("Qwen3-1.7B", 1, 7000, 1000, 37.4, 5.7),
        ("Qwen3-8B", 1, 7000, 1000, 162.5, 22.9),
        ("Qwen3-8B", 1, 50_000, 4500, 2041, 251),
        ("Qwen3-32B", 2, 7000, 1000, 354, 48.8),
        ("Qwen3-32B", 2, 50_000, 4500, 4072, 484),
    ],
)
def test_prefill_takes_its_arithmetic(
    model: str, tp: int, prefix_len: int, suffix_len: int, cold_ms: float, warm_ms: float
) -> None:
    costs = sheet_model(card_named("H100"), model_named(model), Sharding(tp), BOUND)
    all_reduces_s = costs.prefill.fixed_s
    for held, expected_ms in ((0, cold_ms), (prefix_len, warm_ms)):
        new, end = prefix_len + suffix_len - held, prefix_len + suffix_len
        step = StepShape(0, new, end, end, new * held + new * new // 2)
        assert (costs.prefill_time(step) - all_reduces_s) * 1e3 == pytest.approx(expected_ms, rel=0.01)


@pytest.mark.parametrize(
    ("model", "batch", "naive_ms", "shared_ms"),
    [("Qwen3-1.7B", 128, 36.6, 7.9), ("Qwen3-8B", 64, 27.4, 10.2), ("Qwen3-8B", 128, 50.3, 13.3)],
)
def test_a_decode_step_reads_weights_and_kv(model: str, batch: int, naive_ms: float, shared_ms: float) -> None:
    """8 groups with 7,000 tokens in common, 1,000 tokens of their own, in the middle of 256 outputs."""
    context, unique = batch * (7000 + 1000 + 128), 8 * 7000 + batch * (1000 + 128)
    step = StepShape(batch, batch, context, unique, context)
    for prefix_shared, expected_ms in ((False, naive_ms), (True, shared_ms)):
        costs = sheet_model(card_named("H100"), model_named(model), Sharding(), BOUND, prefix_shared)
        assert costs.decode_time(step) * 1e3 == pytest.approx(expected_ms, rel=0.01)


def test_few_tokens_read_few_experts() -> None:
    costs = sheet_model(card_named("H20"), model_named("MiniMax-M2.5"), Sharding(4, "fp8"), BOUND)
    one, many = (costs.decode_time(StepShape(n, n, 0, 0, 0)) - costs.decode.fixed_s for n in (1, 128))
    assert many > 10 * one


@pytest.mark.parametrize("card", CARDS)
def test_every_card_says_where_its_rates_come_from(card: str) -> None:
    notes = " ".join(sheet_model(card_named(card), model_named("Qwen3-8B"), Sharding()).notes)
    assert ("was not measured" in notes) is not card_named(card).is_measured


def test_a_model_is_also_read_from_its_config(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = model_named(str(tmp_path))
    assert shape.weights.dense == 2 * (4 * 64 * 64 + 3 * 64 * 128)
    assert shape.weights.head == shape.weights.embedding == 6400
    assert (shape.context_len, shape.kv_bytes_per_token("float32")) == (512, 2 * 2 * 64 * 4)
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has no 'vocab_size'"):
        model_named(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"shared_expert_intermediate_size": 64}, "shared experts"),
    ],
)
def test_a_shape_that_is_not_modelled_is_refused(tmp_path: Path, field: dict[str, Any], problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["Qwen3-8B"] | {"layer_types": ["full_attention"]}))
    assert model_named(str(tmp_path)).attention == model_named("Qwen3-8B").attention
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["Qwen3-8B"] | field))
    with pytest.raises(ConfigError, match=f"{problem} cannot be planned for"):
        model_named(str(tmp_path))


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit --tp 1 of --card H100"):
        pool_tokens(card_named("H100"), model_named("MiniMax-M2.5"), Sharding(), 0.9)


@pytest.mark.parametrize(("name", "lookup"), [("A100", card_named), ("GPT", model_named)])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str, lookup: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .*(H200|Qwen3-32B)"):
        lookup(name)  # type: ignore[operator]
