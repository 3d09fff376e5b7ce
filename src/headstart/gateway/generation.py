"""One HTTP request: its prompts and choices in the dispatcher, and one bounded queue of what comes back.

    open ─► over (every choice ended) | failed (one failed: the others are cancelled) | closed (client gone, too slow)

Whatever ends it, nothing of it stays in the dispatcher.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from headstart.core.arrays import int32_array
from headstart.core.errors import ErrorCode
from headstart.core.request import ChoiceRef, Request, SamplingParams, StopCriteria
from headstart.gateway.dispatch import DispatcherApi
from headstart.gateway.stream import ChoiceStream, Done, Event, Failure, StopRules, TextChunk
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
    """Submits a GenerationSpec and yields its events in order of arrival."""

    def __init__(self, generation_id: str, spec: GenerationSpec, calls: DispatcherApi, max_buffered: int) -> None:
        self.generation_id = generation_id
        self.spec = spec
        self._calls = calls
        self._max_buffered = max_buffered
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
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

    async def events(self) -> AsyncIterator[Event]:
        """Every event until all choices ended or one failed; that failure is the last."""
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                if isinstance(event, Failure):
                    return
            if self._num_open == 0:
                return
            await self._wait()

    def close(self, code: ErrorCode = ErrorCode.CANCELLED, message: str = "cancelled") -> None:
        """Give up whatever is still open. Safe to repeat."""
        for prompt in range(len(self.spec.prompts)):
            self._calls.cancel(self._request_id(prompt), code, message)

    async def _wait(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def _put(self, event: Event) -> None:
        if self._closed:
            return
        self._num_open -= isinstance(event, Done | Failure)
        if len(self._events) >= self._max_buffered and isinstance(event, TextChunk):
            self._events.clear()
            event = Failure(event.choice, ErrorCode.CANCELLED, "the client reads too slowly")
        self._events.append(event)
        self._wake.set()
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
