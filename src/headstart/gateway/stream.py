"""One choice between dispatcher and client: ids become text, stop strings end it, and nothing blocks.

open ─► stopping (a stop string matched; later tokens are dropped) ─► closed
  └───────────────────────────────────────────────────────────────► closed (finished | failed)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished, TokenDelta
from headstart.core.request import RequestStats
from headstart.text.detokenizer import Detokenizer
from headstart.text.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One output token's logprob and the best ones at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextChunk:
    """What a step added to a choice."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The choice is complete. `num_tokens` is what the client is billed for."""

    choice: int
    finish_reason: str
    num_tokens: int
    stats: RequestStats
    stop_reason: str | int | None = None  # the stop string, or the stop id the client gave
    num_attempts: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    choice: int
    code: ErrorCode
    message: str


Event = TextChunk | Done | Failure


@dataclass(frozen=True, slots=True)
class StopRules:
    """`token_ids` end the choice at the worker: their text is not part of the answer."""

    token_ids: frozenset[int]
    eos_ids: frozenset[int]
    strings: tuple[str, ...] = ()


@dataclass(slots=True)
class ChoiceOutput:
    """Everything one choice has produced so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Done | None = None

    def add(self, event: TextChunk | Done) -> None:
        if isinstance(event, Done):
            self.end = event
            return
        self.text.append(event.text)
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)


class ChoiceStream:
    """A dispatcher's Sink that puts Events out. `stop_worker` tells the dispatcher that no more is wanted."""

    def __init__(
        self,
        choice: int,
        detokenizer: Detokenizer,
        rules: StopRules,
        emit: Callable[[Event], None],
        stop_worker: Callable[[], None],
    ) -> None:
        self._choice = choice
        self._detokenizer = detokenizer
        self._rules = rules
        self._matcher = StopMatcher(rules.strings)
        self._emit = emit
        self._stop_worker = stop_worker
        self._num_tokens = 0

    def on_tokens(self, delta: TokenDelta) -> None:
        if self._matcher.matched is not None:
            return
        text, taken = "", 0
        for token_id in delta.token_ids:
            taken += 1
            if token_id not in self._rules.token_ids:
                text += self._matcher.push(self._detokenizer.push((token_id,)))
            if self._matcher.matched is not None:
                break
        self._num_tokens += taken
        self._emit(TextChunk(self._choice, text, delta.token_ids[:taken], tuple(_logprobs(delta, taken))))
        if self._matcher.matched is not None:
            self._stop_worker()

    def on_finished(self, finished: Finished) -> None:
        matched = self._matcher.matched
        if matched is None:
            text = self._matcher.push(self._detokenizer.finish()) + self._matcher.finish()
            matched = self._matcher.matched  # the last bytes may complete a stop string
            if text:
                self._emit(TextChunk(self._choice, text, ()))
        reason = finished.finish_reason if matched is None else "stop"
        stop_reason = matched if matched is not None else self._stop_id(finished)
        attempts = finished.ref.attempt + 1
        self._emit(Done(self._choice, reason, self._num_tokens, finished.stats, stop_reason, attempts))

    def on_failed(self, failed: Failed) -> None:
        self._emit(Failure(self._choice, failed.code, failed.message))

    def _stop_id(self, finished: Finished) -> int | None:
        return None if finished.stop_token_id in self._rules.eos_ids else finished.stop_token_id


def _logprobs(delta: TokenDelta, count: int) -> Iterable[TokenLogprob]:
    for i, logprob in enumerate(delta.logprobs[:count]):
        top = delta.top_logprobs[i] if i < len(delta.top_logprobs) else ()
        yield TokenLogprob(delta.token_ids[i], logprob, top)
