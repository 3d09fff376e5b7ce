"""One choice between dispatcher and client: ids become text, stop strings end it, and nothing blocks.

open ─► stopping (a stop string matched; later tokens are dropped) ─► closed
  └───────────────────────────────────────────────────────────────► closed (finished | failed)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import Struct

from headstart.core.errors import ErrorCode
from headstart.core.messages import Failed, Finished, TokenDelta
from headstart.core.request import RequestStats
from headstart.text.detokenizer import Detokenizer
from headstart.text.stop_strings import StopMatcher, StopStrings


class TokenLogprob(Struct, frozen=True):
    """One output token's logprob and the best ones at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0  # characters of the answer that were complete before this token
    ends: bool = False  # a token that ended the answer, and is no part of its text


class TextChunk(Struct, frozen=True):
    """What a step added to a choice."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Done(Struct, frozen=True):
    """The choice is complete. `num_tokens` is what the client is billed for."""

    choice: int
    finish_reason: str
    num_tokens: int
    stats: RequestStats
    stop_reason: str | int | None = None  # the stop string, or the stop id the client gave
    num_attempts: int = 1


class Failure(Struct, frozen=True):
    choice: int
    code: ErrorCode
    message: str


Event = TextChunk | Done | Failure


@dataclass(frozen=True)
class StopRules:
    """`token_ids` end the choice at the worker, `strings` here. What ends it is in the text only with `include_stop`."""

    token_ids: frozenset[int]
    eos_ids: frozenset[int]
    strings: tuple[str, ...] = ()
    include_stop: bool = False

    @cached_property
    def compiled(self) -> StopStrings | None:
        """`strings` in the form that all choices of a request share; None if there are none."""
        return StopStrings(self.strings) if self.strings else None


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
        self._silent_ids = frozenset() if rules.include_stop else rules.token_ids
        self._matcher = None if rules.compiled is None else StopMatcher(rules.compiled, rules.include_stop)
        self._emit = emit
        self._stop_worker = stop_worker
        self._num_tokens = 0
        self._num_chars = 0  # detokenised so far, those that a stop string may yet take included

    def on_tokens(self, delta: TokenDelta) -> None:
        if self._matcher is not None or delta.logprobs:
            if self._matched is None:
                self._push_one_by_one(delta)
            return
        ids = delta.token_ids
        shown = ids if self._silent_ids.isdisjoint(ids) else [i for i in ids if i not in self._silent_ids]
        self._num_tokens += len(ids)
        self._emit(TextChunk(self._choice, self._detokenizer.push(shown), ids))

    def on_finished(self, finished: Finished) -> None:
        matched = self._matched
        if matched is None:
            text = self._detokenizer.finish()
            if self._matcher is not None:
                text = self._matcher.push(text) + self._matcher.finish()
                matched = self._matcher.matched  # the last bytes may complete a stop string
            if text:
                self._emit(TextChunk(self._choice, text, ()))
        reason = finished.finish_reason if matched is None else "stop"
        stop_reason = matched if matched is not None else self._stop_id(finished)
        attempts = finished.ref.attempt + 1
        self._emit(Done(self._choice, reason, self._num_tokens, finished.stats, stop_reason, attempts))

    def on_failed(self, failed: Failed) -> None:
        self._emit(Failure(self._choice, failed.code, failed.message))

    @property
    def _matched(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def _push_one_by_one(self, delta: TokenDelta) -> None:
        """Push up to the token that completes a stop string; those after it are not part of the answer."""
        texts: list[str] = []
        logprobs: list[TokenLogprob] = []
        num_taken = 0
        for token_id in delta.token_ids:
            if num_taken < len(delta.logprobs):
                logprobs.append(self._logprob(delta, num_taken))
            num_taken += 1
            if token_id not in self._silent_ids:
                texts.append(self._push(token_id))
            if self._matched is not None:
                break
        self._num_tokens += num_taken
        self._emit(TextChunk(self._choice, "".join(texts), delta.token_ids[:num_taken], tuple(logprobs)))
        if self._matched is not None:
            self._stop_worker()

    def _push(self, token_id: int) -> str:
        text = self._detokenizer.push((token_id,))
        self._num_chars += len(text)
        return text if self._matcher is None else self._matcher.push(text)

    def _logprob(self, delta: TokenDelta, i: int) -> TokenLogprob:
        token_id, top = delta.token_ids[i], delta.top_logprobs[i] if i < len(delta.top_logprobs) else ()
        return TokenLogprob(token_id, delta.logprobs[i], top, self._num_chars, token_id in self._silent_ids)

    def _stop_id(self, finished: Finished) -> int | None:
        return None if finished.stop_token_id in self._rules.eos_ids else finished.stop_token_id
