"""Which tokenizer class of transformers (5.x) a model folder means, and what that class adds to the folder's files.

Such a class names special tokens that no file of the folder needs to name, and some classes replace parts of
tokenizer.json by their own. Both change a prompt's ids, and with them the answer.
"""

from collections.abc import Mapping

GENERIC = "TokenizersBackend"
"""The class that takes tokenizer.json as it is."""

_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_QWEN2 = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_CODE_LLAMA = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}
_GEMMA = {
    "unk_token": "<unk>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_COHERE = {
    "unk_token": "<UNK>",
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "pad_token": "<PAD>",
    "cls_token": "<CLS>",
    "sep_token": "<SEP>",
    "mask_token": "<MASK_TOKEN>",
}
_XGLM = {**_LLAMA, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"}

CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA | _CODE_LLAMA,
    "GemmaTokenizer": _GEMMA,
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "Qwen2Tokenizer": _QWEN2,
    "Qwen3_5Tokenizer": _QWEN2,
    "CohereTokenizer": _COHERE,
    "XGLMTokenizer": _XGLM,
}
"""Special tokens that a class names unless a file does."""

_BY_CLASS = {
    "GPT2Tokenizer": "codegen dbrx emu3 gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "Qwen2Tokenizer": "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
    "CohereTokenizer": "cohere cohere2",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma",
    "CodeLlamaTokenizer": "code_llama",
    "XGLMTokenizer": "xglm",
    GENERIC: "arctic ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite gpt_bigcode granite granitemoe "
    "granitemoehybrid granitemoeshared hyperclovax internlm2 internlm3 jamba kimi_linear mimo_v2_flash minicpm3 "
    "minimax_m2 ministral ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 olmo_hybrid persimmon phi3 phimoe "
    "stablelm",
}
MODEL_CLASSES: Mapping[str, str] = {kind: name for name, kinds in _BY_CLASS.items() for kind in kinds.split()}
"""The class that is registered for a model type, for the causal language models among them."""

DISTRUSTED = frozenset({"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"})
"""Model types whose registered class wins over the one that a folder names."""


def tokenizer_class(stated: str | None, model_type: str | None, is_byte_level: bool) -> str:
    """The class by the name in a folder's files (tokenizer_config.json, else config.json) and its model type."""
    registered = MODEL_CLASSES.get(model_type or "")
    is_distrusted = model_type in DISTRUSTED or registered == GENERIC
    name = stated.removesuffix("Fast") if stated else registered or GENERIC
    if name == "LlamaTokenizer" and is_byte_level and not is_distrusted:
        return GENERIC  # Llama 3's folders name the class of Llama 2
    if registered is not None and is_distrusted:
        name = registered
    return name if name in CLASS_TOKENS else GENERIC
