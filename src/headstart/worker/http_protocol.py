"""uvicorn's HTTP/1.1, with bounds on clients that open connections and send nothing.

    waiting ─whole head of a request─► asked ─answered─► waiting (uvicorn's keep-alive bounds the silence between)
       │                                └─answered before its body was whole─► late ─whole body─► waiting
       └─too long over one head─► closed                                        └─too long over the rest─► closed

A connection beyond the last that there is room for is answered 503 and closed.

A client may shut down its sending half once its request is whole, and still gets its answer. Whether it has only done
that or has left shows when something is sent: to one that has left, the second write fails. So what every client skips
is written to it: an interim response before the answer, a comment in a stream of events.

A stream's chunks are framed here, by an extension of ASGI that an application may use in place of `send`. h11 builds,
checks and copies an event for each, which costs more than all the rest of a token; it still writes the head and the end,
and its state is the same with and without data between them.
"""

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from headstart.gateway.api.errors import ApiError, error_response
from headstart.gateway.api.sse import WRITE_CHUNK

SPARE_DESCRIPTORS = 128
"""For everything but clients: workers' sockets, logs, models."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Every HTTP/1.1 client skips it, however often it comes."""
COMMENT = b"3\r\n:\n\n\r\n"
"""One chunk: a comment among server-sent events."""
PROBE_S = 0.1
MAX_PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one listener."""

    max_connections: int
    head_timeout_s: float = 15.0
    """From its first byte, or from the connection's start, until a request's head is whole; and for what is still to come
    of a body when its answer is out."""
    max_head_bytes: int = 64 << 10  # request line and headers; beyond it, 400
    read_timeout_s: float = 60.0  # for a client to take anything of an answer that waits for it


def connection_limits() -> ConnectionLimits:
    """As many connections as this process may have descriptors for: the kernel's refusal would hit workers too."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConnectionLimits(max_connections=max(1, descriptors - SPARE_DESCRIPTORS))


class TimeoutH11Protocol(H11Protocol):
    """One connection."""

    def __init__(self, limits: ConnectionLimits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._is_event_stream = False  # the answer under way is one, and has begun
        self._app, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.write(_FULL)
            transport.close()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        for timer in (self._reading, self._probing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True keeps the connection until its answer is out."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._probe(PROBE_S)
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_late = self.conn.our_state is h11.DONE  # with a body that nobody reads any more
        if is_late or self.conn.their_state is h11.IDLE:
            self._expect_head()
        else:
            self._forget()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. To an HTTP/1.1 client it may send the chunks of an event stream by WRITE_CHUNK."""
        self._is_event_stream = False
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope.setdefault("extensions", {})[WRITE_CHUNK] = self._chunk_writer()
        await self._app(scope, receive, send)

    def _chunk_writer(self) -> Callable[[bytes], bool]:
        cycle, flow, transport = self.cycle, self.flow, self.transport

        def write_chunk(data: bytes) -> bool:
            if flow.write_paused or cycle.disconnected:
                return False
            self._is_event_stream = True
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return True

        return write_chunk

    def _probe(self, pause_s: float) -> None:
        """Write something to a client that sends no more, and again after `pause_s`, as long as it has no answer."""
        self._probing = None
        if self.transport.is_closing() or self.cycle.response_complete or self.cycle.scope["http_version"] != "1.1":
            return
        if not self.cycle.response_started:
            self.transport.write(CONTINUE)
        elif self._is_event_stream:
            self.transport.write(COMMENT)
        self._probing = self.loop.call_later(pause_s, self._probe, min(3 * pause_s, MAX_PROBE_S))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_reading()

    def _expect_reading(self) -> None:
        """A transport that is closed waits for its last bytes to be taken: it has to be aborted."""
        if self._reading is None and (num_left := self.transport.get_write_buffer_size()):
            self._reading = self.loop.call_later(self._limits.read_timeout_s, self._look, num_left)

    def _look(self, num_left: int) -> None:
        self._reading = None
        if self.transport.get_write_buffer_size() == num_left:
            self.transport.abort()
        else:
            self._expect_reading()

    def _expect_head(self) -> None:
        """More bytes do not start the time anew."""
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._limits.head_timeout_s, self.transport.close)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _whole(error: ApiError) -> bytes:
    """An answer as it stands on the wire."""
    answer = error_response(error)
    head = [f"HTTP/1.1 {error.status} {error.message}", "connection: close"]
    head += [f"{name.decode()}: {value.decode()}" for name, value in answer.raw_headers]
    return "\r\n".join([*head, "", ""]).encode() + bytes(answer.body)


_FULL = _whole(ApiError(503, "too many connections", code="unavailable"))
