"""Request bodies: read up to a bound, parsed as strict JSON, refused early and with a reason."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headstart.core.errors import ErrorCode
from headstart.gateway.api.auth import Tenant
from headstart.gateway.api.errors import ApiError, error_response, from_failure, invalid
from headstart.gateway.api.known_fields import check_names, note_unknown
from headstart.gateway.api.validation import Problems, convert_body
from headstart.gateway.state import HttpLimits
from headstart.gateway.stream import ChoiceFailure

LINGER_BYTES = 64 << 20
LINGER_S = 5.0

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(slots=True)
class Received:
    """A body as it came. `ignored` names what nobody knows, once it was taken as a struct."""

    fields: dict[str, Any]
    is_strict: bool = False
    ignored: list[str] = field(default_factory=list)

    def as_struct(self, kind: type[Body]) -> Body:
        """Raises ApiError 400 that names everything that is wrong."""
        problems = Problems()
        self.ignored = check_names(kind, self.fields, problems)
        if self.is_strict:
            note_unknown(self.ignored, problems)
        return convert_body(kind, self.fields, problems)


class Bodies:
    """Bodies being read and checked. Their sum is bounded: many large ones at once must not exhaust the memory. Where
    keys tell clients apart, one may take half of it: slow uploads of one must not keep all others out."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._num_bytes: Counter[bytes] = Counter()  # by the tenant's salt

    @asynccontextmanager
    async def read(self, request: Request, tenant: Tenant) -> AsyncIterator[Received]:
        """The body, to be released when the block ends. Raises ApiError 400, 408, 413 or 429."""
        data = bytearray()
        try:
            await self._fill(data, request, tenant.salt)
            yield Received(parse_json(bytes(data)), self._limits.strict_fields)
        finally:
            self._num_bytes[tenant.salt] -= len(data)

    def _has_room(self, salt: bytes) -> bool:
        most = self._limits.max_read_bytes
        return self._num_bytes.total() <= most and (not salt or self._num_bytes[salt] <= most // 2)

    async def _fill(self, data: bytearray, request: Request, salt: bytes) -> None:
        max_bytes = self._limits.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
        stated = request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated) > max_bytes:
            raise too_large
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                async for chunk in request.stream():
                    data += chunk
                    self._num_bytes[salt] += len(chunk)
                    if len(data) > max_bytes:
                        raise too_large
                    if not self._has_room(salt):
                        raise ApiError(429, "too many large requests arrive at once, try again later", code="busy")
        except TimeoutError as error:
            message = f"the body did not arrive within {self._limits.body_timeout_s:g} s"
            raise ApiError(408, message, code="body_timeout") from error
        except ClientDisconnect as error:
            raise from_failure(ChoiceFailure(0, ErrorCode.CANCELLED, "the client has left")) from error


def parse_json(data: bytes) -> dict[str, Any]:
    """An object. NaN and Infinity are no JSON; neither is text that is not UTF-8. Raises ApiError 400."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(f"the body is not valid JSON: {reason}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return body


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
