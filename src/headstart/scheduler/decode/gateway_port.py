"""The gateways' side of the decode worker: what is accepted, what is sent, and that each choice ends exactly once.

A ref is unknown, then open, then ended for good: its terminal message is the last one about it. Ended refs are
remembered for a while, so that a repeated Submit does not start the choice again.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from math import inf, isfinite

import numpy as np

from headstart.core.batch import Sampled
from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode, InvariantError
from headstart.core.layout import pages_for
from headstart.core.messages import Accepted, Failed, Finished, Message, Rejected, Send, Submit, TokenDelta, Tokens
from headstart.core.request import ChoiceRef, Request
from headstart.core.sequence import Sequence
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode.metrics import ChoiceMetrics
from headstart.scheduler.decode.states import Choice, Outcome, Stop
from headstart.scheduler.limits import DecodeLimits

MAX_ENDED = 4096
LOGPROB_FLOOR = -9999.0
"""Sent for a token that the model gives no probability: minus infinity is no number in JSON, nor on our wire."""
OWN_STALL_S = 1.0
"""A time in which this worker itself stood still for longer is no silence of a gateway."""


class GatewayPort:
    def __init__(
        self,
        cache: PrefixCache,
        limits: DecodeLimits,
        page_bytes: int,
        clock: Clock,
        send: Send,
        counters: Counter[str],
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._page_bytes = page_bytes
        self._clock = clock
        self._send = send
        self._counters = counters
        self._open: dict[ChoiceRef, Choice] = {}
        self._attempts: dict[tuple[str, int], ChoiceRef] = {}
        self._ended: OrderedDict[ChoiceRef, None] = OrderedDict()
        self._deltas: dict[str, list[TokenDelta]] = defaultdict(list)
        self._terminal_messages: list[tuple[str, Message]] = []
        self._num_accepted = 0

    def __len__(self) -> int:
        return len(self._open)

    def get(self, ref: ChoiceRef) -> Choice | None:
        return self._open.get(ref)

    def of(self, gateway: str) -> list[Choice]:
        return [choice for choice in self._open.values() if choice.gateway == gateway]

    # ---- accepting ----------------------------------------------------------------------------------------------------

    def earlier_attempt(self, ref: ChoiceRef) -> Choice | None:
        """The open choice that a Submit of `ref` takes the place of."""
        current = self._attempts.get((ref.request_id, ref.choice))
        return self._open[current] if current is not None and current.attempt < ref.attempt else None

    def is_repeat(self, gateway: str, ref: ChoiceRef) -> bool:
        """Whether a Submit of `ref` starts nothing: it is open, has ended, or a later attempt is open."""
        if ref in self._open:
            self._send(gateway, Accepted(ref))
            self._counters["repeated_submits"] += 1
            return True
        current = self._attempts.get((ref.request_id, ref.choice))
        is_outdated = current is not None and current.attempt > ref.attempt
        if ref in self._ended or is_outdated:
            self._counters["late_submits"] += 1
            if not is_outdated:  # the gateway did not receive its end
                self._send(gateway, Failed(ref, ErrorCode.UNAVAILABLE, "this attempt has ended here"))
            return True
        return False

    def accept(self, gateway: str, submit: Submit, num_queued: int) -> Choice | None:
        """Accept, or reject and return None."""
        request = submit.request
        refusal = self._refusal(request, num_queued)
        if refusal is not None:
            code, message = refusal
            self._counters[f"rejected_{code.value}"] += 1
            self._send(gateway, Rejected(request.ref, code, message))
            return None
        now = self._clock.now()
        self._num_accepted += 1
        sequence = Sequence(request.prompt, request.output_ids)
        deadline = now + request.remaining_s
        metrics = ChoiceMetrics(now, sequence.prompt_len)
        choice = Choice(request, gateway, submit.prefill_ranking, self._num_accepted, sequence, deadline, metrics)
        self._open[choice.ref] = choice
        self._attempts[choice.ref.request_id, choice.ref.choice] = choice.ref
        self._counters["accepted"] += 1
        self._send(gateway, Accepted(choice.ref))
        return choice

    def _refusal(self, request: Request, num_queued: int) -> tuple[ErrorCode, str] | None:
        if (fault := _malformed(request, self._limits.vocab_size)) is not None:
            return ErrorCode.INVALID, fault
        max_len = len(request.prompt) + request.stop.max_new_tokens
        if max_len > self._limits.context_len:
            return (
                ErrorCode.TOO_LONG,
                f"prompt and output of {max_len} tokens; the context is {self._limits.context_len}",
            )
        size = self._cache.page_size
        if pages_for(max_len - 1, size) > self._cache.num_pages:
            return ErrorCode.TOO_LONG, f"prompt and output of {max_len} tokens; {self._cache.num_pages * size} fit"
        if num_queued >= self._limits.max_queued_requests:
            return ErrorCode.BUSY, f"{num_queued} requests wait already"
        return None

    # ---- sending -------------------------------------------------------------------------------------------------------

    def queue_tokens(self, choice: Choice, sampled: Sampled, first: int) -> None:
        """Queue outputs [first, ...), just appended, for this step's message. What was drawn behind them is left out."""
        request, num_tokens, token_ids = choice.request, choice.sequence.num_outputs - first, sampled.token_ids
        if num_tokens < len(token_ids):
            token_ids = token_ids[:num_tokens]
        if request.num_top_logprobs is None:
            delta = TokenDelta(request.ref, first, token_ids)
        else:
            delta = TokenDelta(request.ref, first, token_ids, *_logprobs(sampled, num_tokens))
        self._deltas[choice.gateway].append(delta)

    def end(self, choice: Choice, outcome: Outcome) -> None:
        """Queue the terminal message of an open choice."""
        stats = choice.metrics.stats(self._page_bytes, self._clock.now())
        terminal: Finished | Failed
        if isinstance(outcome, Stop):
            terminal = Finished(choice.ref, outcome.reason, choice.sequence.num_outputs, stats, outcome.token_id)
            self._counters["finished"] += 1
        else:
            terminal = Failed(choice.ref, outcome.code, outcome.message, stats)
            self._counters[f"failed_{outcome.code.value}"] += 1
        self._close(choice)
        self._terminal_messages.append((choice.gateway, terminal))

    def flush(self) -> None:
        """Send the step's tokens, one message per gateway, then the terminal messages that come after them."""
        if self._deltas:
            for gateway, deltas in self._deltas.items():
                self._counters["output_tokens"] += sum([len(delta.token_ids) for delta in deltas])
                self._send(gateway, Tokens(tuple(deltas)))
            self._deltas.clear()
        if self._terminal_messages:
            for gateway, message in self._terminal_messages:
                self._send(gateway, message)
            self._terminal_messages.clear()

    def check(self, entries: Mapping[ChoiceRef, object]) -> None:
        """Raise InvariantError unless exactly the open choices have an entry, and nothing waits to be sent."""
        if self._open.keys() != entries.keys() or set(self._attempts.values()) != self._open.keys():
            raise InvariantError(f"{len(self._open)} open choices, {len(entries)} entries")
        if self._deltas or self._terminal_messages:
            raise InvariantError("something was not sent in the call in which it happened")

    def _close(self, choice: Choice) -> None:
        if self._open.pop(choice.ref, None) is None:
            raise InvariantError(f"{choice.ref} ends twice")
        key = choice.ref.request_id, choice.ref.choice
        if self._attempts.get(key) == choice.ref:
            del self._attempts[key]
        self._ended[choice.ref] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._counters["computed_prompt_tokens"] += choice.metrics.num_computed


