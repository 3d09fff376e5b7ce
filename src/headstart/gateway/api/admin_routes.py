"""What operators and probes ask: models, tokens, health, metrics, the cluster's state, an empty cache."""

import asyncio

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from headstart.core.messages import Role
from headstart.gateway.api.body_reader import Received
from headstart.gateway.api.errors import ApiError, invalid, json_response
from headstart.gateway.api.generate import check_model
from headstart.gateway.api.prompts import encode, render_chat
from headstart.gateway.api.request_bodies import TokenizeBody
from headstart.gateway.api.response_bodies import (
    ClusterReport,
    FlushedCaches,
    HealthReport,
    ModelCard,
    ModelList,
    ReadyReport,
    TokenizedText,
    WorkerReport,
)
from headstart.gateway.registry import WorkerRecord
from headstart.gateway.state import GatewayState


def model_card(state: GatewayState) -> ModelCard:
    return ModelCard(id=state.model.name, max_model_len=state.context_limit.num_tokens)


def models(state: GatewayState) -> ModelList:
    return ModelList(data=[model_card(state)])


def health(state: GatewayState) -> Response:
    """200 while this process runs and some decode worker has not gone silent. Costs no slot anywhere."""
    present = any(record.may_return for record in state.dispatcher.registry.of_role(Role.DECODE))
    return json_response(HealthReport("ok" if present else "no decode worker"), 200 if present else 503)


def ready(state: GatewayState) -> Response:
    """200 while new requests would be taken."""
    is_ready = state.dispatcher.is_ready and not state.generations.is_draining
    return json_response(ReadyReport(is_ready), 200 if is_ready else 503)


def metrics(state: GatewayState) -> Response:
    state.telemetry.metrics.unfinished.set(state.dispatcher.num_unfinished)
    return Response(generate_latest(state.telemetry.registry), media_type=CONTENT_TYPE_LATEST)


async def tokenize(state: GatewayState, received: Received) -> TokenizedText:
    body = received.as_struct(TokenizeBody)
    check_model(state, body)
    tokenizer = state.model.tokenizer
    if body.messages is not None:
        text, name, special = render_chat(body, state.model), "messages", body.add_special_tokens is True
    elif body.prompt is not None:
        text, name, special = body.prompt, "prompt", body.add_special_tokens is not False
    else:
        raise invalid("give 'prompt', a text, or 'messages', a conversation", "prompt", "invalid_value")
    ids = await encode(tokenizer, text, add_special_tokens=special, name=name)
    return TokenizedText(len(ids), state.context_limit.num_tokens, ids)


async def flush_cache(state: GatewayState) -> FlushedCaches:
    """Empties every worker's cache and forgets nothing else. Refused while requests are unfinished."""
    if state.dispatcher.num_unfinished:
        raise ApiError(400, "the cache is not flushed while requests are unfinished", code="busy")
    answer: asyncio.Future[tuple[bool, int]] = asyncio.get_running_loop().create_future()

    def settle(ok: bool, num_pages: int) -> None:
        if not answer.done():
            answer.set_result((ok, num_pages))

    state.calls.flush(settle)
    ok, num_pages = await answer
    if not ok:
        raise ApiError(400, "a worker is busy or did not answer: not every cache was flushed", code="busy")
    return FlushedCaches(num_pages)


def cluster(state: GatewayState) -> ClusterReport:
    now = state.telemetry.clock.now()
    dispatcher = state.dispatcher
    return ClusterReport(
        model=state.model.name,
        ready=dispatcher.is_ready,
        draining=state.generations.is_draining,
        context_len=state.context_limit.num_tokens,
        unfinished=dispatcher.num_unfinished,
        remembered_tokens=state.memory.num_tokens,
        counters=dict(dispatcher.counters),
        workers=[_worker(state, record, now) for record in dispatcher.registry.all()],
    )


def _worker(state: GatewayState, record: WorkerRecord, now: float) -> WorkerReport:
    return WorkerReport(
        name=record.ref.name,
        incarnation=record.ref.incarnation,
        role=record.join.role,
        state=record.state.value,
        silent_s=round(now - record.last_seen_at, 3),
        loop_age_s=round(record.loop_age_s, 3),
        capacity_tokens=record.join.capacity_tokens,
        peer_address=record.join.peer_address,
        kv=record.join.kv_spec.described(),
        open_choices=state.dispatcher.open_choices(record.ref),
        load=record.load,
    )
