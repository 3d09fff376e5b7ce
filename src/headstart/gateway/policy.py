"""Which decode worker gets a choice, and in which order prefill workers are offered to it. Pure decisions."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import Protocol

from headstart.gateway.choice_record import ChoiceRecord
from headstart.gateway.prefix_index import PrefixIndex
from headstart.gateway.registry import WorkerRecord

TOKENS_PER_CHOICE = 256
"""The price of one more choice on a worker, in tokens that another would have to compute."""


class DecodePolicy(Protocol):
    def pick(self, choice: ChoiceRecord, candidates: Sequence[WorkerRecord]) -> WorkerRecord:
        """The worker for a choice; `candidates` is never empty."""
        ...

    def note_given(self, choice: ChoiceRecord) -> None:
        """Its worker was given the choice, and will hold its prompt."""
        ...

    def note_finished(self, choice: ChoiceRecord) -> None:
        """Its worker holds the prompt and the outputs. The last call about this choice."""
        ...

    def note_pools(self, num_tokens: int) -> None:
        """So much do the pools of all decode workers hold."""
        ...


def cheapest(candidates: Sequence[WorkerRecord], costs: Sequence[int], rng: Random) -> WorkerRecord:
    """Of equals one is drawn."""
    least = min(costs)
    if costs.count(least) == 1:
        return candidates[costs.index(least)]
    return rng.choice([record for record, cost in zip(candidates, costs, strict=True) if cost == least])


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The decode worker with the fewest choices; ties are drawn."""

    rng: Random

    def pick(self, choice: ChoiceRecord, candidates: Sequence[WorkerRecord]) -> WorkerRecord:
        return cheapest(candidates, [record.num_choices for record in candidates], self.rng)

    def note_given(self, choice: ChoiceRecord) -> None:
        pass

    def note_finished(self, choice: ChoiceRecord) -> None:
        pass

    def note_pools(self, num_tokens: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """Prefer the worker that probably holds the prompt, unless the others are idle enough.

    Cost in tokens: what is not held there, plus `tokens_per_choice` for every choice already on it. A hit therefore
    wins over a few waiting requests and never over a long queue.
    """

    rng: Random
    index: PrefixIndex
    tokens_per_choice: int = TOKENS_PER_CHOICE

    def pick(self, choice: ChoiceRecord, candidates: Sequence[WorkerRecord]) -> WorkerRecord:
        if len(candidates) == 1:
            return candidates[0]
        request, weight = choice.request, self.tokens_per_choice
        held = self.index.match(request.namespace, request.prompt.tobytes())
        costs = [weight * record.num_choices - held.get(record.full_name, 0) for record in candidates]
        return cheapest(candidates, costs, self.rng)

    def note_given(self, choice: ChoiceRecord) -> None:
        request = choice.request
        self.index.record(request.namespace, request.prompt.tobytes(), str(choice.worker))

    def note_finished(self, choice: ChoiceRecord) -> None:
        request, outputs = choice.request, array("i", choice.tokens)
        self.index.record(request.namespace, request.prompt.tobytes() + outputs.tobytes(), str(choice.worker))

    def note_pools(self, num_tokens: int) -> None:
        self.index.limit(num_tokens)


MakePolicy = Callable[[Random], DecodePolicy]


def prefix_affinity(rng: Random) -> DecodePolicy:
    return PrefixAffinity(rng, PrefixIndex())


def least_loaded(rng: Random) -> DecodePolicy:
    return LeastLoaded(rng)


POLICIES: dict[str, MakePolicy] = {"cache_aware": prefix_affinity, "least_loaded": least_loaded}
"""By --load-balance-method."""

_queue = attrgetter("num_queued_tokens")


def rank_prefill(num_tokens: int, by_name: Sequence[WorkerRecord]) -> tuple[str, ...]:
    """Names of prefill workers, the shortest queue first, and of equals as they are given. All can hold `num_tokens`.

    The first is charged with the prompt until its next heartbeat shows what became of it.
    """
    ranking = sorted(by_name, key=_queue)
    if ranking:
        ranking[0].num_queued_tokens += num_tokens
    return tuple([record.ref.name for record in ranking])
