"""Dequantise a GGUF model into a model folder. Exact: weights are stored as the float32 values that the blocks encode.

Built for the `llama` architecture with a byte-level BPE vocabulary of the `smollm` kind; everything else is refused by
name. Facts of the format: llama.cpp's gguf-py and its convert_hf_to_gguf.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headstart.model.errors import ModelRefused, shortened

_SPECIAL = (3, 4)  # token types CONTROL and USER_DEFINED
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OPTIONAL = frozenset({"output.weight"})
"""Without it the output weights are the embedding's."""
_BLOCK_NAMES = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}


class _Fields:
    """The file's metadata by key."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._reader = reader
        self._path = path

    def __getitem__(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise ModelRefused(f"{self._path} has no field {key!r}")
        return field.contents()

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()


def convert_gguf(parts: list[Path], folder: Path, progress: Any) -> None:
    """Write config, weights and tokenizer of the model in `parts` (one file, or all parts of a split one in order) into
    the existing empty `folder`. Raises WorkerError."""
    readers = [_reader(part) for part in parts]
    gguf = parts[0]
    fields = _Fields(readers[0], gguf)
    _check_split(fields, parts)
    _check_supported(fields, gguf)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    config = _model_config(fields, tied=all(tensor.name != "output.weight" for tensor in tensors))
    _check_complete([tensor.name for tensor in tensors], fields["llama.block_count"], gguf)
    weights: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(tensors):
        progress(f"dequantising {gguf.name}", done, len(tensors))
        weights[_hf_name(tensor.name, gguf)] = _dequantised(tensor, config)
    progress("writing weights", len(tensors), len(tensors))
    try:
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:  # its text for a full disk; an OSError elsewhere
        raise OSError(f"writing weights failed: {error}") from error
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    _write_tokenizer(fields, config, folder)


def _reader(gguf: Path) -> GGUFReader:
    with gguf.open("rb") as file:
        if file.read(11) == b"version htt":
            raise ModelRefused(f"{gguf} is a Git LFS pointer, not the model; run `git lfs pull` in its folder")
    try:
        return GGUFReader(str(gguf))
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelRefused(f"{gguf} is not a readable GGUF file: {error}") from error


def _check_split(fields: _Fields, parts: list[Path]) -> None:
    count = int(fields.get("split.count", 0)) or 1
    if count != len(parts):
        raise ModelRefused(
            f"{parts[0]} states {count} parts (split.count), and {len(parts)} are named as its parts; keep all of them "
            f"in one folder under their names, NAME-00001-of-{count:05}.gguf and so on"
        )


def _check_complete(present: list[str], num_blocks: int, gguf: Path) -> None:
    wanted = set(_TOP_NAMES) - _OPTIONAL
    wanted |= {f"blk.{block}.{name}" for block in range(num_blocks) for name in _BLOCK_NAMES}
    if missing := sorted(wanted - set(present)):
        raise ModelRefused(f"{gguf} lacks {len(missing)} tensors: {shortened(missing)}")
    if len(set(present)) != len(present):
        raise ModelRefused(f"{gguf} holds a tensor twice")
    if beyond := sorted(name for name in present if name not in wanted | _OPTIONAL):
        raise ModelRefused(f"{gguf} holds tensors that are not converted: {shortened(beyond)}")


def _check_supported(fields: _Fields, gguf: Path) -> None:
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in expected.items():
        if fields[key] != value:
            raise ModelRefused(f"{gguf} has {key} = {fields[key]!r}; only {value!r} can be converted")
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise ModelRefused(f"{gguf} uses rope scaling {fields['llama.rope.scaling.type']!r}, which is not converted")
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    if fields.get("llama.rope.dimension_count", width // heads) != width // heads:
        raise ModelRefused(f"{gguf} rotates only a part of each head, which is not converted")


def _model_config(fields: _Fields, tied: bool) -> dict[str, Any]:
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": width // heads,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _hf_name(name: str, gguf: Path) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    if not name.startswith("blk.") or rest not in _BLOCK_NAMES:
        raise ModelRefused(f"{gguf} holds a tensor {name!r}, which is not converted")
    return f"model.layers.{block}.{_BLOCK_NAMES[rest]}"


def _dequantised(tensor: ReaderTensor, config: dict[str, Any]) -> NDArray[np.float32]:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape)
    if tensor.name.endswith("attn_q.weight"):
        weight = _rotate_half_order(weight, config["num_attention_heads"])
    elif tensor.name.endswith("attn_k.weight"):
        weight = _rotate_half_order(weight, config["num_key_value_heads"])
    return np.ascontiguousarray(weight)


def _rotate_half_order(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp rotates neighbouring pairs; transformers rotates element i with i + head_dim / 2."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(fields: _Fields, config: dict[str, Any], folder: Path) -> None:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[config["eos_token_id"]]
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": eos,
        "pad_token": eos,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", described)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))
