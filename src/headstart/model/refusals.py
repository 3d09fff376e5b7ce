"""Refuse a model that cannot be served, from its JSON files and weight headers alone. Never imports torch.

The launcher calls `refuse_unservable` before it starts anything: what is refused here costs less than a second and one
line. What only the loaded model shows (a tensor that is missing, attention that goes another way) is refused by
`load_model` and by the self-test of `model/self_test.py`, with the same exception.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headstart.core.errors import WorkerError
from headstart.model.info import geometry, parse_overrides, read_model_config, rope_sections
from headstart.model.kinds import BIDIRECTIONAL, NOT_BUILT
from headstart.model.refused import ModelRefused
from headstart.model.weights import check_weight_files

FULL_ATTENTION = "full_attention"
_FULL_NAMES = frozenset({FULL_ATTENTION, "attention", "global", "full"})
_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "proportional"})
_PARTS = ("vision_config", "audio_config", "text_config", "thinker_config", "vq_config", "speech_config")

Rule = Callable[[dict[str, Any]], str | None]
"""Given config.json: the reason for a refusal, after the model type's name, or None."""


def refuse_unservable(folder: Path, overrides: str = "", load_format: str = "auto") -> None:
    """Raise ModelRefused, in one line that names the model type and the rule, if the model in `folder` cannot be served.

    `overrides` is the text of --json-model-override-args. With `load_format` "dummy" weight files are not looked at.
    """
    config = read_model_config(folder, parse_overrides(overrides))
    refuse_config(config)
    try:
        geometry(config)
    except WorkerError as error:
        raise ModelRefused(f"{folder / 'config.json'}: {error}") from error
    if load_format != "dummy":
        check_weight_files(folder)


def refuse_config(config: dict[str, Any]) -> None:
    """Raise ModelRefused if a rule excludes what config.json describes."""
    for rule in _RULES:
        reason = rule(config)
        if reason is not None:
            raise ModelRefused(f"model type {config.get('model_type', 'unknown')!r} {reason}")


def _names_a_type(config: dict[str, Any]) -> str | None:
    return None if config.get("model_type") else "cannot be served: config.json names no model_type"


def _is_of_a_built_kind(config: dict[str, Any]) -> str | None:
    return NOT_BUILT.get(str(config["model_type"]))


def _is_a_decoder(config: dict[str, Any]) -> str | None:
    if config.get("is_encoder_decoder"):
        return "is an encoder-decoder model; only causal language models are served"
    if not config.get("is_decoder") and config["model_type"] in BIDIRECTIONAL:
        return "attends in both directions (is_decoder false); only causal language models are served"
    parts = [part for part in _PARTS if isinstance(config.get(part), dict)]
    if parts:
        return f"has parts beside its language model ({', '.join(parts)}); models of several parts are not built"
    return None


def _is_not_quantised(config: dict[str, Any]) -> str | None:
    for key in ("quantization_config", "compression_config"):
        if (stated := config.get(key)) is not None:
            method = stated.get("quant_method", "unnamed") if isinstance(stated, dict) else stated
            return f"has quantised weights ({key}: {method}), which are not built; use a folder of unquantised weights"
    return None


def _has_full_layers_only(config: dict[str, Any]) -> str | None:
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    unbuilt = sorted({str(kind) for kind in kinds} - _FULL_NAMES)
    if unbuilt:
        return f"has layers of types that are not built: {', '.join(unbuilt)}"
    window = config.get("sliding_window")
    if window is not None and not kinds and config.get("use_sliding_window", True):
        return f"attends within a sliding window of {window} tokens (sliding_window), which is not built"
    return None


def _has_plain_scores(config: dict[str, Any]) -> str | None:
    if config.get("attn_logit_softcapping"):
        return f"caps attention scores (attn_logit_softcapping {config['attn_logit_softcapping']}), which is not built"
    alibi = config.get("alibi") or (config.get("attn_config") or {}).get("alibi")
    return "biases attention scores by distance (ALiBi), which is not built" if alibi else None


def _counts_positions_by_row(config: dict[str, Any]) -> str | None:
    if config.get("attn_temperature_tuning"):
        return (
            "scales queries by a token's place in the step instead of its position (attn_temperature_tuning), which "
            "is wrong in a step of several requests"
        )
    if str(config.get("position_embedding_type")).startswith("relative_key"):
        return f"has {config['position_embedding_type']} position embeddings, which are not built"
    return None


def _has_known_rope(config: dict[str, Any]) -> str | None:
    for kind in _rope_types(config):
        if kind not in _ROPE_TYPES:
            return f"has the rope type {kind!r}, which is not known; known are {', '.join(sorted(_ROPE_TYPES))}"
    return None


def _rope_types(config: dict[str, Any]) -> Iterator[str]:
    for section in rope_sections(config):
        if (kind := section.get("rope_type", section.get("type"))) is not None:
            yield str(kind)


def _keeps_one_width(config: dict[str, Any]) -> str | None:
    if config.get("kv_lora_rank"):
        return "keeps compressed keys and values (MLA, kv_lora_rank), which is not built"
    return None


_RULES: tuple[Rule, ...] = (
    _names_a_type,
    _is_of_a_built_kind,
    _is_a_decoder,
    _is_not_quantised,
    _has_full_layers_only,
    _has_plain_scores,
    _counts_positions_by_row,
    _has_known_rope,
    _keeps_one_width,
)
