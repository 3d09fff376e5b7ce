"""What a model's shape costs: parameters that a token uses, bytes that a step reads, bytes of KV that a token keeps."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.config.errors import ConfigError, require
from headstart.core.kv_layout import KVLayout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one number, by --weight-dtype and --kv-dtype."""
NOT_MODELLED = {
    "kv_lora_rank": "latent attention",
    "n_routed_experts": "experts beside shared ones or dense layers",
    "shared_expert_intermediate_size": "shared experts",
}
"""Fields of a config.json, and what a model with them has that the formulas below leave out."""


@dataclass(frozen=True, slots=True)
class Attention:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def flops_per_pair(self) -> int:
        """4 * L * Hq * dh: scores and weighted sum of one query and one key."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters by who uses them."""

    dense: int  # of linear layers that every token passes, router included
    head: int  # of the output projection: read by steps that sample
    embedding: int = 0  # of an input embedding that is not the head's own
    experts: int = 0  # of all experts of all layers
    num_experts: int = 1  # in each layer
    num_active: int = 1  # of them, for each token

    @property
    def total(self) -> int:
        return self.dense + self.head + self.embedding + self.experts

    @property
    def expert_share(self) -> float:
        """Share of the experts that one token uses."""
        return self.num_active / self.num_experts

    @property
    def per_token(self) -> float:
        """N: linear parameters that one token passes, without the head."""
        return self.dense + self.experts * self.expert_share


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    attention: Attention
    weights: Weights
    context_len: int

    def kv_bytes_per_token(self, dtype: str) -> int:
        shape = self.attention
        stored = "fp8_e4m3" if dtype == "fp8" else dtype
        return KVLayout.full(1, shape.num_layers, shape.num_kv_heads, shape.head_dim, stored).token_bytes


def shape_of_config(name: str, config: dict[str, Any]) -> ModelShape:
    """Of a decoder-only transformer with full attention and gated MLPs, from the fields of its Hugging Face config.json.

    Raises ConfigError where a field is missing or tells of something else.
    """
    others = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    others += [words for field, words in NOT_MODELLED.items() if config.get(field)]
    require(not others, f"--model {name}: {', '.join(others)} cannot be planned for")
    try:
        return ModelShape(name, _attention(config), _weights(config), int(config["max_position_embeddings"]))
    except KeyError as error:
        raise ConfigError(f"--model {name}: its config.json has no {error}") from error


def model_named(name: str) -> ModelShape:
    """A preset, a config.json or a folder with one. Raises ConfigError."""
    if name in PRESETS:
        return shape_of_config(name, PRESETS[name])
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise ConfigError(
            f"--model {name}: neither a file, nor a folder with config.json, nor one of {', '.join(PRESETS)}"
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {name}: does not hold a JSON object")
    return shape_of_config(path.parent.name if path.name == "config.json" else path.stem, config)


def _attention(config: dict[str, Any]) -> Attention:
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return Attention(int(config["num_hidden_layers"]), heads, kv_heads, head_dim)


def _weights(config: dict[str, Any]) -> Weights:
    attention, hidden = _attention(config), int(config["hidden_size"])
    projections = 2 * hidden * attention.head_dim * (attention.num_heads + attention.num_kv_heads)
    gated_mlp = 3 * hidden * int(config.get("moe_intermediate_size") or config["intermediate_size"])
    num_experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    vocab = hidden * int(config["vocab_size"])
    embedding = 0 if config.get("tie_word_embeddings") else vocab
    layers = attention.num_layers
    if not num_experts:
        return Weights(layers * (projections + gated_mlp), vocab, embedding)
    dense = layers * (projections + hidden * num_experts)
    active = int(config["num_experts_per_tok"])
    return Weights(dense, vocab, embedding, layers * num_experts * gated_mlp, num_experts, active)


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 131_072,  # with YaRN, as long-prompt benchmarks run them
        "tie_word_embeddings": tied,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 12_288, 32),
    "Qwen3-32B": _qwen3(64, 5120, 25_600, 64),
    "MiniMax-M2.5": {
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 200_064,
        "max_position_embeddings": 196_608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    "SmolLM2-135M": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""The fields of each model's config.json that shapes are made of."""
