"""What operators and probes ask: models, tokens, health, metrics, the cluster's state, an empty cache."""

import asyncio
from typing import Any

import msgspec
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from headstart.gateway.api.errors import ApiError
from headstart.gateway.api.generate import check_model
from headstart.gateway.api.prompts import encode, render_chat
from headstart.gateway.api.validate import Fields
from headstart.gateway.registry import WorkerRecord
from headstart.gateway.state import GatewayState


def model_card(state: GatewayState) -> dict[str, Any]:
    return {
        "id": state.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "headstart",
        "max_model_len": state.context_len,
    }


def models(state: GatewayState) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(state)]}


def health(state: GatewayState) -> JSONResponse:
    """200 while this process runs and some decode worker has not gone silent. Costs no slot anywhere."""
    present = any(record.may_return for record in state.dispatcher.registry.of_role("decode"))
    return JSONResponse({"status": "ok" if present else "no decode worker"}, 200 if present else 503)


def ready(state: GatewayState) -> JSONResponse:
    """200 while new requests would be taken."""
    is_ready = state.dispatcher.is_ready and not state.generations.is_draining
    return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)


def metrics(state: GatewayState) -> Response:
    state.telemetry.metrics.unfinished.set(state.dispatcher.num_unfinished)
    return Response(generate_latest(state.telemetry.registry), media_type=CONTENT_TYPE_LATEST)


async def tokenize(state: GatewayState, body: dict[str, Any]) -> dict[str, Any]:
    fields = Fields(body)
    check_model(state, fields)
    tokenizer = state.model.tokenizer
    if fields.has("messages"):
        text, name, special = render_chat(fields, state.model), "messages", False
    else:
        if not isinstance(fields.raw("prompt"), str):
            raise fields.error("prompt", "a string (or give 'messages')")
        text, name, special = fields.raw("prompt"), "prompt", fields.boolean("add_special_tokens", True)
    ids = await encode(tokenizer, text, add_special_tokens=special, name=name)
    return {"count": len(ids), "max_model_len": state.context_len, "tokens": ids}


async def flush_cache(state: GatewayState) -> dict[str, Any]:
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
    return {"flushed": True, "num_pages": num_pages}


def cluster(state: GatewayState) -> dict[str, Any]:
    now = state.telemetry.clock.now()
    dispatcher = state.dispatcher
    return {
        "model": state.model.name,
        "ready": dispatcher.is_ready,
        "draining": state.generations.is_draining,
        "context_len": state.context_len,
        "unfinished": dispatcher.num_unfinished,
        "remembered_tokens": state.memory.num_tokens,
        "counters": dict(dispatcher.counters),
        "workers": [_worker(state, record, now) for record in dispatcher.registry.all()],
    }


def _worker(state: GatewayState, record: WorkerRecord, now: float) -> dict[str, Any]:
    return {
        "name": record.ref.name,
        "incarnation": record.ref.incarnation,
        "role": record.join.role,
        "state": record.state.value,
        "silent_s": round(now - record.last_seen_at, 3),
        "loop_age_s": round(record.loop_age_s, 3),
        "capacity_tokens": record.join.capacity_tokens,
        "peer_address": record.join.peer_address,
        "kv": record.join.kv_spec.described(),
        "open_choices": state.dispatcher.open_choices(record.ref),
        "load": msgspec.to_builtins(record.load),
    }
