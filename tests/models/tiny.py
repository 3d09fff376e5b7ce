"""Every causal-language-model class of the installed library as a folder: two layers, width 64, random weights."""

import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 320

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "d_ff": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # encoder-decoder
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    # experts
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    # compressed attention
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # recurrent state
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
}
"""Taken over by every configuration class that has a field of the name."""

_DECODER: dict[str, Any] = {"is_decoder": True}

SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    },
    "dbrx": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 512,
        "vocab_size": VOCAB,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "jetmoe": {"kv_channels": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral": {"sliding_window": None},
    "olmo": {"clip_qkv": 0.5},
    "xmod": {"default_language": "en_XX"} | _DECODER,
}
"""What a class needs besides, by model type."""

SPECIAL |= {
    model_type: _DECODER
    for model_type in [
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
    ]
}

NOT_SHRUNK = frozenset(
    [
        "dbrx",
        "dots3_note_text",
        "falcon",
        "falcon_h1",
        "gemma4_assistant",
        "gemma4_text",
        "gemma4_unified_text",
        "mamba2",
        "prophetnet",
        "reformer",
        "xlnet",
        "xlstm",
        "zamba",
        "zamba2",
        "zaya",
    ]
)
"""Classes that do not accept the small sizes; all but dbrx are refused by their configuration alone."""


def model_types() -> list[str]:
    """The model type of every configuration class that the library maps to a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def tiny_config(model_type: str) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    sizes: dict[str, Any] = {}
    if model_type not in NOT_SHRUNK:
        known = config_class()
        sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    return config_class(**(sizes | SPECIAL.get(model_type, {})))


def write_config(folder: Path, config: PreTrainedConfig) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return folder


def write_weights(folder: Path, config: PreTrainedConfig) -> None:
    """Random weights of a size that makes every layer matter, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(config.model_type.encode()))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
