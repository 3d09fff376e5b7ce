"""Runs prepared work and answers, whole or as a stream.

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
from headstart.gateway.api.shapes import Shape
from headstart.gateway.api.usage import build_usage
from headstart.gateway.job import Job, Work, all_choices
from headstart.gateway.meter import Meter
from headstart.gateway.state import GatewayState
from headstart.gateway.stream import Answer, End, Failure, Piece

log = logging.getLogger("headstart.gateway")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request, ready to run."""

    response_id: str
    endpoint: str
    work: Work
    common: Common
    shape: Shape
    usage_extra: dict[str, Any] = field(default_factory=dict)
    on_answer: Callable[[Answer], None] = lambda answer: None


async def run(state: GatewayState, request: Request, prepared: Prepared) -> Response:
    job = Job(prepared.response_id, prepared.work, state.entrance, state.limits.max_buffered_events)
    num_prompt_tokens = sum(map(len, prepared.work.prompts))
    meter = Meter(state.telemetry.metrics, state.telemetry.clock, prepared.endpoint, num_prompt_tokens)
    state.jobs.add(job)
    try:
        job.submit(state.model.tokenizer)
        if not await sse.unless_gone(request.receive, job.wait_first()):
            raise from_failure(Failure(0, ErrorCode.CANCELLED, "the client has left"))
        if prepared.common.stream and job.first_failure is None:
            chunks, patience_s = _chunks(job, prepared, meter), state.limits.send_timeout_s
            return sse.EventStream(chunks, lambda: state.jobs.discard(job), patience_s)
        answers: list[Answer] = []
        if not await sse.unless_gone(request.receive, _collect(job, prepared, meter, answers)):
            raise from_failure(Failure(0, ErrorCode.CANCELLED, "the client has left"))
    except BaseException:
        state.jobs.discard(job)
        raise
    state.jobs.discard(job)
    return JSONResponse(prepared.shape.full(answers) | {"usage": _usage(prepared, answers)})


async def _collect(job: Job, prepared: Prepared, meter: Meter, answers: list[Answer]) -> None:
    """Fill `answers`, one a choice. Raises ApiError if any fails."""
    answers.extend(Answer() for _ in all_choices(prepared.work))
    async for event in job.events():
        meter.see(event)
        if isinstance(event, Failure):
            raise _told(event, prepared)
        answers[event.choice].add(event)
    for answer in answers:
        prepared.on_answer(answer)


async def _chunks(job: Job, prepared: Prepared, meter: Meter) -> AsyncIterator[bytes]:
    shape, extra = prepared.shape, {"usage": None} if prepared.common.include_usage else {}
    answers = [Answer() for _ in all_choices(prepared.work)]
    opened: set[int] = set()
    async for event in job.events():
        meter.see(event)
        if isinstance(event, Failure):
            yield sse.event(error_body(_told(event, prepared)))
            return
        answer = answers[event.choice]
        answer.add(event)
        if event.choice not in opened:
            opened.add(event.choice)
            if (opening := shape.opening(event.choice)) is not None:
                yield sse.event(opening | extra)
        if isinstance(event, End):
            prepared.on_answer(answer)
            yield sse.event(shape.end(event) | extra)
        elif _shows(event, prepared):
            opens = len(answer.token_ids) == len(event.token_ids)
            yield sse.event(shape.piece(event, opens=opens) | extra)
    if prepared.common.include_usage:
        yield sse.event(shape.usage(_usage(prepared, answers)))
    yield sse.DONE


def _shows(piece: Piece, prepared: Prepared) -> bool:
    """Whether a piece has anything for the client: half a character has not."""
    return bool(piece.text or piece.logprobs or (prepared.common.return_token_ids and piece.token_ids))


def _usage(prepared: Prepared, answers: list[Answer]) -> dict[str, Any]:
    ends = [answer.end for answer in answers if answer.end is not None]
    return build_usage(prepared.work, ends, prepared.usage_extra)


def _told(failure: Failure, prepared: Prepared) -> ApiError:
    if failure.code is ErrorCode.INTERNAL:
        log.error("request failed", extra={"request": prepared.response_id, "reason": failure.message})
    return from_failure(failure)
