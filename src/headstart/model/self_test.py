"""The self-test of a loaded model: its steps give the library's own logits, or it is not served.

Two facts are checked, on two short prompts of tokens that are spread over the vocabulary:

    calls    every layer asks for our attention exactly once a step
    logits   they equal the library's own forward (eager attention, no cache) within a bound for the weights' type:
             cold in one chunk, in two chunks, and as a single token, each beside other rows

And one more, without any KV: rows far apart in one step give what each gives alone at its position, where the library
counts the tokens before it by its cache. That finds position rules that look at the whole step, or count from its start.

`library_logits` is taken before modules are rewritten; `check_model` afterwards, over a small
pool of the same page size.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from headstart.attention.torch_cpu import AttentionRow
from headstart.core.arrays import int32_array
from headstart.core.layout import pages_for
from headstart.model.hook import ATTENTION_NAME, STEP_KEYWORD, StepAttention
from headstart.model.refused import ModelRefused

Begin = Callable[[Sequence[AttentionRow]], StepAttention]
"""Plans one step's attention over the pool, as an attention backend's `begin`."""

BOUNDS = {torch.float32: 5e-4, torch.float16: 3e-2, torch.bfloat16: 0.1}
"""Largest relative difference (Euclidean, of one token's centred logits) between two ways to the same logits. float32:
sums in another order; the other types: also values that are rounded to them between layers."""
_SHARE_WITHIN = {torch.float32: 1.0, torch.float16: 0.5, torch.bfloat16: 0.5}
"""Fraction of tokens that must be within the bound. Where values are rounded, a router may pick another expert."""
_NOISE_FACTOR, _MOST = 6.0, 0.7
"""Where the model computes in a rounded type, the bound is at least this many times the median difference between two
of the library's own attention implementations, and at most half of what unrelated logits differ by (1.4)."""

_PROMPT = 19  # tokens
_CUT = 11  # where the prompt is cut in two chunks
_SINGLE = 5  # the position that runs as a single token
_FAR = 3  # tokens of each of two rows that are far apart


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Two prompts, the library's logits for every token of them, and how far the library is from itself."""

    prompts: torch.Tensor  # [2, tokens] int64
    logits: torch.Tensor  # [2, tokens, vocabulary] float32
    noise: float = 0.0  # median relative difference between eager and fused attention; 0 in float32


@dataclass(frozen=True, slots=True)
class ScratchPool:
    """A pool of at least `num_test_pages(page_size)` pages that holds nothing."""

    begin: Begin
    page_size: int
    num_layers: int


def num_test_pages(page_size: int) -> int:
    """Pages that the self-test writes to."""
    return 2 * pages_for(_PROMPT, page_size) + pages_for(_SINGLE + 1, page_size)


@torch.inference_mode()
def library_logits(model: PreTrainedModel) -> SelfTest:
    """What the library itself computes with `model`, as it was loaded. Raises ModelRefused if it cannot."""
    try:
        vocab_size = int(model.get_input_embeddings().weight.shape[0])
        prompts = (torch.arange(2 * _PROMPT, device=model.device).reshape(2, -1) * 7919 + 11) % vocab_size
        logits = _library_run(model, "eager", prompts)
        noise = _noise(model, prompts, logits)
        model.set_attn_implementation(ATTENTION_NAME)
    except Exception as error:
        raise _refused(model, f"the library's own forward fails: {_named(error)}") from error
    return SelfTest(prompts, logits, noise)


def _library_run(model: PreTrainedModel, attention: str, prompts: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation(attention)
    return model(input_ids=prompts, use_cache=False).logits.float()


def _noise(model: PreTrainedModel, prompts: torch.Tensor, eager: torch.Tensor) -> float:
    if model.dtype == torch.float32:
        return 0.0
    try:
        return float(_relative(_library_run(model, "sdpa", prompts), eager).median())
    except ValueError:  # the library has no other implementation for this model
        return 0.0


@torch.inference_mode()
def check_model(
    model: PreTrainedModel, expected: SelfTest, pool: ScratchPool, dtype: torch.dtype, context_len: int
) -> None:
    """Raise ModelRefused, with both facts, unless the model's steps over `pool` give the `expected` logits.

    `dtype` is the type that weights are rounded to, `context_len` the longest context that will be served.
    """
    bound = _Bound.of(dtype, expected.noise)
    try:
        facts = _rows_over_pages(model, expected, pool, bound) + _far_rows(model, expected, bound, context_len)
    except Exception as error:
        raise _refused(model, f"a step fails: {_named(error)}") from error
    if facts:
        raise _refused(model, "; ".join(dict.fromkeys(facts)))


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens [start, end) of a prompt, as one row on pages from `first_page` on."""

    name: str
    prompt: int
    start: int
    end: int
    first_page: int


def _steps(page_size: int) -> tuple[tuple[_Part, ...], ...]:
    chunked = pages_for(_PROMPT, page_size)
    single = 2 * chunked
    return (
        (
            _Part("cold", 0, 0, _PROMPT, 0),
            _Part("in two chunks", 1, 0, _CUT, chunked),
            _Part("before a single token", 0, 0, _SINGLE, single),
        ),
        (
            _Part("as a single token", 0, _SINGLE, _SINGLE + 1, single),
            _Part("in two chunks", 1, _CUT, _PROMPT, chunked),
        ),
    )


def _rows_over_pages(model: PreTrainedModel, expected: SelfTest, pool: ScratchPool, bound: "_Bound") -> list[str]:
    facts = []
    for parts in _steps(pool.page_size):
        counted = _Counted(pool.begin([_row(part, pool.page_size) for part in parts]))
        spans = [torch.arange(part.start, part.end, device=expected.prompts.device) for part in parts]
        ids = torch.cat([expected.prompts[part.prompt][part.start : part.end] for part in parts])
        got = _packed(model, ids, torch.cat(spans), counted)
        facts += counted.facts(pool.num_layers)
        for part, rows in zip(parts, got.split([len(span) for span in spans]), strict=True):
            facts += bound.facts(part.name, rows, expected.logits[part.prompt][part.start : part.end])
    return facts


def _row(part: _Part, page_size: int) -> AttentionRow:
    pages = int32_array(range(part.first_page, part.first_page + pages_for(part.end, page_size)))
    return AttentionRow(pages, part.start, part.end - part.start)


def _packed(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
    keywords: dict[str, Any] = {STEP_KEYWORD: step}
    return _logits(model(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **keywords))


def _far_rows(model: PreTrainedModel, expected: SelfTest, bound: "_Bound", context_len: int) -> list[str]:
    """Facts about a step of a row at position 0 and one at the end of the context, against each of them alone."""
    size = min(_FAR, context_len // 2)
    starts = (0, context_len - size)
    ids = expected.prompts[0][:size]
    ranges = [torch.arange(start, start + size, device=ids.device) for start in starts]
    together = _packed(model, torch.cat([ids, ids]), torch.cat(ranges), _NoPool())
    alone = [_alone(model, ids, positions) for positions in ranges]
    return bound.facts(f"at positions 0 and {starts[1]} of one step", together, torch.cat(alone))


def _alone(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits of one row whose library cache counts the tokens before it and holds none."""
    accepted = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in accepted else "past_key_values"
    keywords: dict[str, Any] = {STEP_KEYWORD: _NoPool(), keyword: _CountingCache(int(positions[0]))}
    return _logits(model(input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=True, **keywords))


class _CountingCache(DynamicCache):
    """Tells of tokens that came before, and keeps no keys or values."""

    def __init__(self, num_seen: int) -> None:
        super().__init__()
        self._num_seen = num_seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


class _NoPool:
    """Stands in for a step's attention without KV: its result depends on each token's query, key and value alike."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        score = (query * key.repeat_interleave(group, 1)).sum(-1, keepdim=True) * scale
        return (torch.tanh(score) + 1) * value.repeat_interleave(group, 1) + query[..., : value.shape[-1]]


class _Counted:
    """A step's attention that counts its calls by layer."""

    def __init__(self, step: StepAttention) -> None:
        self._step = step
        self._calls: Counter[int] = Counter()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self._calls[layer] += 1
        return self._step.attend(layer, query, key, value, scale)

    def facts(self, num_layers: int) -> list[str]:
        wrong = [layer for layer in range(num_layers) if self._calls[layer] != 1]
        wrong += [layer for layer in self._calls if layer not in range(num_layers)]
        return [f"layer {layer} calls the attention {self._calls[layer]} times a step, not once" for layer in wrong[:1]]


@dataclass(frozen=True, slots=True)
class _Bound:
    """How far logits may be from the library's, and for what share of the tokens."""

    relative: float
    share: float

    @classmethod
    def of(cls, dtype: torch.dtype, noise: float) -> "_Bound":
        return cls(min(_MOST, max(BOUNDS[dtype], _NOISE_FACTOR * noise)), _SHARE_WITHIN[dtype])

    def facts(self, case: str, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
        differences = _relative(got, wanted).sort().values
        found = float(differences[max(0, int(len(differences) * self.share) - 1)])
        if found <= self.relative:
            return []
        return [f"{case}, logits are {found:.1e} off the library's own (bound {self.relative:.0e})"]


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[tokens] the difference of each token's logits over the size of the wanted ones around their mean."""
    scale = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-20)
    return torch.nan_to_num((got - wanted).norm(dim=-1) / scale, nan=torch.inf)


def _logits(output: Any) -> torch.Tensor:
    return output.logits[0].float()


def _named(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _refused(model: PreTrainedModel, facts: str) -> ModelRefused:
    kind = getattr(model.config, "model_type", "unknown")
    return ModelRefused(f"model type {kind!r} fails the self-test and would answer wrongly: {facts}")
