"""Small tokenizers made on the spot: a byte-level one with ChatML tokens, and one in SentencePiece's manner."""

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

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
    return TextTokenizer(backend, config)


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
    return TextTokenizer(backend, {"eos_token": "</s>"})


def vocab_size(tokenizer: TextTokenizer) -> int:
    return tokenizer._backend.get_vocab_size()
