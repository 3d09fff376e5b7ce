"""What becomes of a socket's connections, as ZeroMQ's own monitor tells: why nobody answers, and who is turned away.

Reading never blocks, and nor does ZeroMQ's thread where nobody reads: events queue without bound, a few dozen a second of
each connection that is tried again.
"""

from dataclasses import dataclass
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

Socket = zmq.Socket[bytes]

LinkState = Literal["unreached", "unanswered", "up"]
"""Nobody listens there; something listens but does not shake hands with us; connected."""

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_AFTER: dict[int, LinkState] = {
    zmq.EVENT_CONNECTED: "unanswered",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "unanswered",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "unanswered",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "unanswered",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "up",
    zmq.EVENT_CLOSED: "unreached",
}


@dataclass(slots=True)
class LinkWatch:
    """Of a connecting socket with one connection."""

    _monitor: Socket
    _state: LinkState = "unreached"

    @classmethod
    def of(cls, context: "zmq.Context[Socket]", socket: Socket) -> "LinkWatch":
        """Before it connects."""
        return cls(_monitor_of(context, socket, zmq.EVENT_DISCONNECTED | sum(_AFTER)))

    def state(self) -> LinkState:
        for event in _events(self._monitor):
            if event == zmq.EVENT_DISCONNECTED:  # also follows a failed handshake, and then says nothing new
                self._state = "unreached" if self._state == "up" else self._state
            else:
                self._state = _AFTER.get(event, self._state)
        return self._state

    def close(self) -> None:
        self._monitor.close(linger=0)


@dataclass(slots=True)
class RefusalWatch:
    """Of a binding socket."""

    _monitor: Socket

    @classmethod
    def of(cls, context: "zmq.Context[Socket]", socket: Socket) -> "RefusalWatch":
        """Before it binds."""
        return cls(_monitor_of(context, socket, _FAILED))

    def is_waiting(self, timeout_ms: int = 0) -> bool:
        """Whether `take` would find any, at the latest after `timeout_ms`."""
        return bool(self._monitor.poll(timeout_ms))

    def take(self) -> int:
        """Connections that failed to shake hands since the last call."""
        return len(_events(self._monitor))

    def close(self) -> None:
        self._monitor.close(linger=0)


def _monitor_of(context: "zmq.Context[Socket]", socket: Socket, events: int) -> Socket:
    address = f"inproc://monitor.{id(socket)}"
    socket.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


def _events(monitor: Socket) -> list[int]:
    found = []
    while monitor.poll(0):
        found.append(int(parse_monitor_message(monitor.recv_multipart())["event"]))
    return found
