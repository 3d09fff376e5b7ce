"""Parts of tokenizer.json that a tokenizer class of transformers (5.x) replaces by its own.

Such a class takes the vocabulary and the merges from the file and no more. Where the file has the class's own parts,
as the folders of the models that it was written for have, nothing changes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]

NFC: Json = {"type": "NFC"}
BYTES: Json = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
SPACE_OF_PIECES: Json = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def replace_parts(file: Json, name: str, config: Json) -> dict[str, Any] | None:
    """tokenizer.json as the class `name` makes it; None if it is taken as it is.

    `config` is tokenizer_config.json. Only merge vocabularies (BPE) are rebuilt.
    """
    build = _PARTS.get(name)
    if build is None or file.get("model", {}).get("type") != "BPE":
        return None
    parts = build(config)
    model = {
        **file["model"],
        "ignore_merges": False,
        "byte_fallback": False,
        "fuse_unk": False,
        **parts.pop("model", {}),
    }
    return {**file, **parts, "model": model}


def _gpt2(config: Json) -> dict[str, Any]:
    return {"normalizer": None, "pre_tokenizer": _byte_words(config), "decoder": BYTES}


def _gpt_neox(config: Json) -> dict[str, Any]:
    return {**_gpt2(config), "normalizer": NFC, "post_processor": None}  # so no BOS, whatever the file adds


def _qwen(words: str) -> Callable[[Json], dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}

    def parts(config: Json) -> dict[str, Any]:
        steps = [split, {**_byte_words(config), "use_regex": False}]
        return {"normalizer": NFC, "pre_tokenizer": _sequence("pretokenizers", steps), "decoder": BYTES}

    return parts


def _cohere(config: Json) -> dict[str, Any]:
    steps = [{"type": "Digits", "individual_digits": True}, _byte_words(config)]
    return {"normalizer": NFC, "pre_tokenizer": _sequence("pretokenizers", steps), "decoder": BYTES}


def _gemma(config: Json) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    steps = [SPACE_OF_PIECES, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": split,
        "decoder": _sequence("decoders", steps),
        "model": {"fuse_unk": True, "byte_fallback": True},
    }


def _llama(config: Json) -> dict[str, Any]:
    return _pieces(config, "always" if config.get("legacy", False) else "first", {"unk_token": None})


def _code_llama(config: Json) -> dict[str, Any]:
    return _pieces(config, "first", {})


def _pieces(config: Json, scheme: str, model: Json) -> dict[str, Any]:
    """SentencePiece's manner: a text's first word, or each one after a special token, gets a space before it."""
    has_prefix = config.get("add_prefix_space") is not False
    scheme = scheme if has_prefix else "never"
    steps = [SPACE_OF_PIECES, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": _sequence("decoders", steps),
        "model": {"fuse_unk": True, "byte_fallback": True, **model},
    }


def _byte_words(config: Json) -> dict[str, Any]:
    return {**BYTES, "add_prefix_space": bool(config.get("add_prefix_space"))}


def _sequence(key: str, steps: Sequence[Json]) -> dict[str, Any]:
    return {"type": "Sequence", key: steps}


_PARTS: Mapping[str, Callable[[Json], dict[str, Any]]] = {
    "LlamaTokenizer": _llama,
    "CodeLlamaTokenizer": _code_llama,
    "GemmaTokenizer": _gemma,
    "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
    "Qwen2Tokenizer": _qwen(QWEN2_WORDS),
    "Qwen3_5Tokenizer": _qwen(QWEN3_5_WORDS),
    "CohereTokenizer": _cohere,
}
