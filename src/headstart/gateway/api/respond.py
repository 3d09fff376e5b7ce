"""Runs a prepared generation and answers, whole or as a stream.

The status is decided before the first byte: a stream's 200 waits for a first token or a refusal. After that a failure
is an error event, and the stream ends.
"""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from msgspec import UNSET, Struct
from starlette.requests import Request
from starlette.responses import Response

from headstart.core.errors import ErrorCode
from headstart.gateway.api import sse
from headstart.gateway.api.errors import ApiError, error_body, from_failure, json_response
from headstart.gateway.api.params import OutputOptions
from headstart.gateway.api.response_bodies import Usage
from headstart.gateway.api.response_format import ChunkUsage, ResponseFormat
from headstart.gateway.api.usage import MemoryUsage, build_usage, usage_so_far
from headstart.gateway.generation import Generation, GenerationSpec, all_choices
from headstart.gateway.request_metrics import RequestMetrics
from headstart.gateway.state import GatewayState
from headstart.gateway.stream import ChoiceOutput, Done, Event, Failure, TextChunk

log = logging.getLogger("headstart.gateway")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request, ready to run."""

    response_id: str
    endpoint: str
    spec: GenerationSpec
    output: OutputOptions
    response_format: ResponseFormat
    memory: MemoryUsage
    on_answer: Callable[[ChoiceOutput], None] = lambda answer: None


async def respond(state: GatewayState, request: Request, prepared: Prepared) -> Response:
    generation = Generation(prepared.response_id, prepared.spec, state.calls, state.limits.max_buffered_events)
    num_prompt_tokens = sum(map(len, prepared.spec.prompts))
    metrics = RequestMetrics(state.telemetry.metrics, state.telemetry.clock, prepared.endpoint, num_prompt_tokens)
    state.generations.add(generation)
    try:
        generation.submit(state.model.tokenizer)
        if not await sse.unless_gone(request.receive, generation.wait_first()):
            raise from_failure(Failure(0, ErrorCode.CANCELLED, "the client has left"))
        if prepared.output.stream and generation.first_failure is None:
            events, patience_s = stream(generation, prepared, metrics), state.limits.send_timeout_s
            return sse.EventStream(events, lambda: state.generations.discard(generation), patience_s)
        answers: list[ChoiceOutput] = []
        if not await sse.unless_gone(request.receive, _collect(generation, prepared, metrics, answers)):
            raise from_failure(Failure(0, ErrorCode.CANCELLED, "the client has left"))
    except BaseException:
        state.generations.discard(generation)
        raise
    state.generations.discard(generation)
    return json_response(prepared.response_format.full(answers, _usage(prepared, answers)))


async def _collect(
    generation: Generation, prepared: Prepared, metrics: RequestMetrics, answers: list[ChoiceOutput]
) -> None:
    """Fill `answers`, one a choice. Raises ApiError if any fails."""
    answers.extend(ChoiceOutput() for _ in all_choices(prepared.spec))
    while events := await generation.next_events():
        for event in events:
            metrics.observe(event)
            if isinstance(event, Failure):
                raise _failure_error(event, prepared)
            answers[event.choice].add(event)
    for answer in answers:
        prepared.on_answer(answer)


async def stream(generation: Generation, prepared: Prepared, metrics: RequestMetrics) -> AsyncIterator[bytes]:
    """Server-sent events, those that came together in one piece."""
    writer = _StreamWriter(prepared, metrics)
    while events := await generation.next_events():
        bodies = [body for event in events for body in writer.write(event)]
        if bodies:
            yield b"".join(map(sse.event, bodies))
        if writer.has_failed:
            return
    yield b"".join((*map(sse.event, writer.finish()), sse.DONE))


class _StreamWriter:
    """Turns one response's events into the bodies of its server-sent events."""

    def __init__(self, prepared: Prepared, metrics: RequestMetrics) -> None:
        self._prepared = prepared
        self._metrics = metrics
        self._format = prepared.response_format
        self._answers: list[ChoiceOutput] = [ChoiceOutput() for _ in all_choices(prepared.spec)]
        self._opened: set[int] = set()
        self._num_tokens = 0
        self.has_failed = False

    def write(self, event: Event) -> list[Struct]:
        self._metrics.observe(event)
        if isinstance(event, Failure):
            self.has_failed = True
            return [error_body(_failure_error(event, self._prepared))]
        answer = self._answers[event.choice]
        opens = not answer.token_ids
        answer.add(event)
        bodies = self._open(event.choice)
        if isinstance(event, Done):
            self._prepared.on_answer(answer)
            bodies.append(self._format.end(event, self._chunk_usage()))
        else:
            self._num_tokens += len(event.token_ids)
            if self._shows(event):
                bodies.append(self._format.chunk(event, self._chunk_usage(), opens=opens and bool(event.token_ids)))
        return bodies

    def finish(self) -> list[Struct]:
        """What comes after the last choice has ended."""
        if not self._prepared.output.include_usage:
            return []
        return [self._format.usage(_usage(self._prepared, self._answers))]

    def _open(self, choice: int) -> list[Struct]:
        if choice in self._opened:
            return []
        self._opened.add(choice)
        opening = self._format.opening(choice, self._chunk_usage())
        return [] if opening is None else [opening]

    def _chunk_usage(self) -> ChunkUsage:
        output = self._prepared.output
        if not output.include_usage:
            return UNSET
        return usage_so_far(self._prepared.spec, self._num_tokens) if output.continuous_usage else None

    def _shows(self, chunk: TextChunk) -> bool:
        """Whether a chunk has anything for the client: half a character has not."""
        return bool(chunk.text or chunk.logprobs or (self._prepared.output.return_token_ids and chunk.token_ids))


def _usage(prepared: Prepared, answers: list[ChoiceOutput]) -> Usage:
    ends = [answer.end for answer in answers if answer.end is not None]
    return build_usage(prepared.spec, ends, prepared.memory)


def _failure_error(failure: Failure, prepared: Prepared) -> ApiError:
    if failure.code is ErrorCode.INTERNAL:
        log.error("request failed", extra={"request": prepared.response_id, "reason": failure.message})
    return from_failure(failure)
