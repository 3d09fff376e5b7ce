"""The HTTP application: routes, authentication, and errors in one shape."""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headstart.core.errors import RequestError
from headstart.gateway.api import admin_routes
from headstart.gateway.api.auth import Tenant
from headstart.gateway.api.body import Bodies, TooLarge
from headstart.gateway.api.errors import INTERNAL_MESSAGE, ApiError, error_response, from_request_error
from headstart.gateway.api.generate import prepare_chat, prepare_completion
from headstart.gateway.api.openapi import describe
from headstart.gateway.api.respond import Prepared, respond
from headstart.gateway.request_metrics import DispatchCollector
from headstart.gateway.state import GatewayState
from headstart.wire.security import is_loopback

Prepare = Callable[[GatewayState, dict[str, Any], Tenant], Awaitable[Prepared]]


def create_app(state: GatewayState) -> FastAPI:
    """An ASGI application over `state`; whoever runs it also drives the dispatcher."""
    app = FastAPI(title="Headstart", openapi_url=None)
    state.telemetry.registry.register(DispatchCollector(state.dispatcher.counters))
    _add_error_handlers(app)
    _add_generation(app, state)
    _add_operation(app, state)
    return app


def _add_generation(app: FastAPI, state: GatewayState) -> None:
    bodies = Bodies(state.limits)

    async def prepared(request: Request, prepare: Prepare) -> Prepared:
        """Refused before its body is read where there is no room for it. The body ends with this call."""
        tenant = _admit(state, request)
        async with bodies.read(request, tenant) as body:
            return await prepare(state, body, tenant)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await respond(state, request, await prepared(request, prepare_chat))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await respond(state, request, await prepared(request, prepare_completion))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        async with bodies.read(request, _authenticate(state, request)) as body:
            return JSONResponse(await admin_routes.tokenize(state, body))


def _add_operation(app: FastAPI, state: GatewayState) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _authenticate(state, request)
        return JSONResponse(admin_routes.models(state))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        _authenticate(state, request)
        if name != state.model.name:
            raise ApiError(404, "this model is not served here", "model", "model_not_found")
        return JSONResponse(admin_routes.model_card(state))

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(request: Request) -> Response:
        _authorize(state, request)
        return JSONResponse(await admin_routes.flush_cache(state))

    @app.get("/cluster")
    async def cluster(request: Request) -> Response:
        _authorize(state, request)
        return JSONResponse(admin_routes.cluster(state))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        _authorize(state, request)
        return admin_routes.metrics(state)

    @app.get("/health")
    async def health() -> Response:
        return admin_routes.health(state)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        keys = state.keys
        return JSONResponse(
            describe(state.model.name, asks_for_keys=keys.asks_for_keys, asks_for_admin_key=keys.asks_for_admin_key)
        )

    @app.get("/ready")
    async def ready() -> Response:
        return admin_routes.ready(state)


def _authenticate(state: GatewayState, request: Request) -> Tenant:
    return state.keys.authenticate(request.headers.get("authorization", ""))


def _authorize(state: GatewayState, request: Request) -> None:
    """A page of another site, in a browser of a trusted machine, is nobody to trust: it may send, but not read. Where its
    site's name leads to this machine (DNS rebinding) its browser takes it for ours: only the name itself tells."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "pages of other sites may not operate the server", code="cross_site")
    if not state.keys.asks_for_admin_key and not _is_ours(request.headers.get("host", "localhost")):
        message = "ask under a loopback address, or set an admin key (--admin-key-file)"
        raise ApiError(403, message, code="cross_site")
    state.keys.authorize(request.headers.get("authorization", ""))


def _is_ours(host: str) -> bool:
    """Whether a Host header names this machine, whoever resolves it."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _admit(state: GatewayState, request: Request) -> Tenant:
    tenant = _authenticate(state, request)
    if state.generations.is_draining:
        raise ApiError(503, "the server is shutting down", code="unavailable")
    if state.dispatcher.is_full:
        raise ApiError(429, "too many unfinished requests, try again later", code="busy")
    state.generations.check_room(tenant.namespace(""))
    return tenant


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return TooLarge(error) if error.status == 413 else error_response(error)

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return error_response(from_request_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        words = {404: "there is no such path", 405: "this path does not take that method"}
        return error_response(ApiError(error.status_code, words.get(error.status_code, "the request was refused")))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        """The server logs the traceback; the client gets none of it."""
        return error_response(ApiError(500, INTERNAL_MESSAGE, code="internal"))
