"""Our attention inside the model library's forward pass.

Every layer calls `paged_attention` through the library's attention interface. What to do with q, k and v travels as a
keyword of the forward call, so nothing here is shared between steps or models. A keyword that would change the result
and is not implemented raises: silently ignoring a sliding window would return plausible nonsense.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from headstart.core.errors import WorkerError
from headstart.model.forms import drops_keywords

ATTENTION_NAME = "headstart_paged"
STEP_KEYWORD = "headstart_step"

_HARMLESS = frozenset({"position_ids", "position_embeddings", "is_causal", "use_cache", "cache_position"})
"""Keywords that do not change what a causal, cache-less layer over our pages computes."""


class StepAttention(Protocol):
    """One step's attention over the KV pool."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write `key` and `value` [tokens, kv_heads, head_dim] to their pages, then attend `query` [tokens, heads,
        head_dim] causally over each row's pages. Returns [tokens, heads, head_dim]."""
        ...


def pass_step_on(model: torch.nn.Module) -> int:
    """Hand the step to attention modules whose parents receive it and do not pass it on; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "layer_idx") and hasattr(child, "is_causal") and drops_keywords(type(parent), name):
                _Relay().install(parent, child)
                count += 1
    return count


class _Relay:
    """Carries the keyword from a parent's call to the call of its child, which the parent makes without it."""

    def __init__(self) -> None:
        self._step: StepAttention | None = None

    def install(self, parent: torch.nn.Module, child: torch.nn.Module) -> None:
        parent.register_forward_pre_hook(self._receive, with_kwargs=True)
        child.register_forward_pre_hook(self._hand_on, with_kwargs=True)

    def _receive(self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._step = keywords.get(STEP_KEYWORD)

    def _hand_on(
        self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, keywords if self._step is None else keywords | {STEP_KEYWORD: self._step}


def register_attention() -> None:
    """Make `paged_attention` known to the library. Safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention signature: q, k, v [1, heads, tokens, head_dim] in, [1, tokens, heads, head_dim] out.

    Raises WorkerError for anything asked for that is not implemented.
    """
    step: StepAttention | None = keywords.pop(STEP_KEYWORD, None)
    layer = getattr(module, "layer_idx", None)
    if step is None or layer is None or query.shape[0] != 1:
        raise WorkerError(f"{type(module).__name__} was not called with one packed batch of {STEP_KEYWORD}")
    unknown = [
        name for name, given in keywords.items() if name not in _HARMLESS and given is not None and given is not False
    ]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if dropout:
        unknown.append("dropout")
    if keywords.get("is_causal") is False or not getattr(module, "is_causal", True):
        unknown.append("is_causal=False")
    if unknown:
        raise WorkerError(f"{type(module).__name__} asks for attention that is not implemented: {', '.join(unknown)}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = step.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale)
    return out.unsqueeze(0), None
