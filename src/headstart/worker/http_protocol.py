"""uvicorn's HTTP/1.1, with bounds on clients that open connections and say nothing.

    waiting ─whole head of a request─► asked ─answered─► waiting (uvicorn's keep-alive bounds the silence between)
       │                                └─answered before its body was whole─► late ─whole body─► waiting
       └─too long over one head─► closed                                        └─too long over the rest─► closed

A connection beyond the last that there is room for is answered 503 and closed.
"""

import asyncio
import resource
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headstart.gateway.api.errors import ApiError, error_response

SPARE_DESCRIPTORS = 128
"""For everything but clients: workers' sockets, logs, models."""


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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.write(_FULL)
            transport.close()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._reading is not None:
            self._reading.cancel()
        super().connection_lost(exc)

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
