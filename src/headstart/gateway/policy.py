"""Which decode worker gets a request, and in which order prefill workers are offered to it. Pure decisions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from headstart.core.arrays import Int32Array
from headstart.core.messages import WorkerRef
from headstart.gateway.prefix_index import PrefixIndex
from headstart.gateway.registry import WorkerRecord

OpenChoices = Callable[[WorkerRef], int]
"""Choices this gateway has open on a worker: newer than any heartbeat."""
TOKENS_PER_CHOICE = 256
"""The price of one more choice on a worker, in tokens that another would have to compute."""


class DecodePolicy(Protocol):
    def pick(self, namespace: bytes, tokens: Int32Array, candidates: Sequence[WorkerRecord]) -> WorkerRecord:
        """The worker for a prompt; `candidates` is never empty."""
        ...

    def note(self, namespace: bytes, tokens: Int32Array, worker: WorkerRef) -> None:
        """`worker` was given `tokens`, or has just finished them."""
        ...


def load_of(record: WorkerRecord, open_choices: OpenChoices) -> int:
    """Choices on a worker: what it last said, or what we know to be there if that is more."""
    load, num_open = record.load, open_choices(record.ref)
    num_told = load.num_running + load.num_waiting
    return num_told if num_told > num_open else num_open


def cheapest(candidates: Sequence[WorkerRecord], costs: Sequence[int], rng: Random) -> WorkerRecord:
    """Of equals one is drawn."""
    least = min(costs)
    if costs.count(least) == 1:
        return candidates[costs.index(least)]
    return rng.choice([record for record, cost in zip(candidates, costs, strict=True) if cost == least])


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The decode worker with the fewest choices; ties are drawn."""

    open_choices: OpenChoices
    rng: Random

    def pick(self, namespace: bytes, tokens: Int32Array, candidates: Sequence[WorkerRecord]) -> WorkerRecord:
        return cheapest(candidates, [load_of(record, self.open_choices) for record in candidates], self.rng)

    def note(self, namespace: bytes, tokens: Int32Array, worker: WorkerRef) -> None:
        pass


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """Prefer the worker that probably holds the prompt, unless the others are idle enough.

    Cost in tokens: what is not held there, plus `tokens_per_choice` for every choice already on it. A hit therefore
    wins over a few waiting requests and never over a long queue.
    """

    open_choices: OpenChoices
    rng: Random
    index: PrefixIndex
    tokens_per_choice: int = TOKENS_PER_CHOICE

    def pick(self, namespace: bytes, tokens: Int32Array, candidates: Sequence[WorkerRecord]) -> WorkerRecord:
        if len(candidates) == 1:
            return candidates[0]
        weight, open_choices = self.tokens_per_choice, self.open_choices
        costs = [weight * load_of(record, open_choices) for record in candidates]
        held = self.index.match(namespace, tokens)
        if held:
            costs = [cost - held.get(record.ref, 0) for cost, record in zip(costs, candidates, strict=True)]
        return cheapest(candidates, costs, self.rng)

    def note(self, namespace: bytes, tokens: Int32Array, worker: WorkerRef) -> None:
        self.index.record(namespace, tokens, worker)


MakePolicy = Callable[[OpenChoices, Random], DecodePolicy]


def prefix_affinity(open_choices: OpenChoices, rng: Random) -> DecodePolicy:
    return PrefixAffinity(open_choices, rng, PrefixIndex())


def least_loaded(open_choices: OpenChoices, rng: Random) -> DecodePolicy:
    return LeastLoaded(open_choices, rng)


POLICIES: dict[str, MakePolicy] = {"cache_aware": prefix_affinity, "least_loaded": least_loaded}
"""By --load-balance-method."""


def rank_prefill(num_tokens: int, workers: Sequence[WorkerRecord]) -> tuple[str, ...]:
    """Names of the prefill workers that can hold `num_tokens`, the shortest queue first.

    The first is charged with the prompt until its next heartbeat says what became of it.
    """
    able = {record.ref.name: record for record in workers if record.join.capacity_tokens >= num_tokens}
    queues = sorted([(record.load.queued_tokens + record.unreported_tokens, name) for name, record in able.items()])
    ranking = tuple([name for _, name in queues])
    if ranking:
        able[ranking[0]].unreported_tokens += num_tokens
    return ranking
