"""What the gateway and the composition root need to know of a model, read from its JSON files. Never imports torch."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.core.errors import WorkerError
from headstart.model.source import WeightSource, cache_dir, weight_files


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
        heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
        return ModelInfo(
            name=folder.name,
            architecture=str(architectures[0]),
            vocab_size=int(config["vocab_size"]),
            context_len=int(config["max_position_embeddings"]),
            eos_token_ids=_eos_token_ids(folder, config),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or width // heads),
        )
    except KeyError as error:
        raise WorkerError(f"{folder / 'config.json'} does not describe a causal language model: no {error}") from error


def rope_settings(config: dict[str, Any]) -> str:
    """The rotary settings in one canonical line: equal lines mean interchangeable KV."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
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
        parts += [(b"weights", _file_digest(path, cache or cache_dir())) for path in files]
    for kind, part in parts:
        digest.update(kind + len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _file_digest(path: Path, cache: Path) -> bytes:
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode()).hexdigest()
    remembered = cache / "digests" / key
    if remembered.is_file():
        return bytes.fromhex(remembered.read_text())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    remembered.parent.mkdir(parents=True, exist_ok=True)
    staging = remembered.with_name(f".{key}.{os.getpid()}")
    staging.write_text(digest.hexdigest())
    staging.rename(remembered)
    return digest.digest()


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
