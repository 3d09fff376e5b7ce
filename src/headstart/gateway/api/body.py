"""Request bodies: read up to a bound, parsed as strict JSON, refused in time and in words."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.gateway.api.errors import ApiError, error_response, invalid

LINGER_BYTES = 64 << 20
LINGER_S = 5.0


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as an object. NaN and Infinity are no JSON; neither is text that is not UTF-8."""
    data = await _read(request, max_bytes)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the body is not valid JSON: {reason}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > max_bytes:
        raise too_large
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)


class TooLarge(Response):
    """A 413 sent at once; then the rest is read and dropped for a while, so that a client still writing gets to see it."""

    def __init__(self, error: ApiError) -> None:
        answer = error_response(error)
        super().__init__(answer.body, error.status, media_type="application/json")
        self.headers["connection"] = "close"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                await _drop(receive, LINGER_BYTES)
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive, max_bytes: int) -> None:
    while max_bytes > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return
        max_bytes -= len(message.get("body", b""))
