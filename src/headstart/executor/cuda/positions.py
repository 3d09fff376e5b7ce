"""Places of a step that a token is drawn at, and how each is drawn."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array
from headstart.core.batch import Row, SampleSpec
from headstart.core.request import SamplingParams
from headstart.executor.cuda.columns import CHOICE, DRAW, GREEDY, INDEX, MODE


class Position(NamedTuple):
    """One drawn token: the one behind the row's last `num_drafts - offset` tokens."""

    place: int  # row of the step's logits and tokens
    row: Row
    spec: SampleSpec
    offset: int  # j: the j-th token that the row draws in this step

    @property
    def context(self) -> Int32Array:
        """Every token before the drawn one, as far as the host knows them."""
        if not self.offset:
            return self.spec.context
        first = len(self.row.tokens) - self.row.num_drafts
        return np.concatenate((self.spec.context, self.row.tokens[first : first + self.offset]))

    @property
    def is_pending(self) -> bool:
        """The context lacks the row's input, which an earlier step has yet to draw."""
        return self.row.pending is not None


class Kind(NamedTuple):
    """What sampling parameters ask for."""

    params: SamplingParams  # holding it keeps its id its own
    columns: NDArray[np.int64]  # MODE, SEED and TEMPERATURE, as the step block has them
    is_plain: bool  # neither adjusts nor truncates: drawn with the whole batch


class Kinds:
    """Kinds of the parameters seen lately, by identity."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._kinds: dict[int, Kind] = {}

    def of(self, params: SamplingParams) -> Kind:
        found = self._kinds.get(id(params))
        if found is None:
            if len(self._kinds) >= self._capacity:
                self._kinds.clear()
            found = self._kinds[id(params)] = _kind(params)
        return found


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def positions_of(row: Row, first_place: int) -> Iterable[Position]:
    """A row draws behind the token before its drafts, and behind each of them."""
    spec = row.sample
    if spec is not None:
        for offset in range(row.num_drafts + 1):
            yield Position(first_place + offset, row, spec, offset)


def banned_ids(spec: SampleSpec) -> tuple[int, ...]:
    """Those of the request, and those that only this output must not be."""
    return (*spec.params.banned_token_ids, *spec.banned_ids)


def names_unknown_token(spec: SampleSpec, vocab_size: int) -> bool:
    """Nothing can be drawn then."""
    named = (*spec.params.logit_bias, *banned_ids(spec), *spec.params.allowed_token_ids)
    return bool(named) and not 0 <= min(named) <= max(named) < vocab_size


def write_columns(block: NDArray[np.int64], positions: Sequence[Position], kinds: Kinds) -> list[Position]:
    """Fill the sampling columns of `block` [places, BLOCK_WIDTH]. Returns the positions that are drawn apart: their MODE
    is SKIP."""
    apart, plain, drawn_how = [], [], []
    for position in positions:
        spec = position.spec
        kind = kinds.of(spec.params)
        if kind.is_plain and not spec.banned_ids and spec.num_top_logprobs is None:
            plain.append(position)
            drawn_how.append(kind.columns)
        else:
            apart.append(position)
    if plain:
        at = np.array([position.place for position in plain])
        block[at, MODE:INDEX] = np.concatenate(drawn_how).reshape(-1, INDEX - MODE)
        block[at, INDEX] = [position.spec.output_index + position.offset for position in plain]
        block[at, CHOICE] = [position.spec.choice for position in plain]
    return apart


def columns_of(position: Position, kind: Kind) -> tuple[int, ...]:
    """MODE and what follows it."""
    return (*kind.columns.tolist(), position.spec.output_index + position.offset, position.spec.choice)


def _kind(params: SamplingParams) -> Kind:
    greedy = is_greedy(params)
    truncates = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    penalises = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    names = params.logit_bias or params.allowed_token_ids or params.banned_token_ids
    plain = not (penalises or names) and (greedy or not truncates)
    seed = int(np.uint64(params.seed).astype(np.int64))
    temperature = int(np.float64(params.temperature).view(np.int64))
    return Kind(params, np.array([GREEDY if greedy else DRAW, seed, temperature]), plain)
