"""Runs a prepared generation and answers, whole or as a stream.

The status is decided before the first byte: a stream's 200 waits for a first token or a refusal. After that a failure
is an error event, and the stream ends.
"""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from headstart.core.errors import ErrorCode
from headstart.gateway.api import sse
from headstart.gateway.api.errors import ApiError, error_body, from_failure
from headstart.gateway.api.params import Common
from headstart.gateway.api.response_format import ResponseFormat
from headstart.gateway.api.usage import build_usage
from headstart.gateway.generation import Generation, GenerationSpec, all_choices
from headstart.gateway.request_metrics import RequestMetrics
from headstart.gateway.state import GatewayState
from headstart.gateway.stream import ChoiceOutput, Done, Failure, TextChunk

log = logging.getLogger("headstart.gateway")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request, ready to run."""

    response_id: str
    endpoint: str
    spec: GenerationSpec
    common: Common
    response_format: ResponseFormat
    usage_extra: dict[str, Any] = field(default_factory=dict)
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
        if prepared.common.stream and generation.first_failure is None:
            chunks, patience_s = _chunks(generation, prepared, metrics), state.limits.send_timeout_s
            return sse.EventStream(chunks, lambda: state.generations.discard(generation), patience_s)
        answers: list[ChoiceOutput] = []
        if not await sse.unless_gone(request.receive, _collect(generation, prepared, metrics, answers)):
            raise from_failure(Failure(0, ErrorCode.CANCELLED, "the client has left"))
    except BaseException:
        state.generations.discard(generation)
        raise
    state.generations.discard(generation)
    return JSONResponse(prepared.response_format.full(answers) | {"usage": _usage(prepared, answers)})


async def _collect(
    generation: Generation, prepared: Prepared, metrics: RequestMetrics, answers: list[ChoiceOutput]
) -> None:
    """Fill `answers`, one a choice. Raises ApiError if any fails."""
    answers.extend(ChoiceOutput() for _ in all_choices(prepared.spec))
    async for event in generation.events():
        metrics.observe(event)
        if isinstance(event, Failure):
            raise _failure_error(event, prepared)
        answers[event.choice].add(event)
    for answer in answers:
        prepared.on_answer(answer)


async def _chunks(generation: Generation, prepared: Prepared, metrics: RequestMetrics) -> AsyncIterator[bytes]:
    response_format, extra = prepared.response_format, {"usage": None} if prepared.common.include_usage else {}
    answers = [ChoiceOutput() for _ in all_choices(prepared.spec)]
    opened: set[int] = set()
    async for event in generation.events():
        metrics.observe(event)
        if isinstance(event, Failure):
            yield sse.event(error_body(_failure_error(event, prepared)))
            return
        answer = answers[event.choice]
        answer.add(event)
        if event.choice not in opened:
            opened.add(event.choice)
            if (opening := response_format.opening(event.choice)) is not None:
                yield sse.event(opening | extra)
        if isinstance(event, Done):
            prepared.on_answer(answer)
            yield sse.event(response_format.end(event) | extra)
        elif _shows(event, prepared):
            opens = len(answer.token_ids) == len(event.token_ids)
            yield sse.event(response_format.chunk(event, opens=opens) | extra)
    if prepared.common.include_usage:
        yield sse.event(response_format.usage(_usage(prepared, answers)))
    yield sse.DONE


def _shows(chunk: TextChunk, prepared: Prepared) -> bool:
    """Whether a chunk has anything for the client: half a character has not."""
    return bool(chunk.text or chunk.logprobs or (prepared.common.return_token_ids and chunk.token_ids))


def _usage(prepared: Prepared, answers: list[ChoiceOutput]) -> dict[str, Any]:
    ends = [answer.end for answer in answers if answer.end is not None]
    return build_usage(prepared.spec, ends, prepared.usage_extra)


def _failure_error(failure: Failure, prepared: Prepared) -> ApiError:
    if failure.code is ErrorCode.INTERNAL:
        log.error("request failed", extra={"request": prepared.response_id, "reason": failure.message})
    return from_failure(failure)
