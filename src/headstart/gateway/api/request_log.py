"""An id for every HTTP request, in the answer's `x-request-id`, and with --log-requests a line for each answer.

A client's own `x-request-id` is taken if it is short and printable.
"""

import logging
import time
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
MAX_ID_LEN = 128

log = logging.getLogger("headstart.gateway.requests")


class RequestLog:
    """ASGI middleware. Prompts and answers are never logged."""

    def __init__(self, app: ASGIApp, is_on: bool) -> None:
        self._app = app
        self._is_on = is_on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or f"req-{uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._is_on:
                _log(scope, request_id, status, time.monotonic() - began)


def request_id_of(request: Request) -> str:
    """The id of a request that has passed the middleware."""
    return str(getattr(request.state, "request_id", ""))


def _given_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == HEADER), b"")
    text = given.decode("latin-1").strip()
    return text if len(text) <= MAX_ID_LEN and text.isascii() and text.isprintable() else ""


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    client = scope.get("client")
    facts = {
        "request_id": request_id,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 3),
        "client": client[0] if client else "unknown",
    }
    log.info("request answered", extra=facts)
