"""A model folder gives the ids, texts and special tokens that transformers' AutoTokenizer gives, whichever files name them."""

import json

import pytest

from headstart.text.chat_template import load_chat_template
from headstart.text.folder import load_tokenizer

from .small import byte_level, sentence_piece

transformers = pytest.importorskip("transformers")

PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ pad_token }}{{ unk_token }}{{ image_token }}"
)
TEXTS = [
    "",
    "The quick brown fox",
    " leading and  double  spaces\n\n",
    "äöü 你好 🙂",
    "a</s>b </s> c<s>d",
    "fox<|im_end|>dog<|im_start|>",
    "a<tool>b<end>c <think> the </think>",
    "123 e\u0301 don't  stop\r\n\n 45 x_y▁z",
    "<unk> <pad> <|endoftext|> <bos>the<eos>",
]


def special(text, **flags):
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


def byte_file():
    return json.loads(byte_level()._backend.to_str())


def without_added(file):
    return {**file, "added_tokens": []}


def with_bos():
    """A byte-level file whose post-processor begins each text with <|im_start|>."""
    token = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    return {**byte_file(), "post_processor": processor}


def piece_file():
    return json.loads(sentence_piece().to_str())


MAP = {"bos_token": "<|im_start|>", "eos_token": special("<|im_end|>"), "pad_token": "<|endoftext|>"}
NAMES = {**MAP, "eos_token": "<|im_end|>"}
LISTED = {
    "380": {**special("<tool>"), "special": True},
    "381": {**special("<think>", normalized=True), "special": False},
    "382": {**special("<end>", lstrip=True, rstrip=True), "special": True},
}
LAYOUTS = {
    "names in tokenizer_config": (byte_file, {"tokenizer_config": {**PLAIN, **NAMES}}),
    "names as objects in tokenizer_config": (
        byte_file,
        {"tokenizer_config": {**PLAIN, "eos_token": {"__type": "AddedToken", **special("<|im_end|>")}}},
    ),
    "names in special_tokens_map only": (byte_file, {"tokenizer_config": PLAIN, "special_tokens_map": MAP}),
    "no tokenizer_config, names in special_tokens_map": (byte_file, {"special_tokens_map": MAP}),
    "both, and the map wins": (
        byte_file,
        {"tokenizer_config": {**PLAIN, "eos_token": "<|endoftext|>"}, "special_tokens_map": MAP},
    ),
    "both, but the map counts for nothing beside listed tokens": (
        byte_file,
        {
            "tokenizer_config": {**PLAIN, "eos_token": "<|endoftext|>", "added_tokens_decoder": LISTED},
            "special_tokens_map": MAP,
        },
    ),
    "tokens in added_tokens_decoder only": (
        byte_file,
        {"tokenizer_config": {**PLAIN, **NAMES, "eos_token": "<end>", "added_tokens_decoder": LISTED}},
    ),
    "tokens in additional_special_tokens only": (
        byte_file,
        {"tokenizer_config": {**PLAIN, **NAMES, "additional_special_tokens": ["<tool>", "</s>"]}},
    ),
    "tokens in extra_special_tokens, named": (
        byte_file,
        {
            "tokenizer_config": {
                **PLAIN,
                **NAMES,
                "extra_special_tokens": {"image_token": "<tool>", "end_token": "<end>"},
            }
        },
    ),
    "a further name": (byte_file, {"tokenizer_config": {**PLAIN, **NAMES, "image_token": "<tool>"}}),
    "tokens in special_tokens_map's list only": (
        byte_file,
        {"tokenizer_config": PLAIN, "special_tokens_map": {**MAP, "additional_special_tokens": ["<tool>", "<end>"]}},
    ),
    "tokens in added_tokens only": (
        byte_file,
        {
            "tokenizer_config": {**PLAIN, **NAMES, "additional_special_tokens": ["<end>"]},
            "added_tokens": {"<tool>": 380, "<end>": 381, "<think>": 382},
        },
    ),
    "a tokenizer file without its special tokens": (
        lambda: without_added(byte_file()),
        {"tokenizer_config": {**PLAIN, **NAMES}},
    ),
    "names by GPT-2's class": (byte_file, {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}}),
    "names by the model type alone": (byte_file, {"config": {"model_type": "gpt2"}}),
    "a class name without eos": (
        byte_file,
        {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "eos_token": None, "bos_token": "<|im_start|>"}},
    ),
    "Llama 3 names Llama 2's class": (
        byte_file,
        {"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast", **NAMES}},
    ),
    "names by Llama's class": (piece_file, {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}}),
    "Llama's legacy pieces": (piece_file, {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer", "legacy": True}}),
    "Llama without a prefix space": (
        piece_file,
        {"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False}},
    ),
    "Llama with added tokens": (
        piece_file,
        {
            "tokenizer_config": {"tokenizer_class": "LlamaTokenizer", "pad_token": "<pad>"},
            "special_tokens_map": {"additional_special_tokens": ["<tool>"], "eos_token": special("</s>")},
        },
    ),
    "Mistral takes the file as it is": (
        piece_file,
        {
            "tokenizer_config": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"},
            "config": {"model_type": "mistral"},
        },
    ),
    "only tokenizer.json": (piece_file, {}),
    "GPT-NeoX adds no bos": (with_bos, {"tokenizer_config": {"tokenizer_class": "GPTNeoXTokenizerFast"}}),
    "GPT-2 with a prefix space": (
        byte_file,
        {"tokenizer_config": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}},
    ),
    "Qwen 2 cuts words its own way": (
        byte_file,
        {"tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", **NAMES}, "config": {"model_type": "qwen3"}},
    ),
    "Qwen 2 in a folder that names Llama's class": (
        byte_file,
        {"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast"}, "config": {"model_type": "qwen2"}},
    ),
    "Qwen 3.5": (byte_file, {"config": {"model_type": "qwen3_5_text"}}),
    "Cohere": (byte_file, {"tokenizer_config": {"tokenizer_class": "CohereTokenizer", **NAMES}}),
    "Gemma": (piece_file, {"tokenizer_config": {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>"}}),
    "Code Llama": (piece_file, {"tokenizer_config": {"tokenizer_class": "CodeLlamaTokenizer"}}),
    "a class that nobody knows": (byte_file, {"tokenizer_config": {"tokenizer_class": "NobodysTokenizer", **NAMES}}),
    "a class and model that disagree": (
        byte_file,
        {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}, "config": {"model_type": "olmo2"}},
    ),
    "the class in config.json": (byte_file, {"config": {"model_type": "llama", "tokenizer_class": "GPT2Tokenizer"}}),
    "asked to add bos and eos": (
        piece_file,
        {"tokenizer_config": {**PLAIN, "bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}},
    ),
    "special tokens are split": (byte_file, {"tokenizer_config": {**PLAIN, **NAMES, "split_special_tokens": True}}),
}


@pytest.fixture(params=LAYOUTS)
def folder(request, tmp_path):
    make, files = LAYOUTS[request.param]
    files = {"config": {"model_type": "llama"}, **files}
    for name, content in {"tokenizer": make(), **files}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_ids_texts_names_and_chats_equal_those_of_transformers(folder):
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(folder)
    assert dict(ours.named_special_tokens) == theirs.special_tokens_map
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    for text in TEXTS:
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    template = load_chat_template(ours, lambda: None)
    chat = [{"role": "user", "content": text} for text in TEXTS]
    assert template.render(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours.encode(template.render(chat), add_special_tokens=False) == expected


def test_further_templates_of_a_folder_serve_conversations_with_tools(tmp_path):
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(PLAIN))
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = load_chat_template(load_tokenizer(tmp_path), lambda: None)
    chat = [{"role": "user", "content": "x"}]
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        assert ours.render(chat, tools=tools) == theirs.apply_chat_template(chat, tools=tools, tokenize=False)
