"""A model's tokenizer: text to ids and back, and the bytes behind single ids."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from headstart.text.vocabulary import TokenRule, token_rule


class TextTokenizer:
    """Wraps `tokenizers.Tokenizer`. Special tokens written out in a text become their ids, as everywhere in the field.

    `config` is tokenizer_config.json with the chat templates of the folder's own files; `named` are bos_token and so
    on, as chat templates want them. Thread-safe after construction as far as `tokenizers` is.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str] | None = None
    ) -> None:
        self._backend = backend
        self.config = config
        self.named_special_tokens: Mapping[str, str] = named or {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; `add_special_tokens` adds what the model wants around a text (BOS), not for chat renders.

        Other threads run meanwhile: the library holds the interpreter's lock while it encodes one text, but not a batch.
        """
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_after(self, prompt: Sequence[int], ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text that `ids` add to a prompt: a leading space that decoding them alone would drop is kept."""
        head = list(prompt[-DECODE_CONTEXT:])
        return self.decode(head + list(ids), skip_special_tokens)[len(self.decode(head, skip_special_tokens)) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for inside a text; partial characters stay partial. Empty for an unknown id."""
        return self._bytes[token_id]

    def output_bytes(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """`token_bytes` as a table that fills itself; special tokens are empty in it if they are skipped."""
        return self._output_bytes if skip_special_tokens else self._bytes

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
    def rule(self) -> TokenRule | None:
        """How tokens become bytes; None if a token's text depends on its neighbours."""
        decoder = self._backend.decoder
        return token_rule(None if decoder is None else json.loads(decoder.__getstate__()))

    @cached_property
    def _bytes(self) -> "_Table":
        return _Table(self._compute_bytes)

    @cached_property
    def _output_bytes(self) -> "_Table":
        return _Table(lambda token_id: b"" if token_id in self.special_ids else self._bytes[token_id])

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if self.rule is None:
            return self.decode_after([token_id], [token_id], skip_special_tokens=False).encode()
        return self.rule.to_bytes(token)


DECODE_CONTEXT = 8
"""Tokens of the prompt that a decoder may look at."""


class _Table(dict[int, bytes]):
    """Computes an entry when it is first read. It holds at most the vocabulary: unknown ids are not kept."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        data = self._compute(token_id)
        if data:
            self[token_id] = data
        return data
