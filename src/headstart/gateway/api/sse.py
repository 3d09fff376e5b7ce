"""Server-sent events that notice a client that has left or takes nothing, and end well-formed whatever else happens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from msgspec import json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
CHECKS_PER_PATIENCE = 4
"""How often a stream is looked at for a client that takes nothing: one timer for each send would cost more than the send."""


WRITE_CHUNK = "headstart.write_chunk"
"""Extension of ASGI that a server may offer: a function that takes a chunk of a response whose start was sent and whose
length is not known. It returns False, and has done nothing, if the client does not keep up or has left; then `send`
waits, or drops it."""


def event(body: Any) -> bytes:
    return b"data: " + json.encode(body) + b"\n\n"


async def client_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` as they come. `on_close` runs exactly once, however the stream ends. A client that takes
    nothing for `patience_s` is sent no more: it would keep its place for as long as it likes."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None], patience_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._patience_s = patience_s
        self._send_began: float | None = None  # when the send that is open began, in the loop's time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write_chunk = scope.get("extensions", {}).get(WRITE_CHUNK)
        sending = asyncio.ensure_future(self._send_all(send, write_chunk))
        leaving = asyncio.ensure_future(client_gone(receive))
        try:
            done: set[asyncio.Future[None]] = set()
            while not done and not self._is_stalled:
                check_s = self._patience_s / CHECKS_PER_PATIENCE
                done, _ = await asyncio.wait((sending, leaving), timeout=check_s, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            pass  # the connection broke while we were writing
        finally:
            self._on_close()  # first: we may be cancelled ourselves
            await _cancelled(sending, leaving)

    @property
    def _is_stalled(self) -> bool:
        began = self._send_began
        return began is not None and asyncio.get_running_loop().time() - began >= self._patience_s

    async def _send_all(self, send: Send, write_chunk: Callable[[bytes], bool] | None) -> None:
        await self._send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for chunk in events:
                if write_chunk is None or not write_chunk(chunk):
                    await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        self._send_began = asyncio.get_running_loop().time()
        await send(message)
        self._send_began = None


async def _cancelled(*tasks: "asyncio.Future[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(receive: Receive, work: Awaitable[None]) -> bool:
    """Await `work` for as long as the client is there. False if it left first; `work` is then cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(client_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        await _cancelled(working, leaving)
