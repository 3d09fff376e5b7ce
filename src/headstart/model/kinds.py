"""Model types of kinds that are not built, with the reason for each. Never imports torch.

Only what holds for every configuration of a type stands here; what a configuration decides is a rule of `refusals.py`.
Types that are not listed are tried: the self-test decides when they are loaded. docs/models.md shows the outcome for
every type of the library.
"""

_KINDS: dict[str, str] = {
    "keeps a recurrent state beside or instead of keys and values, which is not built": (
        "bamba falcon_h1 falcon_mamba jamba mamba mamba2 recurrent_gemma rwkv xlstm zamba zamba2"
    ),
    "biases attention scores by distance (ALiBi), which is not built": "bloom mpt",
    "computes attention in its own code, not through the library's attention interface": (
        "big_bird cpmant falcon gpt_neo gpt_neox_japanese megatron-bert openai-gpt reformer rembert roformer trocr xglm "
        "xlm xlnet"
    ),
    "counts positions from its padding token's id, which is not built": (
        "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod"
    ),
    "calls the attention more than once for each layer and token, which is not built": "diffllama hrm_text",
    "adds learned sinks to attention scores, which is not built": "flint gpt_oss",
    "masks keys by their content, which is not built": "doge",
    "cuts bytes into patches by a second model, which is not built": "blt",
}

NOT_BUILT: dict[str, str] = {name: reason for reason, names in _KINDS.items() for name in names.split()}
"""The reason by model type, as it follows the type's name in a message."""

BIDIRECTIONAL = frozenset(["bert", "bert-generation", "electra", "ernie", "roc_bert"])
"""Types that attend causally only if their configuration says `is_decoder`."""
