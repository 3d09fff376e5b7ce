"""One HTTP request: its prompts and choices in the dispatcher, and one bounded queue of what comes back.

    open ─► over (every choice ended) | failed (one failed: the others are cancelled) | closed (client gone, too slow)

Whatever ends it, nothing of it stays in the dispatcher.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.core.arrays import int32_array
from headstart.core.errors import ErrorCode
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.gateway.dispatch import DispatcherApi
from headstart.gateway.stream import ChoiceStream, Event, Failure, StopRules, TextChunk
from headstart.text.detokenizer import make_detokenizer
from headstart.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What to generate: `num_choices` answers to each prompt, numbered prompt by prompt."""

    prompts: tuple[list[int], ...]
    num_choices: int
    sampling: SamplingParams
    stop: StopCriteria
    rules: StopRules
    namespace: bytes
    deadline_s: float
    num_top_logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def num_total(self) -> int:
        """Choices over all prompts."""
        return len(self.prompts) * self.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens over all choices: each is handed over with a prompt of its own."""
        return sum(map(len, self.prompts)) * self.num_choices


class Generation:
    """Submits a GenerationSpec and hands out its events in order of arrival."""

    def __init__(self, generation_id: str, spec: GenerationSpec, calls: DispatcherApi, max_buffered: int) -> None:
        self.generation_id = generation_id
        self.spec = spec
        self._calls = calls
        self._max_buffered = max_buffered
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._num_open = spec.num_total
        self._closed = False

    def submit(self, tokenizer: TextTokenizer) -> None:
        for index in range(self._num_open):
            prompt, choice = divmod(index, self.spec.num_choices)
            if self._closed:
                return
            self._calls.submit(self._request(prompt, choice), self._stream(prompt, choice, tokenizer))

    async def wait_first(self) -> None:
        """Return once there is an event to judge the request by."""
        while not self._events:
            await self._wait()

    @property
    def first_failure(self) -> Failure | None:
        return next((event for event in self._events if isinstance(event, Failure)), None)

    async def next_events(self) -> list[Event]:
        """All events that have come since the last call, at least one; none once every choice has ended or one has failed.
        That failure is the last event."""
        while not self._events:
            if self._num_open == 0 or self._closed:
                return []
            await self._wait()
        events, self._events = self._events, []
        return events

    def close(self, code: ErrorCode = ErrorCode.CANCELLED, message: str = "cancelled") -> None:
        """Cancel whatever is still open. Safe to repeat."""
        for prompt in range(len(self.spec.prompts)):
            self._calls.cancel(self._request_id(prompt), code, message)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _put(self, event: Event) -> None:
        if self._closed:
            return
        if not isinstance(event, TextChunk):
            self._num_open -= 1
        elif len(self._events) >= self._max_buffered:
            self._events.clear()
            event = Failure(event.choice, ErrorCode.CANCELLED, "the client reads too slowly")
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if isinstance(event, Failure):
            self._closed = True
            self.close()

    def _request_id(self, prompt: int) -> str:
        return f"{self.generation_id}-{prompt}"

    def _request(self, prompt: int, choice: int) -> Request:
        return Request(
            ChoiceRef(self._request_id(prompt), choice),
            int32_array(self.spec.prompts[prompt]),
            self.spec.sampling,
            self.spec.stop,
            self.spec.namespace,
            self.spec.deadline_s,
            num_top_logprobs=self.spec.num_top_logprobs,
        )

    def _stream(self, prompt: int, choice: int, tokenizer: TextTokenizer) -> ChoiceStream:
        request_id = self._request_id(prompt)
        return ChoiceStream(
            prompt * self.spec.num_choices + choice,
            make_detokenizer(tokenizer, self.spec.skip_special_tokens, self.spec.prompts[prompt]),
            self.spec.rules,
            self._put,
            lambda: self._calls.stop(request_id, choice),
        )


def all_choices(spec: GenerationSpec) -> Sequence[int]:
    return range(spec.num_total)
