"""A model folder's tokenizer: text to ids and back, and the bytes behind single ids."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headstart.core.errors import WorkerError

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TextTokenizer:
    """Wraps `tokenizers.Tokenizer`. Special tokens written out in a text become their ids, as everywhere in the field.

    `config` is tokenizer_config.json. Thread-safe after construction as far as `tokenizers` is.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        self._backend = backend
        self.config = config
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; `add_special_tokens` adds what the model wants around a text (BOS), not for chat renders."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; partial characters stay partial where the vocabulary is byte-level."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """What special tokens look like in text, longest first."""
        added = self._backend.get_added_tokens_decoder()
        texts = {token.content for token in added.values() if token.special and token.content}
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    @cached_property
    def named_special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and so on, as chat templates want them."""
        named = {}
        for name in NAMED_SPECIAL_TOKENS:
            value = self.config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[name] = text
        return named

    @cached_property
    def is_byte_level(self) -> bool:
        """Ids are runs of bytes, so text can be assembled byte by byte."""
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        return decoder.get("type") == "ByteLevel"

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        try:
            return bytes(self._byte_of_char[char] for char in token)
        except KeyError:
            return token.encode()

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        """GPT-2's printable stand-ins: bytes that print stand for themselves, the others follow from U+0100."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in printable]
        table = {chr(byte): byte for byte in printable}
        return table | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read tokenizer.json and tokenizer_config.json. Raises WorkerError with a message for the user."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WorkerError(f"{folder} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise WorkerError(f"cannot read {path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config_path = folder / "tokenizer_config.json"
    try:
        config = json.loads(config_path.read_text()) if config_path.is_file() else {}
    except ValueError as error:
        raise WorkerError(f"{config_path} is not valid JSON: {error}") from error
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text()
    return TextTokenizer(backend, config)
