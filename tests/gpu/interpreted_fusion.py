"""Fused layers in Triton's interpreter, float32 on the CPU: they compute what the library's model does.

Started by `tests/unit/attention/test_triton_interpret.py`, as `interpreted.py` is.
"""

import pytest
import torch

from headstart.attention.triton_attention import HeadShape
from headstart.core.errors import WorkerError
from headstart.model.attention_hook import STEP_KEYWORD
from headstart.model.gpu_fusion import fuse_for_gpu, is_known_form
from headstart.model.gpu_ops import add_rms_norm, rms_norm, silu_mul
from tests.gpu.fusion_cases import FAMILIES, DenseStep, assert_written, small_model

TOKENS = torch.randint(128, (1, 7), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.inference_mode():
        positions = torch.arange(TOKENS.shape[1])[None] + 3
        return model(TOKENS, position_ids=positions, use_cache=False, **{STEP_KEYWORD: DenseStep(2)}).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_computes_what_the_librarys_does(family):
    model = small_model(family, torch.float32, "cpu")
    expected = logits(model)
    assert fuse_for_gpu(model) == 2
    assert (logits(model) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma", {}),
        ("olmo", {"clip_qkv": 1.0}),
        ("glm4_moe", {}),
        ("mistral", {"sliding_window": 16}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_a_model_of_another_form_stays_the_librarys(family, changes):
    model = small_model(family, torch.float32, "cpu", **changes)
    before = {name: type(module) for name, module in model.named_modules()}
    assert not is_known_form(model)
    assert fuse_for_gpu(model) == 0
    assert before == {name: type(module) for name, module in model.named_modules()}


def test_a_module_that_someone_else_replaced_is_not_known():
    model = small_model("qwen3", torch.float32, "cpu")
    model.model.layers[1].self_attn.q_proj = torch.nn.Identity()
    assert fuse_for_gpu(model) == 0


def test_a_layer_that_computes_something_else_raises():
    model = small_model("qwen3", torch.float32, "cpu")
    attention = model.model.layers[1].self_attn
    attention.q_norm.forward = lambda x: 2 * x
    with pytest.raises(WorkerError, match="layer 1 differs"):
        fuse_for_gpu(model)


def test_a_fused_layer_without_a_step_raises():
    model = small_model("qwen3", torch.float32, "cpu")
    fuse_for_gpu(model)
    with pytest.raises(WorkerError, match="one packed batch"):
        model(TOKENS, use_cache=False)


@pytest.mark.parametrize("width", [16, 100, 257])
def test_norms_and_gates_of_any_width(width):
    x, update = torch.randn(3, width), torch.randn(3, width)
    weight = torch.randn(width)
    total, normed = add_rms_norm(x, update, weight, 1e-2)
    wide = (x + update).double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * weight
    torch.testing.assert_close(total, x + update)
    torch.testing.assert_close(normed, expected.float())
    torch.testing.assert_close(rms_norm(total, weight, 1e-2), expected.float())
    gate_up = torch.cat((x, update), -1)
    torch.testing.assert_close(silu_mul(gate_up), torch.nn.functional.silu(x) * update)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=["fp32", "fp8"])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 8), (6, 2), (5, 1)])
@pytest.mark.parametrize(("norms", "rotates"), [(True, True), (False, True), (True, False)])
def test_keys_and_values_go_to_their_pages(dtype, q_heads, kv_heads, norms, rotates):
    assert_written(dtype, "cpu", HeadShape(q_heads, kv_heads, 16, 0.25), 5, norms, rotates)
