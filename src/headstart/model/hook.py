"""Our attention inside the model library's forward pass.

Every layer calls `paged_attention` through the library's attention interface. What to do with q, k and v travels as a
keyword of the forward call, so nothing here is shared between steps or models. A keyword that would change the result
and is not implemented raises: silently ignoring a sliding window would return plausible nonsense.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from headstart.core.errors import WorkerError

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
    unknown = [name for name, value_ in keywords.items() if name not in _HARMLESS and value_ not in (None, False)]
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
