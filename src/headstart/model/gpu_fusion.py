"""Decoder layers of known families with fewer, larger operations, for GPUs.

    library   norm | q | k | v | q norm | k norm | rotation | attention | o | add | norm | gate | up | silu | mul | down | add
    fused     add + norm | qkv | norm + rotate + store | attention | o | add + norm | gate and up | silu * mul | down

Only a model whose every module, parameter and rule of configuration is known is changed, as a whole: between fused
layers travel the residual stream and what is still to be added to it, which no other module understands. Then each
layer is run beside the library's on random inputs; one that differs is an error of ours and raises. The library's
model class and its forward stay; only this instance's modules are replaced.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from headstart.attention.packed import PackedAttention, PackedHeads
from headstart.core.errors import WorkerError
from headstart.model.attention_hook import STEP_KEYWORD
from headstart.model.fuse import merged_linear
from headstart.model.gpu_ops import add_rms_norm, rms_norm, silu_mul

_PREFIXES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "smollm3": "SmolLM3",
}
"""Model types whose decoder layers have the common form, and what the names of their classes begin with."""

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})  # factors that depend on the position alone
_PROBE_TOKENS = 5


class Residual(NamedTuple):
    """The residual stream between two fused layers: the sum of both, which the next norm adds up."""

    stream: torch.Tensor
    update: torch.Tensor


class GpuFusedNorm(nn.Module):
    """RMS norm of a plain tensor, or of a residual stream with what is to be added to it."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon: float = norm.variance_epsilon

    def forward(self, x: torch.Tensor | Residual) -> torch.Tensor:
        return self.advance(x)[1]

    def advance(self, x: torch.Tensor | Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """-> the stream, everything added, and its norm."""
        if isinstance(x, Residual):
            return add_rms_norm(x.stream, x.update, self.weight, self.variance_epsilon)
        x = x.contiguous()
        return x, rms_norm(x, self.weight, self.variance_epsilon)


class GpuFusedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up in one product."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = merged_linear([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class GpuFusedAttention(nn.Module):
    """q, k and v in one product; norms, rotation and the KV write are left to the step."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv_proj = merged_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o_proj = attention.o_proj
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.q_norm = q_norm.weight if q_norm is not None else None
        self.k_norm = k_norm.weight if k_norm is not None else None
        self.eps: float = q_norm.variance_epsilon if q_norm is not None else 0.0
        self.layer_idx: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.rotates = bool(getattr(attention, "use_rope", True))

    def forward(
        self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: PackedAttention
    ) -> torch.Tensor:
        """`x` [1, tokens, width], position embeddings [1, tokens, head_dim] -> [1, tokens, width]."""
        qkv = self.qkv_proj(x[0]).view(x.shape[1], -1, self.head_dim)
        cos, sin = (part[0] for part in position_embeddings) if self.rotates else (None, None)
        heads = PackedHeads(qkv, cos, sin, self.q_norm, self.k_norm, self.eps)
        out = step.attend_packed(self.layer_idx, heads, self.scaling)
        return self.o_proj(out.reshape(1, x.shape[1], -1))


class FusedLayer(nn.Module):
    """One decoder layer. Takes the plain hidden states or a `Residual`, returns a `Residual`."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm = GpuFusedNorm(layer.input_layernorm)
        self.self_attn = GpuFusedAttention(layer.self_attn)
        self.post_attention_layernorm = GpuFusedNorm(layer.post_attention_layernorm)
        self.mlp = (
            GpuFusedMLP(layer.mlp) if hasattr(layer.mlp, "gate_proj") else layer.mlp
        )  # experts stay the library's
        if hasattr(layer, "attention_type"):  # read by some versions of the library's loop over layers
            self.attention_type = layer.attention_type

    def forward(
        self,
        hidden_states: torch.Tensor | Residual,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **keywords: Any,
    ) -> Residual:
        step = keywords.get(STEP_KEYWORD)
        if step is None or attention_mask is not None or position_embeddings[0].shape[0] != 1:
            raise WorkerError(f"a fused layer takes one packed batch with {STEP_KEYWORD} and no attention mask")
        stream, normed = self.input_layernorm.advance(hidden_states)
        update = self.self_attn(normed, position_embeddings, step)
        stream, normed = self.post_attention_layernorm.advance(Residual(stream, update))
        return Residual(stream, self.mlp(normed))


def fuse_for_gpu(model: nn.Module) -> int:
    """Replace the decoder layers of `model` in place if it is of a known form; returns how many were (0 or all).

    Raises WorkerError if a fused part and the library's disagree on random inputs.
    """
    if not is_known_form(model):
        return 0
    base: Any = model.get_submodule("model")
    for i, layer in enumerate(base.layers):
        fused = FusedLayer(layer).eval().requires_grad_(False)
        _check_agreement(layer, fused)
        base.layers[i] = fused  # the separate projections are freed before the next layer's are merged
    base.norm = GpuFusedNorm(base.norm).eval().requires_grad_(False)
    return len(base.layers)


def is_known_form(model: nn.Module) -> bool:
    """Is every module of the decoder one whose computation the fused layers reproduce?"""
    config: Any = getattr(model, "config", None)
    prefix = _PREFIXES.get(getattr(config, "model_type", ""))
    base: Any = getattr(model, "model", None)
    if prefix is None or type(base).__name__ != f"{prefix}Model" or getattr(config, "sliding_window", None) is not None:
        return False
    if {name for name, _ in base.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    rope_type = getattr(base.rotary_emb, "rope_type", None)
    head_dim = base.layers[0].self_attn.head_dim
    if rope_type not in _ROPE_TYPES or 2 * base.rotary_emb.inv_freq.numel() != head_dim or head_dim & (head_dim - 1):
        return False
    return _is_norm(base.norm, prefix) and all(_is_known_layer(layer, prefix) for layer in base.layers)


def _is_known_layer(layer: Any, prefix: str) -> bool:
    children = dict(layer.named_children())
    if type(layer).__name__ != f"{prefix}DecoderLayer" or set(children) != {
        "self_attn", "mlp", "input_layernorm", "post_attention_layernorm",
    }:  # fmt: skip
        return False
    norms = all(_is_norm(children[name], prefix) for name in ("input_layernorm", "post_attention_layernorm"))
    return norms and _is_known_attention(layer.self_attn, prefix) and _is_known_mlp(layer.mlp, prefix)


def _is_known_attention(attention: Any, prefix: str) -> bool:
    children = dict(attention.named_children())
    projections = [children.pop(name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    head_norms = [children.pop(name, None) for name in ("q_norm", "k_norm")]
    biases = {getattr(part, "bias", None) is not None for part in projections[:3]}
    return (
        type(attention).__name__ == f"{prefix}Attention"
        and not children
        and all(type(part) is nn.Linear for part in projections)
        and len(biases) == 1
        and (head_norms == [None, None] or all(_is_norm(norm, prefix) for norm in head_norms))
        and getattr(attention, "sliding_window", None) is None
        and attention.is_causal
    )


def _is_known_mlp(mlp: Any, prefix: str) -> bool:
    if type(mlp).__name__ == f"{prefix}SparseMoeBlock":
        return True
    children = dict(mlp.named_children())
    activation = children.pop("act_fn", getattr(mlp, "act_fn", None))
    parts = [children.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        type(mlp).__name__ == f"{prefix}MLP"
        and not children
        and all(type(part) is nn.Linear for part in parts)
        and (parts[0].bias is None) == (parts[1].bias is None)
        and type(activation).__name__ in {"SiLU", "SiLUActivation"}
    )


def _is_norm(norm: Any, prefix: str) -> bool:
    return (
        type(norm).__name__ == f"{prefix}RMSNorm"
        and [name for name, _ in norm.named_parameters()] == ["weight"]
        and norm.weight.dim() == 1
    )


class _Probe:
    """Stands in for a step's attention, whole or packed: its result depends on query, key and value alike."""

    def __init__(self, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        return query + 2 * key.repeat_interleave(group, 1) - 3 * value.repeat_interleave(group, 1) * scale

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> torch.Tensor:
        query, key, value = unpack(heads, self._num_kv_heads)
        return self.attend(layer, query, key, value, scale)


def unpack(heads: PackedHeads, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as attention takes them, by plain operations: what the kernels must equal."""
    query, key, value = heads.qkv.split((heads.qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    query, key = _turned(query, heads.q_norm, heads), _turned(key, heads.k_norm, heads)
    return query, key, value


def _turned(x: torch.Tensor, weight: torch.Tensor | None, heads: PackedHeads) -> torch.Tensor:
    wide = x.double() if x.dtype == torch.float64 else x.float()
    if weight is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + heads.eps).rsqrt() * weight.to(wide)
    if heads.cos is not None and heads.sin is not None:
        first, second = wide.chunk(2, dim=-1)
        wide = wide * heads.cos.to(wide)[:, None] + torch.cat((-second, first), -1) * heads.sin.to(wide)[:, None]
    return wide.to(x.dtype)


@torch.inference_mode()
def _check_agreement(layer: Any, fused: FusedLayer) -> None:
    """Raise WorkerError unless norms, attention and MLP give the library's results on random inputs."""
    attention = layer.self_attn
    weight = attention.o_proj.weight
    generator = torch.Generator(weight.device).manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=weight.device, dtype=torch.float32)

    x, update = (draw(1, _PROBE_TOKENS, weight.shape[0]).to(weight.dtype) for _ in range(2))
    angles = draw(1, _PROBE_TOKENS, attention.head_dim // 2).repeat(1, 1, 2)
    turns = (angles.cos().to(weight.dtype), angles.sin().to(weight.dtype))
    step = _Probe(attention.k_proj.out_features // attention.head_dim)
    theirs = attention(hidden_states=x, position_embeddings=turns, attention_mask=None, **{STEP_KEYWORD: step})[0]
    pairs = {
        "input_layernorm": (layer.input_layernorm(x), fused.input_layernorm(x)),
        "self_attn": (theirs, fused.self_attn(x, turns, step)),
        "post_attention_layernorm": (
            layer.post_attention_layernorm(x + update),
            fused.post_attention_layernorm(Residual(x, update)),
        ),
    }
    if isinstance(fused.mlp, GpuFusedMLP):
        pairs["mlp"] = (layer.mlp(x), fused.mlp(x))
    bound = max(4 * torch.finfo(weight.dtype).eps, 1e-4)
    for name, (a, b) in pairs.items():
        error = float((a.double() - b.double()).norm() / a.double().norm())
        if not error <= bound:
            raise WorkerError(f"fused {name} of layer {attention.layer_idx} differs from the library's by {error:.2e}")
