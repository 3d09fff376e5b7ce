"""What the gateway and the composition root need to know of a model, read from its JSON files. Never imports torch."""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headstart.core.errors import WorkerError
from headstart.model.digests import file_digest
from headstart.model.source import WeightSource, cache_dir, weight_files

SERVED_CONTEXT = "served_context_len"
"""Key laid over config.json: the context that position scaling is fixed for, where it would depend on the step."""

log = logging.getLogger("headstart.model")

_WIDTHS = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A decoder-only language model in numbers."""

    name: str
    architecture: str
    vocab_size: int
    context_len: int  # tokens the position encoding was made for
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def parse_overrides(text: str) -> dict[str, Any]:
    """`--json-model-override-args` as a dictionary. Raises WorkerError."""
    if not text:
        return {}
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise WorkerError(f"--json-model-override-args is not valid JSON: {error}") from error
    if not isinstance(overrides, dict):
        raise WorkerError("--json-model-override-args must be a JSON object")
    return overrides


def read_model_config(folder: Path, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json with `overrides` laid over its top level (nested objects are merged). Raises WorkerError."""
    config = _read_json(folder / "config.json")
    return _merged(config, overrides or {})


def read_model_info(folder: Path, overrides: dict[str, Any] | None = None) -> ModelInfo:
    """Describe the model in `folder`. Raises WorkerError where config.json lacks what every causal LM states."""
    config = read_model_config(folder, overrides)
    architectures = config.get("architectures") or [config.get("model_type", "")]
    try:
        sizes = geometry(config)
        vocab_size = _stated(config, "vocabulary size", ("vocab_size",))
    except WorkerError as error:
        raise WorkerError(f"{folder / 'config.json'}: {error}") from error
    return ModelInfo(
        name=folder.name,
        architecture=str(architectures[0]),
        vocab_size=vocab_size,
        context_len=min(sizes.context_len, int(config.get(SERVED_CONTEXT) or sizes.context_len)),
        eos_token_ids=_eos_token_ids(folder, config),
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a model's attention, whatever its configuration class calls them."""

    context_len: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def geometry(config: dict[str, Any]) -> Geometry:
    """Read the sizes under any of the names that the library's configuration classes have for them.

    Raises WorkerError, naming what is looked for, if one is not stated.
    """
    width = _stated(config, "width", _WIDTHS)
    heads = _stated(config, "number of attention heads", _HEADS)
    return Geometry(
        context_len=_stated(config, "context length", _CONTEXTS),
        num_layers=_stated(config, "number of layers", _LAYERS),
        num_heads=heads,
        num_kv_heads=_num_kv_heads(config, heads),
        head_dim=int(config.get("head_dim") or config.get("kv_channels") or width // heads),
    )


def _num_kv_heads(config: dict[str, Any], heads: int) -> int:
    if config.get("multi_query"):
        return 1  # gpt_bigcode
    if "kv_channels" in config:
        return heads  # jetmoe repeats keys for each expert before the attention
    if (stated := config.get("num_key_value_heads")) is not None:
        return int(stated)
    nested = config.get("attn_config")
    of_nested = nested.get("kv_n_heads") if isinstance(nested, dict) else None  # dbrx, mpt
    return int(config.get("num_kv_heads") or of_nested or heads)


def _stated(config: dict[str, Any], what: str, names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(value := config.get(name), int) and value > 0:
            return value
    raise WorkerError(
        f"model type {config.get('model_type', 'unknown')!r} states no {what}; looked for {', '.join(names)}"
    )


def rope_sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each group of rotary settings: one for the model, or one for each kind of layer."""
    for key in ("rope_scaling", "rope_parameters"):
        section = config.get(key)
        if isinstance(section, dict):
            nested = [one for one in section.values() if isinstance(one, dict)]
            yield from nested or [section]


def fix_context(folder: Path, overrides: str, context_length: int | Literal["auto"]) -> str:
    """`overrides` with the context that position scaling is to be fixed for, if it would otherwise depend on the step.

    Rope types with two sets of factors (longrope) choose one by the longest sequence of a step, so that a row's keys
    would depend on its neighbours. With `context_length` "auto" the context is cut to the original one, where the
    short factors always hold and every answer is the library's; with a longer one, the long factors hold for all.
    """
    given = parse_overrides(overrides)
    config = read_model_config(folder, given)
    original = original_context(config)
    if original is None or SERVED_CONTEXT in config:
        return overrides
    whole = geometry(config).context_len
    served = min(original if context_length == "auto" else context_length, whole)
    log.warning(
        "the position scaling of this model is fixed for one context",
        extra={
            "context_len": served,
            "factors": "short" if served <= original else "long",
            "hint": f"--context-length above {original}, at most {whole}, fixes the long factors for all requests",
        },
    )
    return json.dumps(given | {SERVED_CONTEXT: served}, sort_keys=True)


def original_context(config: dict[str, Any]) -> int | None:
    """Tokens up to which a model with two sets of rope factors uses the short ones; None if it has one set."""
    for section in rope_sections(config):
        if section.get("rope_type", section.get("type")) in ("longrope", "su"):
            stated = config.get("original_max_position_embeddings") or section.get("original_max_position_embeddings")
            return int(stated or geometry(config).context_len)
    return None


def rope_settings(config: dict[str, Any]) -> str:
    """The rotary settings in one canonical line: equal lines mean interchangeable KV."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", SERVED_CONTEXT)
    return json.dumps({key: config[key] for key in keys if config.get(key) is not None}, sort_keys=True)


def model_fingerprint(source: WeightSource, cache: Path | None = None) -> str:
    """Hex sha256 that equal models share and different ones do not, stable across processes and hosts.

    Covers the configuration and every byte of the weight files, or the seed where weights are random. Digests of
    weight files are remembered by (path, size, mtime), so only the first start after a change reads them.
    """
    digest = hashlib.sha256(b"headstart/model/1")
    config = read_model_config(source.folder, parse_overrides(source.overrides))
    parts = [(b"config", json.dumps(config, sort_keys=True).encode())]
    if source.load_format == "dummy":
        parts.append((b"random", str(source.seed).encode()))
    else:
        files = weight_files(source.folder)
        if not files:
            raise WorkerError(f"{source.folder} holds no *.safetensors weights")
        parts += [(b"weights", file_digest(path, cache or cache_dir())) for path in files]
    for kind, part in parts:
        digest.update(kind + len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    stated = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if stated is None:
        stated = config.get("eos_token_id")
    if stated is None:
        return ()
    return tuple(stated) if isinstance(stated, list) else (int(stated),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise WorkerError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise WorkerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise WorkerError(f"{path} does not hold a JSON object")
    return content


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result
