"""Fused decoder layers on the card: against the library's own, in float64, in float32, and in a graph."""

import copy

import pytest
import torch

pytest.importorskip("triton")

from headstart.attention.triton_attention import HeadShape
from headstart.model.attention_hook import STEP_KEYWORD
from headstart.model.gpu_fusion import fuse_for_gpu
from tests.gpu.fusion_cases import FAMILIES, DenseStep, assert_written, small_model

WIDE = {"hidden_size": 256, "intermediate_size": 700, "num_attention_heads": 8, "head_dim": 64}


def logits(model, tokens):
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None] + 1000
    with torch.inference_mode():
        return model(tokens, position_ids=positions, use_cache=False, **{STEP_KEYWORD: DenseStep(2)}).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_computes_what_the_librarys_does(family):
    model = small_model(family, torch.float32, "cuda")
    tokens = torch.randint(128, (1, 33), device="cuda")
    expected = logits(model, tokens)
    assert fuse_for_gpu(model) == 2
    assert (logits(model, tokens) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 16, 129])
def test_a_fused_bf16_model_is_as_near_to_float64_as_the_librarys(tokens):
    model = small_model("qwen3", torch.bfloat16, "cuda", **WIDE)
    ids = torch.randint(128, (1, tokens), device="cuda")
    exact = logits(copy.deepcopy(model).double(), ids)
    library = float((logits(model, ids) - exact).norm())
    fuse_for_gpu(model)
    assert float((logits(model, ids) - exact).norm()) < 1.25 * library


def test_fused_layers_with_experts_run_in_a_graph():
    model = small_model("qwen3_moe", torch.bfloat16, "cuda", **WIDE)
    fuse_for_gpu(model)
    tokens = torch.randint(128, (1, 5), device="cuda")
    expected = logits(model, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = logits(model, tokens)
    graph.replay()
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(16, 8), (32, 8), (28, 4), (5, 1)])
@pytest.mark.parametrize("tokens", [1, 17, 300])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_and_values_go_to_their_pages(dtype, q_heads, kv_heads, tokens, dim):
    assert_written(dtype, "cuda", HeadShape(q_heads, kv_heads, dim, 0.1), tokens, norms=dim > 64, rotates=True)
