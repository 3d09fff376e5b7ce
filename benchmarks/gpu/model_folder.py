"""Folders of models by their shape alone: config.json and a byte-level tokenizer, for `--load-format dummy`."""

import json
from itertools import product
from pathlib import Path
from typing import Any

VOCAB_SIZE = 151_936
END_OF_TEXT = "<|endoftext|>"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "rope_theta": 1_000_000.0}


def qwen3(layers: int, hidden: int, mlp: int, heads: int, *, tied: bool, **more: Any) -> dict[str, Any]:
    """The fields of a Qwen3 config.json, with YaRN for 131,072 positions."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 131_072,
        "rope_parameters": YARN,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": VOCAB_SIZE - 1,
        "eos_token_id": VOCAB_SIZE - 1,
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-8b": qwen3(36, 4096, 12_288, 32, tied=False),
    "qwen3-30b-a3b-cut": qwen3(
        12,
        2048,
        6144,
        32,
        tied=False,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "tiny": qwen3(2, 64, 128, 4, tied=True, num_key_value_heads=2, head_dim=16),
}


def make_folder(name: str, parent: Path) -> Path:
    """Write the folder of one of MODELS, if it is not there yet."""
    folder = parent / name
    if (folder / "tokenizer.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name], indent=1))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT})
    )
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer() -> Any:
    """A byte-level BPE whose every id is text: single bytes, then pairs and triples of letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = [*sorted(symbol for symbol in vocab if symbol.isascii() and symbol.isalnum()), "Ġ"]
    merges: list[tuple[str, str]] = []
    pairs = [(first, second) for first, second in product(letters, letters)]
    for left, right in [*pairs, *((first + second, third) for (first, second), third in product(pairs, letters))]:
        if len(vocab) == VOCAB_SIZE - 1:
            break
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return tokenizer
