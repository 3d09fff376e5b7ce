"""Small tokenizers made on the spot: a byte-level one with ChatML tokens, and one in SentencePiece's manner."""

import json
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headstart.text.tokenizer import TextTokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "Once upon a time there was a small house by the sea, and nobody lived there any more.",
    "Ein längerer Satz mit Umlauten: äöüß. 你好, 世界!  Привет, мир. 🙂🙃",
]
END = 2  # <|im_end|>


@cache
def byte_level() -> TextTokenizer:
    """Ids: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>, then bytes and merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
        "chat_template": CHATML,
    }
    return TextTokenizer(backend, config, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})


@cache
def piece_level() -> TextTokenizer:
    """Metaspace pieces with byte fallback: its decoder strips a leading space and joins byte pieces."""
    words = ["▁the", "▁fox", "▁", "fox", "es", "s", ".", "▁ä", "ö", "你"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(backend, {"eos_token": "</s>"}, {"eos_token": "</s>"})


@cache
def metaspace() -> TextTokenizer:
    """Pieces whose decoder drops every space of the first token."""
    words = ["▁the", "▁fox", "▁", "fox", "es", "s", ".", "▁ä", "ö▁ö", "你", "▁▁"]
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in words)], unk_id=0))
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return TextTokenizer(backend, {})


@cache
def word_piece() -> TextTokenizer:
    """Words and their ends: a token's text depends on whether it begins a word."""
    words = ["[UNK]", "[SEP]", "hello", "wor", "##ld", "##s", "fox", ".", ",", "##ö", "你"]
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return TextTokenizer(backend, {})


@cache
def sentence_piece() -> tokenizers.Tokenizer:
    """Llama 2's manner: merges over pieces with byte fallback. Ids: <unk>, <s>, </s>, 256 bytes, pieces."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [tuple(pair) for pair in model["merges"]]
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def vocab_size(tokenizer: TextTokenizer) -> int:
    return tokenizer._backend.get_vocab_size()
