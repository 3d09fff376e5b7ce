"""Special and added tokens of a model folder, gathered from every file that may name them, as transformers (5.x) does.

The order of precedence is not obvious. tokenizer_config.json names tokens (`bos_token` and so on, further `*_token`
keys, lists of extra ones) and may list added tokens. Only if it lists none, special_tokens_map.json overrides its
names, and added_tokens.json adds to them. What no file names, the tokenizer's class does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA, OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """The files that name tokens; an empty mapping is a file that is not there."""

    config: Json  # tokenizer_config.json
    special_map: Json  # special_tokens_map.json
    added: Json  # added_tokens.json: text to id
    listed: Sequence[Json] = ()  # `added_tokens` of tokenizer.json


@dataclass(slots=True)
class SpecialTokens:
    """`named` by attribute (bos_token, ...); `listed` by id; `extra` have neither."""

    named: dict[str, AddedToken] = field(default_factory=dict)
    listed: dict[int, AddedToken] = field(default_factory=dict)
    extra: list[AddedToken] = field(default_factory=list)

    @property
    def texts(self) -> dict[str, str]:
        """The named tokens as chat templates want them."""
        return {name: token.content for name, token in self.named.items()}

    def missing_from(self, known: Iterable[str]) -> list[AddedToken]:
        """Tokens to add to a vocabulary that has `known` as added tokens, in the order that gives them their ids."""
        seen = set(known)
        special = {token.content for token in self.named.values()}
        wanted = []
        by_id = [self.listed[token_id] for token_id in sorted(self.listed)]
        for token in [*by_id, *self.named.values(), *self.extra]:
            if token.content not in seen:
                seen.add(token.content)
                wanted.append(_as_special(token) if token.content in special else token)
        return wanted


def gather(files: TokenFiles, class_tokens: Mapping[str, str]) -> SpecialTokens:
    """Everything that `files` and the tokenizer's class (`class_tokens`) name."""
    lists_tokens = "added_tokens_decoder" in files.config
    merged = dict(files.config) if lists_tokens else {**files.config, **files.special_map}
    extra = merged.get(EXTRA) or merged.get(OLD_EXTRA) or ()
    named = _named(merged, class_tokens)
    if isinstance(extra, Mapping):
        named |= {name: token for name, value in extra.items() if (token := _token(value)) is not None}
        extra = ()
    found = SpecialTokens(named, {}, [token for value in extra if (token := _token(value)) is not None])
    found.listed = _listed_in_config(files.config) if lists_tokens else _listed_elsewhere(files, found)
    known = {token.content: token for token in found.listed.values()}
    for name in STANDARD_NAMES:
        if name in named:
            named[name] = known.get(named[name].content, named[name])
    return found


def _named(merged: Json, class_tokens: Mapping[str, str]) -> dict[str, AddedToken]:
    """Named tokens, standard ones first. A name that is given as null stays without a token."""
    values = {**class_tokens, **{key: value for key, value in merged.items() if key.endswith("_token")}}
    names = [name for name in STANDARD_NAMES if name in values]
    names += [name for name in values if name not in STANDARD_NAMES]
    return {name: token for name in names if (token := _token(values[name])) is not None}


def _listed_in_config(config: Json) -> dict[int, AddedToken]:
    entries = {
        int(token_id): _token(value, special=False) for token_id, value in config["added_tokens_decoder"].items()
    }
    return {token_id: token for token_id, token in entries.items() if token is not None}


def _listed_elsewhere(files: TokenFiles, found: SpecialTokens) -> dict[int, AddedToken]:
    special = {token.content for token in [*found.named.values(), *found.extra]}
    listed = {
        int(token_id): AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in files.added.items()
    }
    for entry in files.listed:
        token = _token(entry, special=False)
        if token is not None:
            listed[int(entry["id"])] = token
    return listed


def _token(value: Any, special: bool = True) -> AddedToken | None:
    """A token as a text, or as an object with its flags; `special` if it does not say."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        return None
    flags = {name: bool(value[name]) for name in FLAGS if name in value}
    return AddedToken(value["content"], **{"special": special, **flags})


def _as_special(token: AddedToken) -> AddedToken:
    if token.special:
        return token
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )
