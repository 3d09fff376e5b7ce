"""The HTTP application: routes, authentication, and errors in one shape."""

import logging
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from headstart.core.errors import RequestError
from headstart.gateway.api import admin_routes
from headstart.gateway.api.auth import Tenant
from headstart.gateway.api.body_reader import Bodies, Received, TooLarge
from headstart.gateway.api.errors import INTERNAL_MESSAGE, ApiError, error_response, from_request_error, json_response
from headstart.gateway.api.generate import prepare_chat, prepare_completion
from headstart.gateway.api.known_fields import ignored_header
from headstart.gateway.api.openapi import describe
from headstart.gateway.api.origins import Origins
from headstart.gateway.api.prepared import Prepared
from headstart.gateway.api.request_log import HEADER, RequestLog, request_id_of
from headstart.gateway.api.respond import respond
from headstart.gateway.request_metrics import DispatchCollector
from headstart.gateway.state import GatewayState

Prepare = Callable[[GatewayState, Received, Tenant], Awaitable[Prepared]]
IGNORED_HEADER = "x-headstart-ignored-fields"
EXPOSED_HEADERS = ("x-request-id", IGNORED_HEADER, "retry-after")

log = logging.getLogger("headstart.gateway")


def create_app(state: GatewayState) -> FastAPI:
    """An ASGI application over `state`; whoever runs it also drives the dispatcher."""
    app = FastAPI(title="Headstart", openapi_url=None)
    state.telemetry.registry.register(DispatchCollector(state.dispatcher.counters))
    _add_error_handlers(app)
    _add_generation(app, state)
    _add_operation(app, state)
    if state.limits.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.limits.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestLog, is_on=state.limits.log_requests)
    return app


def _add_generation(app: FastAPI, state: GatewayState) -> None:
    bodies = Bodies(state.limits)
    origins = Origins(state.limits.cors_origins)

    async def generate(request: Request, prepare: Prepare) -> Response:
        """Refused before its body is read if there is no room for it. The body is released once it is prepared."""
        origins.check_sender(request)
        tenant = _admit(state, request)
        async with bodies.read(request, tenant) as received:
            prepared = await prepare(state, received, tenant)
            ignored = received.ignored
        return _with_ignored(await respond(state, request, prepared), request, ignored)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await generate(request, prepare_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, prepare_completion)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        origins.check_sender(request)
        async with bodies.read(request, _authenticate(state, request)) as received:
            response = json_response(await admin_routes.tokenize(state, received))
        return _with_ignored(response, request, received.ignored)


def _add_operation(app: FastAPI, state: GatewayState) -> None:
    origins = Origins(state.limits.cors_origins)

    def authorize(request: Request) -> None:
        origins.check_operator(request, is_guarded=state.keys.asks_for_admin_key)
        state.keys.authorize(request.headers.get("authorization", ""))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _authenticate(state, request)
        return json_response(admin_routes.models(state))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        _authenticate(state, request)
        if name != state.model.name:
            raise ApiError(404, "this model is not served here", "model", "model_not_found")
        return json_response(admin_routes.model_card(state))

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(request: Request) -> Response:
        authorize(request)
        return json_response(await admin_routes.flush_cache(state))

    @app.get("/cluster")
    async def cluster(request: Request) -> Response:
        authorize(request)
        return json_response(admin_routes.cluster(state))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        authorize(request)
        return admin_routes.metrics(state)

    @app.get("/health")
    async def health() -> Response:
        return admin_routes.health(state)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        keys = state.keys
        return json_response(
            describe(state.model.name, asks_for_keys=keys.asks_for_keys, asks_for_admin_key=keys.asks_for_admin_key)
        )

    @app.get("/ready")
    async def ready() -> Response:
        return admin_routes.ready(state)


def _authenticate(state: GatewayState, request: Request) -> Tenant:
    return state.keys.authenticate(request.headers.get("authorization", ""))


def _admit(state: GatewayState, request: Request) -> Tenant:
    tenant = _authenticate(state, request)
    if state.generations.is_draining:
        raise ApiError(503, "the server is shutting down", code="unavailable")
    if state.dispatcher.is_full:
        raise ApiError(429, "too many unfinished requests, try again later", code="busy")
    state.generations.check_room(tenant.namespace(""))
    return tenant


def _with_ignored(response: Response, request: Request, ignored: list[str]) -> Response:
    """Name the fields that nobody knows in the answer and in the log."""
    if ignored:
        named = response.headers[IGNORED_HEADER] = ignored_header(ignored)
        log.info("fields ignored", extra={"request_id": request_id_of(request), "fields": named})
    return response


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return TooLarge(error) if error.status == 413 else error_response(error)

    @app.exception_handler(RequestError)
    async def on_request_error(_: Request, error: RequestError) -> Response:
        return error_response(from_request_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        messages = {404: f"there is no path {path!r}", 405: f"{path!r} does not take {request.method}"}
        return error_response(ApiError(error.status_code, messages.get(error.status_code, "the request was refused")))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        """The server logs the traceback; the client gets none of it. This answer passes no middleware."""
        response = error_response(ApiError(500, INTERNAL_MESSAGE, code="internal"))
        response.headers[HEADER.decode()] = request_id_of(request)
        return response
