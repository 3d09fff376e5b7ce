"""Loading refuses what is not built; the hook refuses what it does not implement; merged modules are the library's."""

import json
from pathlib import Path

import pytest
import torch

from headstart.core.errors import WorkerError
from headstart.model.attention_hook import STEP_KEYWORD, paged_attention
from headstart.model.fp16_linear import pack_linears
from headstart.model.fuse import FusedAttention, FusedMLP, fuse
from headstart.model.load import load_model
from headstart.model.source import WeightSource

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}


def source(folder: Path, model_type: str = "llama", overrides: str = "", **changes: object) -> WeightSource:
    (folder / "config.json").write_text(json.dumps(SMALL | {"model_type": model_type} | changes))
    return WeightSource(folder, "dummy", overrides=overrides)


class Mean:
    """Attention over nothing: enough for a forward pass."""

    def attend(self, layer, query, key, value, scale):
        return query + value.repeat_interleave(query.shape[1] // value.shape[1], 1)


def forward(model, tokens: int = 5) -> torch.Tensor:
    ids = torch.arange(tokens).unsqueeze(0)
    with torch.inference_mode():
        return model(input_ids=ids, position_ids=ids, use_cache=False, **{STEP_KEYWORD: Mean()}).logits


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    dummy = source(tmp_path)
    first = forward(load_model(dummy, torch.float32))
    torch.rand(7)
    assert torch.equal(first, forward(load_model(dummy, torch.float32)))
    other = WeightSource(tmp_path, "dummy", seed=1)
    assert not torch.equal(first, forward(load_model(other, torch.float32)))


def test_overrides_reach_the_model(tmp_path: Path) -> None:
    model = load_model(source(tmp_path, overrides='{"num_hidden_layers": 1}'), torch.float32)
    assert model.config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma3_text", {"head_dim": 12}, "sliding_attention"),
        ("mistral", {"sliding_window": 64}, "sliding window of 64"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("nonsense", {}, "nonsense"),
        ("t5", {}, "encoder-decoder"),
    ],
)
@pytest.mark.behaviour("50")
def test_what_is_not_built_is_refused_by_name(
    tmp_path: Path, model_type: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(WorkerError, match=reason):
        load_model(source(tmp_path, model_type, **changes), torch.float32)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    source(tmp_path)
    with pytest.raises(WorkerError, match=r"no \*\.safetensors"):
        load_model(WeightSource(tmp_path), torch.float32)


@pytest.mark.parametrize(
    "keyword", [{"sliding_window": 8}, {"softcap": 30.0}, {"s_aux": 1.0}, {"is_causal": False}, {"dropout": 0.1}]
)
def test_the_hook_raises_on_a_keyword_that_it_does_not_implement(keyword: dict[str, object]) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0
    q, kv = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    step = {STEP_KEYWORD: Mean()}
    paged_attention(module, q, kv, kv, None, sliding_window=None, position_ids=q, **step)
    with pytest.raises(WorkerError, match=next(iter(keyword))):
        paged_attention(module, q, kv, kv, None, **step, **keyword)
    with pytest.raises(WorkerError, match="attention_mask"):
        paged_attention(module, q, kv, kv, q, **step)
    with pytest.raises(WorkerError, match=STEP_KEYWORD):
        paged_attention(module, q, kv, kv, None)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2", "mistral"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_merged_modules_compute_the_same(tmp_path: Path, model_type: str, tokens: int) -> None:
    changes = {"sliding_window": None} if model_type == "mistral" else {}
    model = load_model(source(tmp_path, model_type, **changes), torch.float32)
    before = forward(model, tokens)
    assert fuse(model) > 0
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(FusedAttention), kinds.count(FusedMLP)) == (2, 2)
    torch.testing.assert_close(forward(model, tokens), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["cohere", "phi3", "granite", "olmo2"])
def test_modules_of_another_form_stay_the_librarys(tmp_path: Path, model_type: str) -> None:
    model = load_model(source(tmp_path, model_type, pad_token_id=0), torch.float32)
    before = forward(model)
    fuse(model)
    torch.testing.assert_close(forward(model), before, atol=1e-4, rtol=1e-4)


def test_float16_weights_stay_close(tmp_path: Path) -> None:
    model = load_model(source(tmp_path), torch.float32)
    before = forward(model)
    fuse(model)
    assert pack_linears(model) == 2 * 4 + 1
    after = forward(model)
    assert float((after - before).norm() / before.norm()) < 2e-3
