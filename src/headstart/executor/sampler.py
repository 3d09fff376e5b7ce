"""Draw one token per row.

Order of operations, per row: logit_bias, repetition penalty (prompt and outputs), frequency and presence penalties
(outputs only), allowed and banned ids, temperature, top-k, top-p over what top-k left, min-p, draw. Temperature 0 takes the
argmax after the penalties. The draw is an exponential race: of the tokens, each with the rate of its probability, the
first to arrive. Their uniform numbers are a pure function of (seed, choice, output index, token), so a draw depends on
nothing else in the batch, and another rounding of the logits changes it only where two tokens arrive at nearly the same
time or one of them is left out for it.

Log-probabilities are those of the model: natural log of the softmax of the raw logits, before any of the above.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.core.batch import Sampled, SampleSpec
from headstart.core.request import SamplingParams

_STREAM = 0x68656164_73746172  # second key word: keeps our streams apart from other uses of a seed
_FIRST_TRY = 1024  # candidates that hold the top-p mass of all but the flattest distributions


@dataclass(frozen=True, slots=True)
class SampleTask:
    row_id: int
    spec: SampleSpec


def uniforms(seed: int, choice: int, output_index: int, count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1), one for each of the first `count` token ids, that draw output `output_index` of choice
    `choice`. Philox 4x64, Salmon et al. 2011: it counts up the lowest word itself."""
    generator = np.random.Philox(
        key=np.array([seed, _STREAM], np.uint64), counter=np.array([0, output_index, choice, 0], np.uint64)
    )
    return np.random.Generator(generator).random(count)


def sample(logits: torch.Tensor, tasks: Sequence[SampleTask]) -> tuple[Sampled, ...]:
    """`logits` [len(tasks), vocabulary]. A row whose logits hold NaN or +Inf comes back with `error` set."""
    if not tasks:
        return ()
    largest, argmax = (x.tolist() for x in logits.max(dim=-1))
    return tuple(
        _sample_row(logits[i], task, argmax[i]) if np.isfinite(largest[i]) else _failed(task, "logits are not finite")
        for i, task in enumerate(tasks)
    )


def _sample_row(logits: torch.Tensor, task: SampleTask, argmax: int) -> Sampled:
    spec, params = task.spec, task.spec.params
    greedy = params.temperature == 0.0 or params.top_k == 1
    token_id = argmax
    if not greedy or _is_adjusted(spec):
        vocab_size = logits.shape[0]
        named = (*params.logit_bias, *_banned_ids(spec), *params.allowed_token_ids)
        if any(not 0 <= token < vocab_size for token in named):
            return _failed(task, f"biased, banned or allowed ids name a token outside the vocabulary of {vocab_size}")
        adjusted = _adjusted(logits, spec)
        if not np.isfinite(adjusted.max()):
            return _failed(task, "every token is banned")
        token_id = int(adjusted.argmax()) if greedy else _draw(adjusted, task.spec)
    if spec.num_top_logprobs is None:
        return Sampled(task.row_id, (token_id,))
    return _with_logprobs(logits, task, token_id, spec.num_top_logprobs)


def _failed(task: SampleTask, message: str) -> Sampled:
    return Sampled(task.row_id, (), error=message)


def _is_adjusted(spec: SampleSpec) -> bool:
    params = spec.params
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return bool(penalised or params.logit_bias or params.allowed_token_ids or _banned_ids(spec))


def _banned_ids(spec: SampleSpec) -> tuple[int, ...]:
    """Those of the request, and those that only this output must not be."""
    return (*spec.params.banned_token_ids, *spec.banned_ids)


def _adjusted(logits: torch.Tensor, spec: SampleSpec) -> NDArray[np.float32]:
    """A fresh float32 copy of the row after bias, penalties and bans."""
    row = logits.float().cpu().numpy().copy()
    params = spec.params
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if params.repetition_penalty != 1.0:
        seen = np.unique(spec.context)
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        outputs, counts = np.unique(spec.context[spec.prompt_len :], return_counts=True)
        row[outputs] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
    if params.allowed_token_ids:
        is_other = np.ones(row.size, dtype=bool)
        is_other[list(params.allowed_token_ids)] = False
        row[is_other] = -np.inf
    if banned := _banned_ids(spec):
        row[list(banned)] = -np.inf
    return row


def _draw(row: NDArray[np.float32], spec: SampleSpec) -> int:
    params = spec.params
    scaled = (row.astype(np.float64) - row.max()) / params.temperature
    weights = np.exp(scaled)
    _truncate(weights, params)
    numbers = uniforms(params.seed, spec.choice, spec.output_index, len(weights))
    left = np.flatnonzero(weights)
    with np.errstate(divide="ignore"):  # a number that is 0 arrives never
        arrivals = -np.log(numbers[left])
    return int(left[np.argmax(weights[left] / arrivals)])


def _truncate(weights: NDArray[np.float64], params: SamplingParams) -> None:
    """Zero, in place, the weights that top-k, top-p and min-p exclude. The largest weight always stays."""
    if 0 < params.top_k < weights.size:
        kth = np.partition(weights, -params.top_k)[-params.top_k]
        weights[weights < kth] = 0.0
    if params.top_p < 1.0:
        weights[weights < _top_p_threshold(weights, params.top_p)] = 0.0
    if params.min_p > 0.0:
        weights[weights < params.min_p * weights.max()] = 0.0


def _top_p_threshold(weights: NDArray[np.float64], top_p: float) -> float:
    """The smallest weight of the smallest set of largest weights whose share is at least `top_p`."""
    wanted = top_p * weights.sum()
    for count in (_FIRST_TRY, weights.size):
        largest = np.partition(weights, -count)[-count:] if count < weights.size else weights
        descending = np.sort(largest)[::-1]
        reached = int(np.searchsorted(np.cumsum(descending), wanted))
        if reached < descending.size:
            return float(descending[reached])
    return 0.0


def _with_logprobs(logits: torch.Tensor, task: SampleTask, token_id: int, num_top: int) -> Sampled:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    if num_top:
        values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
        top = (tuple(zip(ids.tolist(), values.tolist(), strict=True)),)
    return Sampled(task.row_id, (token_id,), (float(logprobs[token_id]),), top)
