"""Position scaling that depends on a row's own positions only.

The library recomputes the rotary frequencies of two rope types from the longest sequence of each forward: longrope takes
the long factors for all rows as soon as one of them is past the original context, dynamic NTK grows the base. In a
packed step that makes a row's keys depend on its neighbours, and a cached prefix on how it was computed. So the
frequencies are chosen once, for the served context, and stay:

    longrope   short factors if the served context is at most the original one, else long factors for every request
    dynamic    as at the start: the served context is never above `max_position_embeddings`, where scaling begins
"""

import logging
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstart.model.info import SERVED_CONTEXT, geometry, original_context

log = logging.getLogger("headstart.model")

_FIXED = "fixed"
"""A rope type that the library never updates."""


def fix_position_scaling(model: PreTrainedModel) -> None:
    """Fix the frequencies of every rotary embedding in `model`, in place, for the context that its configuration names
    as served, else its longest. One line of the log says which, if there is a choice."""
    _log_choice(model)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed(model, module, kinds, "", None)
        elif isinstance(kinds, dict):
            module.rope_type = {
                layer_type: _fixed(model, module, kind, f"{layer_type}_", layer_type)
                for layer_type, kind in kinds.items()
            }


def _log_choice(model: PreTrainedModel) -> None:
    config = model.config.to_dict()
    original = original_context(config)
    if original is not None:
        log.warning(
            "the position scaling of this model is fixed for one context",
            extra={
                "context_len": _served_context(model),
                "factors": "long" if _is_long(model) else "short",
                "hint": f"a --context-length above {original} fixes the long factors for all requests",
            },
        )


def _fixed(model: PreTrainedModel, module: Any, kind: str, prefix: str, layer_type: str | None) -> str:
    if kind == "longrope" and _is_long(model):
        original = original_context(model.config.to_dict())
        assert original is not None
        keywords = {} if layer_type is None else {"layer_type": layer_type}
        device = getattr(module, f"{prefix}inv_freq").device
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=original + 1, **keywords)
        with torch.no_grad():
            getattr(module, f"{prefix}inv_freq").copy_(frequencies)
    return _FIXED if kind == "longrope" or "dynamic" in kind else kind


def _is_long(model: PreTrainedModel) -> bool:
    config = model.config.to_dict()
    original = original_context(config)
    return original is not None and _served_context(model) > original


def _served_context(model: PreTrainedModel) -> int:
    return int(getattr(model.config, SERVED_CONTEXT, None) or geometry(model.config.to_dict()).context_len)
