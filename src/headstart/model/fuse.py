"""Fewer, larger operations for decoder blocks of the common form, checked against the library's own.

A decode step of a small model on a CPU spends as long in the library's many small operations as in its products. If a
module has the common form (q, k and v projections with rotate-half rotary embedding; gated SiLU; RMS norm) it is
replaced by one that computes the same with merged projections. Only modules that run the code of a model we know, on
known parts, are taken (`forms.py`): outputs on random inputs cannot show a rule that they do not reach. They are compared
besides, and unless both agree to rounding the library's module stays.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from headstart.model.attention_hook import STEP_KEYWORD, StepAttention
from headstart.model.forms import has_only, runs_code_of

_TOLERANCE = 1e-4
_PROBE_TOKENS = 3


class FusedNorm(nn.Module):
    """RMS norm in four calls: x / sqrt(mean(x^2) + eps) = sqrt(n) x / hypot(norm(x), sqrt(n eps))."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps
        self.register_buffer("_scaled", weight.detach() * weight.numel() ** 0.5, persistent=False)
        floor = torch.tensor((weight.numel() * eps) ** 0.5, dtype=torch.float32)
        self.register_buffer("_floor", floor, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x * self._scaled).div_(norm.hypot_(self._floor))


class FusedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up in one product."""

    def __init__(self, gate_up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate).mul_(up))


class FusedAttention(nn.Module):
    """q, k and v in one product and, without per-head norms, rotated together."""

    def __init__(self, qkv: nn.Linear, original: Any) -> None:
        super().__init__()
        self.qkv_proj = qkv
        self.o_proj = original.o_proj
        self.q_norm = getattr(original, "q_norm", None)
        self.k_norm = getattr(original, "k_norm", None)
        self.layer_idx: int = original.layer_idx
        self.scaling: float = original.scaling
        self.head_dim: int = original.head_dim
        signs = torch.ones(self.head_dim, dtype=qkv.weight.dtype)
        signs[: self.head_dim // 2] = -1
        self.register_buffer("_signs", signs, persistent=False)
        self.num_heads = original.q_proj.out_features // self.head_dim
        self.num_kv_heads = original.k_proj.out_features // self.head_dim

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **keywords: Any
    ) -> tuple[torch.Tensor, None]:
        step: StepAttention = keywords[STEP_KEYWORD]
        qkv = self.qkv_proj(hidden_states).view(hidden_states.shape[1], -1, self.head_dim)
        rotated, value = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
            rotated = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        cos, sin = position_embeddings
        turned = rotated.roll(self.head_dim // 2, dims=-1)
        rotated = torch.addcmul(rotated * cos[0].unsqueeze(1), turned, (sin[0] * self._signs).unsqueeze(1))
        query, key = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        out = step.attend(self.layer_idx, query, key, value, self.scaling)
        return self.o_proj(out.reshape(1, hidden_states.shape[1], -1)), None


class _Probe:
    """Stands in for a step's attention: its result depends on query, key and value alike."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        return query + 2 * key.repeat_interleave(group, 1) - 3 * value.repeat_interleave(group, 1) * scale


def fuse(model: nn.Module) -> int:
    """Replace what has the common form, in place; returns how many modules were."""
    replaced = 0
    for build, probe in ((_fused_norm, _call), (_fused_mlp, _call), (_fused_attention, _call_attention)):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                candidate = build(child)
                if candidate is not None and _agree(child, candidate, probe):
                    setattr(parent, name, candidate.eval())
                    replaced += 1
    return replaced


def _fused_norm(module: Any) -> nn.Module | None:
    if isinstance(module, FusedNorm) or not _is_norm(module):
        return None
    return FusedNorm(module.weight, module.variance_epsilon)


def _is_norm(module: Any) -> bool:
    return isinstance(module, FusedNorm) or (
        hasattr(module, "variance_epsilon")
        and has_only(module, set(), {"weight"})
        and runs_code_of(module, (LlamaRMSNorm,))
    )


def _fused_mlp(module: Any) -> nn.Module | None:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is nn.Linear for part in parts) or not has_only(
        module, {"gate_proj", "up_proj", "down_proj", "act_fn"}
    ):
        return None
    if type(module.act_fn) is not type(ACT2FN["silu"]) or not runs_code_of(module, (LlamaMLP,)):
        return None
    return FusedMLP(merged_linear(parts[:2]), parts[2])


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_ROTARY = ("apply_rotary_pos_emb", "rotate_half")


def _fused_attention(module: Any) -> nn.Module | None:
    parts = [getattr(module, name, None) for name in _PROJECTIONS]
    if not all(type(part) is nn.Linear for part in parts) or _window(module) is not None:
        return None
    if has_only(module, set(_PROJECTIONS)):
        known: tuple[type[nn.Module], ...] = (LlamaAttention, Qwen2Attention, MistralAttention)
    elif has_only(module, {*_PROJECTIONS, "q_norm", "k_norm"}) and _is_norm(module.q_norm) and _is_norm(module.k_norm):
        known = (Qwen3Attention,)
    else:
        return None
    if not module.is_causal or not runs_code_of(module, known, _ROTARY):
        return None
    return FusedAttention(merged_linear(parts[:3]), module)


def _window(module: Any) -> int | None:
    """The sliding window that the module asks for: its own, or in code like Mistral's its configuration's."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    return getattr(getattr(module, "config", None), "sliding_window", None)


def merged_linear(parts: list[Any]) -> nn.Linear:
    """One linear layer whose outputs are those of `parts`, one after another."""
    first = parts[0]
    with torch.device("meta"):
        merged = nn.Linear(first.in_features, sum(part.out_features for part in parts), first.bias is not None)
    merged.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    if first.bias is not None:
        merged.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return merged


def _call(module: nn.Module, generator: torch.Generator) -> torch.Tensor:
    weight = next(module.parameters())
    width = weight.shape[-1]
    return module(torch.randn(1, _PROBE_TOKENS, width, generator=generator, dtype=torch.float32).to(weight))


def _call_attention(module: Any, generator: torch.Generator) -> torch.Tensor:
    weight = module.o_proj.weight
    width = getattr(module, "qkv_proj", None) or module.q_proj
    draw = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float32).to(weight)  # noqa: E731
    hidden = draw(1, _PROBE_TOKENS, width.in_features)
    angles = draw(1, _PROBE_TOKENS, module.head_dim // 2).repeat(1, 1, 2)
    keywords = {"attention_mask": None, STEP_KEYWORD: _Probe()}
    return module(hidden_states=hidden, position_embeddings=(angles.cos(), angles.sin()), **keywords)[0]


def _agree(ours: nn.Module, theirs: nn.Module, probe: Callable[[nn.Module, torch.Generator], torch.Tensor]) -> bool:
    with torch.inference_mode():
        try:
            a, b = (probe(module, torch.Generator().manual_seed(0)) for module in (ours, theirs))
        except (TypeError, RuntimeError, KeyError, AttributeError, ValueError):
            return False
        return bool((a - b).norm() <= _TOLERANCE * b.norm())
