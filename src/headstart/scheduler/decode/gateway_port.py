"""The gateway's side of the decode worker: what is taken, what is said, and that each choice ends exactly once.

A ref is unknown, then open, then ended for good: a terminal event moves it on and nothing is said about it afterwards.
Ended refs are remembered for a while, so that a repeated Submit does not start the choice again.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping

import numpy as np

from headstart.core.batch import Sampled
from headstart.core.clock import Clock
from headstart.core.errors import ErrorCode, InvariantError
from headstart.core.layout import pages_for
from headstart.core.messages import Accepted, Failed, Finished, Message, Rejected, Send, Submit, TokenDelta, Tokens
from headstart.core.request import ChoiceRef, Request, RequestStats
from headstart.core.sequence import Sequence
from headstart.kv.cache import PrefixCache
from headstart.scheduler.decode.metrics import RequestMetrics
from headstart.scheduler.decode.states import Choice
from headstart.scheduler.decode.stop import Stop
from headstart.scheduler.limits import DecodeLimits

MAX_ENDED = 4096
LOGPROB_FLOOR = -9999.0
"""Said of a token that the model gives no probability: minus infinity is no number in JSON, nor on our wire."""


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
        self._farewells: list[tuple[str, Message]] = []
        self._num_accepted = 0

    def __len__(self) -> int:
        return len(self._open)

    def get(self, ref: ChoiceRef) -> Choice | None:
        return self._open.get(ref)

    def of(self, gateway: str) -> list[Choice]:
        return [choice for choice in self._open.values() if choice.gateway == gateway]

    # ---- taking ------------------------------------------------------------------------------------------------------

    def earlier_attempt(self, ref: ChoiceRef) -> Choice | None:
        """The open choice that a Submit of `ref` takes the place of."""
        current = self._attempts.get((ref.request_id, ref.choice))
        return self._open[current] if current is not None and current.attempt < ref.attempt else None

    def repeats(self, gateway: str, ref: ChoiceRef) -> bool:
        """Whether a Submit of `ref` starts nothing: it is open, has ended, or a later attempt is open."""
        if ref in self._open:
            self._send(gateway, Accepted(ref))
            self._counters["repeated_submits"] += 1
            return True
        current = self._attempts.get((ref.request_id, ref.choice))
        is_outdated = current is not None and current.attempt > ref.attempt
        if ref in self._ended or is_outdated:
            self._counters["late_submits"] += 1
            if not is_outdated:  # a gateway that asks did not hear of its end
                self._send(gateway, Failed(ref, ErrorCode.UNAVAILABLE, "this attempt has ended here"))
            return True
        return False

    def take(self, gateway: str, submit: Submit, num_queued: int) -> Choice | None:
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
        choice = Choice(
            request, gateway, submit.prefill_ranking, self._num_accepted, sequence, deadline, RequestMetrics(now)
        )
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

    # ---- saying ------------------------------------------------------------------------------------------------------

    def say(self, choice: Choice, sampled: Sampled, first: int) -> None:
        """Queue outputs [first, ...), just appended, for this step's message. What was drawn behind them is left out."""
        request, num_tokens = choice.request, choice.sequence.num_outputs - first
        token_ids = sampled.token_ids if num_tokens == len(sampled.token_ids) else sampled.token_ids[:num_tokens]
        if request.num_top_logprobs is None:
            delta = TokenDelta(request.ref, first, token_ids)
        else:
            delta = TokenDelta(request.ref, first, token_ids, *_logprobs(sampled, num_tokens))
        self._deltas[choice.gateway].append(delta)

    def finish(self, choice: Choice, stop: Stop) -> None:
        num_tokens = choice.sequence.num_outputs
        self._end(choice, Finished(choice.ref, stop.reason, num_tokens, self._stats(choice), stop.token_id))
        self._counters["finished"] += 1

    def fail(self, choice: Choice, code: ErrorCode, message: str) -> None:
        self._end(choice, Failed(choice.ref, code, message, self._stats(choice)))
        self._counters[f"failed_{code.value}"] += 1

    def flush(self) -> None:
        """Send the step's tokens, one message per gateway, then the terminal events that come after them."""
        if self._deltas:
            for gateway, deltas in self._deltas.items():
                self._counters["output_tokens"] += sum([len(delta.token_ids) for delta in deltas])
                self._send(gateway, Tokens(tuple(deltas)))
            self._deltas.clear()
        if self._farewells:
            for gateway, message in self._farewells:
                self._send(gateway, message)
            self._farewells.clear()

    def check(self, entries: Mapping[ChoiceRef, object]) -> None:
        """Raise InvariantError unless exactly the unfinished choices have an entry, and nothing waits to be said."""
        if self._open.keys() != entries.keys() or set(self._attempts.values()) != self._open.keys():
            raise InvariantError(f"{len(self._open)} unfinished choices, {len(entries)} entries")
        if self._deltas or self._farewells:
            raise InvariantError("something was not said in the pass in which it happened")

    def _stats(self, choice: Choice) -> RequestStats:
        return choice.record.stats(choice.sequence.prompt_len, self._page_bytes, self._clock.now())

    def _end(self, choice: Choice, terminal: Finished | Failed) -> None:
        if self._open.pop(choice.ref, None) is None:
            raise InvariantError(f"{choice.ref} ends twice")
        key = choice.ref.request_id, choice.ref.choice
        if self._attempts.get(key) == choice.ref:
            del self._attempts[key]
        self._ended[choice.ref] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        self._farewells.append((choice.gateway, terminal))
        self._counters["computed_prompt_tokens"] += choice.record.num_computed


def _logprobs(sampled: Sampled, num_tokens: int) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Of each of the first tokens: its own, and the best if there are some."""
    own = tuple(_sayable(logprob) for logprob in sampled.logprobs[:num_tokens])
    tops = sampled.top_logprobs[:num_tokens]
    best = tuple(tuple((token_id, _sayable(logprob)) for token_id, logprob in top) for top in tops)
    return own, best


def _sayable(logprob: float) -> float:
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
    if not math.isfinite(request.remaining_s) or request.remaining_s <= 0:
        return f"remaining_s is {request.remaining_s}"
    return None
