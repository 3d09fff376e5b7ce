"""Runs a prepared generation and answers, whole or as a stream.

The status is decided before the first byte: a stream's 200 waits for a first token or a refusal. After that a failure
is an error event, and the stream ends.
"""

from starlette.requests import Request
from starlette.responses import Response

from headstart.core.errors import ErrorCode
from headstart.gateway.api import sse
from headstart.gateway.api.errors import from_failure, json_response
from headstart.gateway.api.event_writer import stream
from headstart.gateway.api.prepared import Prepared
from headstart.gateway.generation import Generation, all_choices
from headstart.gateway.request_metrics import RequestMetrics
from headstart.gateway.state import GatewayState
from headstart.gateway.stream import ChoiceOutput, Failure


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
    return json_response(prepared.response_format.full(answers, prepared.usage(answers)))


async def _collect(
    generation: Generation, prepared: Prepared, metrics: RequestMetrics, answers: list[ChoiceOutput]
) -> None:
    """Fill `answers`, one a choice. Raises ApiError if any fails."""
    answers.extend(ChoiceOutput() for _ in all_choices(prepared.spec))
    while events := await generation.next_events():
        for event in events:
            metrics.observe(event)
            if isinstance(event, Failure):
                raise prepared.error(event)
            answers[event.choice].add(event)
    for answer in answers:
        prepared.on_answer(answer)
