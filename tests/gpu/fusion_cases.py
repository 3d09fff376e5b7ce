"""What the fused layers and their kernels are compared with, for the card and for Triton's interpreter alike."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.attention.packed import PackedHeads
from headstart.attention.triton_attention import HeadShape, LayerKV
from headstart.attention.triton_write import norm_rope_write
from headstart.model.gpu_fusion import unpack
from headstart.model.hook import ATTENTION_NAME, register_attention

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
}


def small_model(family: str, dtype: torch.dtype, device: str, **changes: Any) -> PreTrainedModel:
    """Random weights of unequal sizes: norms other than one, biases other than zero."""
    register_attention()
    config = AutoConfig.for_model(family, **SMALL | FAMILIES.get(family, {}) | changes)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(-1.5, 1.5)
    return model.to(device).eval().requires_grad_(False)


class DenseStep:
    """Attention of one row over the step's own keys, in either form."""

    def __init__(self, num_kv_heads: int) -> None:
        self.num_kv_heads = num_kv_heads

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        q, k, v = (part.transpose(0, 1).double() for part in (query, key, value))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(
            torch.ones(q.shape[1], q.shape[1], device=q.device).triu(1).bool(), float("-inf")
        )
        return (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> torch.Tensor:
        return self.attend(layer, *unpack(heads, self.num_kv_heads), scale)


def assert_written(dtype: torch.dtype, device: str, shape: HeadShape, tokens: int, norms: bool, rotates: bool) -> None:
    """`norm_rope_write` equals plain float64 operations and a scatter, and touches nothing else."""
    torch.manual_seed(tokens)
    fp8 = dtype == torch.float8_e4m3fn
    wide = torch.float32 if device == "cpu" else torch.bfloat16
    num_heads, dim, page = shape.num_q_heads + 2 * shape.num_kv_heads, shape.head_dim, 16
    qkv = torch.randn(tokens, num_heads, dim, device=device).to(wide)
    angles = torch.randn(tokens, dim // 2, device=device).repeat(1, 2)
    weights = [torch.randn(dim, device=device).to(wide) if norms else None for _ in range(2)]
    turns = (angles.cos().to(wide), angles.sin().to(wide)) if rotates else (None, None)
    exact = PackedHeads(
        qkv.double(), *(None if part is None else part.double() for part in (*turns, *weights)), eps=1e-3
    )
    query, key, value = unpack(exact, shape.num_kv_heads)
    pool = torch.zeros(tokens + 2, shape.num_kv_heads, 2, 2, page, dim, device=device)
    pool = pool.to(dtype if fp8 else wide)  # [page, head, layer, K|V, token, dim]
    scales = tuple(torch.rand(shape.num_kv_heads, device=device) + 0.01 for _ in range(2))
    kv = LayerKV(pool[:, :, 1, 0], pool[:, :, 1, 1], *(scales if fp8 else ()))
    slots = torch.randperm((tokens + 2) * page, device=device)[:tokens].to(torch.int32)
    if tokens > 1:
        slots[tokens // 2] = -1
    got = norm_rope_write(PackedHeads(qkv, *turns, *weights, eps=1e-3), shape, kv, slots)
    bound = 1e-6 if wide == torch.float32 else 6e-3
    assert float((got.double() - query).norm() / query.norm()) < bound
    keep = slots >= 0
    at = slots[keep].long()
    for part, stored, new in ((0, kv.k, key[keep]), (1, kv.v, value[keep])):
        read = stored.float()[at // page, :, at % page].double()
        if fp8:  # the interpreter's own cast to e4m3 loses the carry of some mantissas
            new = (new / scales[part].double()[:, None]).clamp(-448, 448)
            near = (read - new).abs() <= new.abs() / 15 + 2**-9
            assert float(near.double().mean()) > (0.9 if device == "cpu" else 0.999)
        else:
            assert float((read - new).norm() / new.norm()) < bound
    written = pool.float().abs().sum(-1) > 0
    assert int(written.sum()) == 2 * int(keep.sum()) * shape.num_kv_heads
    assert not written[:, :, 0].any()
