"""What a step drew, as the scheduler reads it."""

from collections.abc import Sequence

import torch

from headstart.core.batch import BatchOutput, Sampled
from headstart.executor.cuda.columns import ALL_BANNED, IS_FINE, NOT_FINITE
from headstart.executor.cuda.marks import seconds_between
from headstart.executor.cuda.positions import Position, names_unknown_token
from headstart.executor.cuda.sampling import FetchedLogprobs
from headstart.executor.cuda.steps import LaunchedStep
from headstart.executor.drafts import accepted

ERRORS = {NOT_FINITE: "logits are not finite", ALL_BANNED: "every token is banned"}
_Logprobs = tuple[float, tuple[tuple[int, float], ...]]


def output_of(step: LaunchedStep, vocab_size: int) -> BatchOutput:
    """Of a step that has ended."""
    sampled = sampled_at(step.positions, step.apart, step.drawn, step.logprobs, vocab_size)
    return BatchOutput(step.batch.step_id, tuple(sampled), seconds_between(step.began, step.ended))


def sampled_at(
    positions: Sequence[Position],
    apart: frozenset[int],
    drawn: torch.Tensor,
    fetched: FetchedLogprobs | None,
    vocab_size: int,
) -> list[Sampled]:
    """One for each row. `drawn` int64 [2, places]; positions of a row follow one another. `apart`: places whose
    parameters ask for more than a draw."""
    tokens, flags = drawn.tolist()
    logprobs = _by_place(fetched) if fetched is not None else {}
    sampled: list[Sampled] = []
    drafted: list[Sampled] = []
    for position in positions:
        place = position.place
        if place not in apart and not position.row.num_drafts and flags[place] == IS_FINE:
            sampled.append(Sampled(position.row.row_id, (tokens[place],)))
            continue
        one = _sampled(position, tokens[place], flags[place], logprobs.get(place), vocab_size)
        if not position.row.num_drafts:
            sampled.append(one)
            continue
        drafted.append(one)
        if position.offset == position.row.num_drafts:
            sampled.append(accepted(position.row, drafted))
            drafted = []
    return sampled


def _sampled(position: Position, token: int, flag: int, logprobs: _Logprobs | None, vocab_size: int) -> Sampled:
    row_id, spec = position.row.row_id, position.spec
    if names_unknown_token(spec, vocab_size):
        message = f"biased, banned or allowed ids name a token outside the vocabulary of {vocab_size}"
        return Sampled(row_id, (), error=message)
    if flag != IS_FINE:
        return Sampled(row_id, (), error=ERRORS[flag])
    if logprobs is None:
        return Sampled(row_id, (token,))
    chosen, best = logprobs
    return Sampled(row_id, (token,), (chosen,), (best,) if best else ())


def _by_place(fetched: FetchedLogprobs) -> dict[int, _Logprobs]:
    chosen, *best = (part.tolist() for part in fetched.parts)
    found: dict[int, _Logprobs] = {}
    for i, (place, num_top) in enumerate(zip(fetched.places, fetched.num_top, strict=True)):
        pairs = tuple(zip(best[1][i][:num_top], best[0][i][:num_top], strict=True)) if num_top else ()
        found[place] = (chosen[i], pairs)
    return found
