"""Fake KV that tells what it is: the fingerprint of a position digests the namespace and every token up to it.

A page that holds other positions, another prompt's tokens or another tenant's KV, or that was never written, therefore
differs from what a reader expects. The fake model's next token is a function of the last fingerprint, so `oracle` knows
every output beforehand.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array
from headstart.core.batch import SampleSpec
from headstart.core.kv_layout import KVLayout, PageGroup, Part
from headstart.core.request import SamplingParams

Fingerprints = NDArray[np.uint64]
_MASK = (1 << 64) - 1


def fingerprint_layout(page_size: int) -> KVLayout:
    """A pool of fingerprints: one number a token."""
    return KVLayout(page_size, (PageGroup(1, (Part("fingerprint", 1, 1, "uint64"),)),))


def chain(fingerprint: int, value: int) -> int:
    """One step of a 64-bit chain (constants of splitmix64)."""
    fingerprint = ((fingerprint ^ value) + 0x9E3779B97F4A7C15) & _MASK
    fingerprint = ((fingerprint ^ (fingerprint >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    fingerprint = ((fingerprint ^ (fingerprint >> 27)) * 0x94D049BB133111EB) & _MASK
    return fingerprint ^ (fingerprint >> 31)


@dataclass(frozen=True, slots=True, eq=False)
class ComputedContext:
    """A sequence up to some position: its tokens as int32 bytes, and the fingerprint of each of its positions."""

    tokens: bytes
    fingerprints: Fingerprints

    @property
    def last(self) -> int:
        return int(self.fingerprints[-1])


class ContextBook:
    """Every context that was ever computed, by its last fingerprint: what a page claims to hold can be looked up."""

    def __init__(self) -> None:
        self._found_in: dict[
            int, tuple[ComputedContext, int]
        ] = {}  # fingerprint -> (a context with it, its position + 1)
        self._roots: dict[bytes, int] = {}

    def root(self, namespace: bytes) -> int:
        """The chain's value before position 0."""
        if namespace not in self._roots:
            self._roots[namespace] = int.from_bytes(hashlib.sha256(b"root" + namespace).digest()[:8], "little")
        return self._roots[namespace]

    def find(self, fingerprint: int) -> ComputedContext | None:
        """The context that ends with this fingerprint."""
        if (found := self._found_in.get(fingerprint)) is None:
            return None
        context, length = found
        return ComputedContext(context.tokens[: 4 * length], context.fingerprints[:length])

    def extend(self, before: ComputedContext | None, namespace: bytes, tokens: Int32Array) -> ComputedContext:
        """The context of `before`'s tokens followed by `tokens` (at least one)."""
        fingerprint = self.root(namespace) if before is None else before.last
        new = []
        for token in tokens.tolist():
            fingerprint = chain(fingerprint, token)
            new.append(fingerprint)
        fingerprints = np.array(new, dtype=np.uint64)
        raw = tokens.astype("<i4", copy=False).tobytes()
        if before is not None:
            fingerprints, raw = np.concatenate((before.fingerprints, fingerprints)), before.tokens + raw
        context = ComputedContext(raw, fingerprints)
        for length, made in enumerate(new, start=len(fingerprints) - len(new) + 1):
            self._found_in.setdefault(made, (context, length))
        return context


def next_token(last_fingerprint: int, spec: SampleSpec, vocab_size: int) -> int:
    """Greedy: a function of the context alone. Sampled: of the context and (seed, choice, output index). Penalties see
    which tokens the context has, and which of them are outputs."""
    draw = last_fingerprint
    if spec.params.temperature > 0:
        for part in (spec.params.seed, spec.choice, spec.output_index):
            draw = chain(draw, part)
    if (params := spec.params).presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
        return _penalized_token(draw, spec, vocab_size)
    while (token := (draw >> 16) % vocab_size) in spec.banned_ids:
        draw = chain(draw, 1)
    return token


def _penalized_token(draw: int, spec: SampleSpec, vocab_size: int) -> int:
    """The best score of a model that likes to repeat itself: without penalties it would not go on to anything new."""
    params, seen = spec.params, set(spec.context.tolist())
    outputs = Counter(spec.context[spec.prompt_len :].tolist())

    def score(token: int) -> float:
        likes = (chain(draw, token) >> 11) / (1 << 53)
        if token in seen:
            likes = (likes + 1.0) / params.repetition_penalty
        return likes - params.presence_penalty * (token in outputs) - params.frequency_penalty * outputs[token]

    return max((token for token in range(vocab_size) if token not in spec.banned_ids), key=score)


@dataclass(frozen=True, slots=True)
class Draw:
    """What besides the context decides an output."""

    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    choice: int = 0
    stop_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0


def oracle(
    prompt: Int32Array, num_tokens: int, vocab_size: int, namespace: bytes = b"", draw: Draw | None = None
) -> list[int]:
    """The first `num_tokens` outputs of a prompt, or fewer where a stop id ends them (it is the last one then)."""
    draw = draw or Draw()
    book = ContextBook()
    context = book.extend(None, namespace, prompt)
    outputs: list[int] = []
    while len(outputs) < num_tokens:
        banned = draw.stop_ids if len(outputs) < draw.min_new_tokens else ()
        context_ids = np.array([*prompt.tolist(), *outputs], dtype=np.int32)
        spec = SampleSpec(draw.sampling, draw.choice, len(outputs), context_ids, len(prompt), banned)
        token = next_token(context.last, spec, vocab_size)
        outputs.append(token)
        if token in draw.stop_ids:
            break
        context = book.extend(context, namespace, np.array([token], dtype=np.int32))
    return outputs
