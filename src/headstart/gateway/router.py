"""Picks the workers for a choice: the one that decodes it, and in which order it may ask those that prefill."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from headstart.core.errors import ErrorCode
from headstart.core.messages import Role
from headstart.gateway.choice_record import ChoiceRecord, Queued
from headstart.gateway.limits import DispatchLimits
from headstart.gateway.policy import DecodePolicy, rank_prefill
from headstart.gateway.registry import Registry, WorkerRecord


class Refusal(NamedTuple):
    """No worker will take the choice."""

    code: ErrorCode
    message: str


class RequestRouter:
    """Chooses; whoever asks sends."""

    def __init__(self, registry: Registry, policy: DecodePolicy, limits: DispatchLimits) -> None:
        self._registry = registry
        self._policy = policy
        self._limits = limits

    def route(
        self, choice: ChoiceRecord, siblings: Collection[ChoiceRecord], now: float
    ) -> WorkerRecord | Refusal | None:
        """The worker for a queued choice; None if it has to wait for one. `siblings`: all of its request."""
        num_tokens = choice.num_tokens
        able = self._registry.alive(Role.DECODE, num_tokens)
        free = [record for record in able if record.ref not in choice.refusals] if choice.refusals else able
        if free:
            return self._pick(choice, siblings, free)
        if able:
            return _without_room(choice)
        capacity = self._registry.capacity_tokens(Role.DECODE)
        if capacity is not None and capacity < num_tokens:
            return Refusal(ErrorCode.TOO_LONG, _too_long(num_tokens, capacity))
        return self._without_able(choice, now)

    def ranking(self, choice: ChoiceRecord) -> tuple[str, ...]:
        """Names of prefill workers, best first."""
        num_tokens = len(choice.request.prompt) + len(choice.tokens)
        return rank_prefill(num_tokens, self._registry.alive_by_name(Role.PREFILL, num_tokens))

    def _pick(
        self, choice: ChoiceRecord, siblings: Collection[ChoiceRecord], free: Sequence[WorkerRecord]
    ) -> WorkerRecord:
        """Choices of a request stay together."""
        if len(siblings) > 1:
            taken = {sibling.worker for sibling in siblings if sibling is not choice}
            together = [record for record in free if record.ref in taken]
            if together:
                return together[0]
        return self._policy.pick(choice, free)

    def _without_able(self, choice: ChoiceRecord, now: float) -> Refusal | None:
        """No worker that is alive can hold the choice; one that is away could, or none is known at all."""
        assert isinstance(choice.state, Queued)
        is_new = choice.attempt < 0
        if is_new and not self._registry.may_return(Role.DECODE):
            return Refusal(ErrorCode.UNAVAILABLE, "no decode worker is available")
        if now - choice.state.since < self._limits.resume_wait_s:
            return None
        if is_new:
            return Refusal(ErrorCode.UNAVAILABLE, "the decode workers that can hold this are away, try again later")
        return Refusal(ErrorCode.WORKER_LOST, "its worker died and no other that can hold it has taken its place")


def _too_long(num_tokens: int, capacity: int) -> str:
    limit = f"this model's maximum context length is {capacity} tokens here, what the pool of the largest decode worker holds"
    return f"{limit}: the prompt is too long for it, prompt and max_tokens need {num_tokens} tokens"


def _without_room(choice: ChoiceRecord) -> Refusal | None:
    """Only one that was refused by every worker at its first try is sent away."""
    if choice.num_failed_attempts > 0:
        return None
    is_full = ErrorCode.BUSY in choice.refusals.values()
    code = ErrorCode.BUSY if is_full else ErrorCode.UNAVAILABLE
    return Refusal(code, "no worker takes new requests now, try again later")