class GatewayLiveness:
    """When the last message of each gateway came, and which gateways have been silent for too long."""

    def __init__(self, silence_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._last_at: dict[str, float] = {}
        self._checked_at = now
        self.silent_at = inf  # when the first one will have been silent for too long

    def names(self) -> list[str]:
        return sorted(self._last_at)

    def on_message(self, gateway: str, now: float) -> None:
        self._last_at[gateway] = now
        self._note_silence()

    def check(self, now: float) -> list[tuple[str, float]]:
        """The gateways that have become silent, and for how long each has been. Called in every pass."""
        stood_still_s = now - self._checked_at
        self._checked_at = now
        if stood_still_s > OWN_STALL_S:
            self._last_at = {gateway: min(now, at + stood_still_s) for gateway, at in self._last_at.items()}
            self._note_silence()
        if now < self.silent_at:
            return []
        silent = [(name, now - at) for name, at in self._last_at.items() if now >= at + self._silence_s]
        for name, _ in silent:
            del self._last_at[name]
        self._note_silence()
        return silent

    def _note_silence(self) -> None:
        self.silent_at = min(self._last_at.values(), default=inf) + self._silence_s


def _logprobs(sampled: Sampled, num_tokens: int) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Of each of the first tokens: its own, and the best if there are some."""
    own = tuple(_finite(logprob) for logprob in sampled.logprobs[:num_tokens])
    tops = sampled.top_logprobs[:num_tokens]
    best = tuple(tuple((token_id, _finite(logprob)) for token_id, logprob in top) for top in tops)
    return own, best


def _finite(logprob: float) -> float:
    """Within [LOGPROB_FLOOR, 0]; the floor for what is no number."""
    return min(0.0, max(LOGPROB_FLOOR, logprob))


def _malformed(request: Request, vocab_size: int) -> str | None:
    stop = request.stop
    if len(request.prompt) == 0:
        return "the prompt is empty"
    for ids in (request.prompt, request.output_ids):
        if len(ids) and ids.view(np.uint32).max() >= vocab_size:  # negative ids are large without their sign
            return "a token id is not in the vocabulary"
    if stop.max_new_tokens < 1 or stop.min_new_tokens < 0:
        return f"max_new_tokens {stop.max_new_tokens}, min_new_tokens {stop.min_new_tokens}"
    if len(request.output_ids) > stop.max_new_tokens:
        return f"{len(request.output_ids)} outputs already, of {stop.max_new_tokens}"
    if not isfinite(request.remaining_s) or request.remaining_s <= 0:
        return f"remaining_s is {request.remaining_s}"
    return None
