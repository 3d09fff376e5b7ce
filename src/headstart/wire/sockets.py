"""ZeroMQ sockets that speak messages: a Router binds and knows its peers by name, a Dealer connects and reconnects.

Nothing here blocks. A message to a peer whose queue is full, or that is not connected, is dropped, counted, and `send`
returns False: the caller treats that peer as lost, and the protocol's repeats repair what was only slow. A process
that reconnects under its old name takes the name over at once. Malformed frames are counted and skipped.

Not thread-safe: one thread owns a socket. For pollers use `socket`; asyncio: see `wire.aio`.
"""

from dataclasses import dataclass, field

import zmq

from headstart.core.messages import Message
from headstart.wire.channels import Channel
from headstart.wire.codec import Codec
from headstart.wire.errors import WireError
from headstart.wire.limits import WireLimits
from headstart.wire.security import Security, check_address, secure_binding, secure_connecting
from headstart.wire.watch import LinkWatch, RefusalWatch

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(slots=True)
class WireCounters:
    """Monotonic totals of one socket."""

    sent: int = 0
    received: int = 0
    malformed: int = 0
    dropped_full: int = 0
    dropped_unreachable: int = 0
    dropped_oversize: int = 0


@dataclass(frozen=True, slots=True)
class Wiring:
    """What every socket of a process shares."""

    context: Context
    limits: WireLimits = field(default_factory=WireLimits)
    security: Security = field(default_factory=Security)


class Router:
    """The binding side."""

    def __init__(self, socket: Socket, codec: Codec, limits: WireLimits) -> None:
        self.socket = socket
        self.counters = WireCounters()
        self.refusals: RefusalWatch | None = None
        self._codec = codec
        self._limits = limits

    @classmethod
    def bind(cls, wiring: Wiring, address: str, receives: Channel, *, watches: bool = False) -> "Router":
        """`tcp://127.0.0.1:0` takes a free port; see `address`. `watches`: have `refusals`. Raises WireError."""
        check_address(address, wiring.security)
        socket = wiring.context.socket(zmq.ROUTER)
        try:
            _bound(socket, wiring.limits, address)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # unreachable and full peers are errors, not silence
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            secure_binding(socket, wiring.security)
            refusals = RefusalWatch.of(wiring.context, socket) if watches else None
            socket.bind(address)
        except (zmq.ZMQError, WireError) as error:
            socket.close(linger=0)
            raise WireError(f"cannot bind {address}: {error}") from error
        router = cls(socket, Codec(receives, wiring.limits), wiring.limits)
        router.refusals = refusals
        return router

    @property
    def address(self) -> str:
        """Where the socket is bound, with its real port."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, recipient: str, message: Message) -> bool:
        return _send(self, [recipient.encode()], message)

    def drain(self) -> list[tuple[str, Message]]:
        """What has arrived, as (sender, message), at most a batch of it; `pending` says whether more waits."""
        return [(sender, message) for (sender,), message in _drain(self, self._limits.batch_len, num_names=1)]

    @property
    def pending(self) -> bool:
        return _is_readable(self.socket)

    @property
    def codec(self) -> Codec:
        return self._codec

    def fileno(self) -> int:
        """ZeroMQ's descriptor. Edge-triggered: after it fired, and after each send, drain until nothing is pending."""
        return int(self.socket.getsockopt(zmq.FD))

    def close(self) -> None:
        self.socket.close()
        if self.refusals is not None:
            self.refusals.close()


class Dealer:
    """The connecting side. Dials again by itself for as long as it is open."""

    def __init__(self, socket: Socket, codec: Codec, limits: WireLimits) -> None:
        self.socket = socket
        self.counters = WireCounters()
        self.link: LinkWatch | None = None
        self._codec = codec
        self._limits = limits

    @classmethod
    def connect(
        cls, wiring: Wiring, address: str, identity: str, receives: Channel, *, watches: bool = False
    ) -> "Dealer":
        """`identity` is the name the Router sees: 1 to 255 bytes of text. The Router need not exist yet. `watches`: have
        a `link`. Raises WireError."""
        check_address(address, wiring.security)
        name = identity.encode()
        if not 1 <= len(name) <= 255 or name[0] == 0:
            raise WireError(f"not a name: {identity!r}")
        socket = wiring.context.socket(zmq.DEALER)
        try:
            _bound(socket, wiring.limits, address)
            socket.setsockopt(zmq.IDENTITY, name)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            secure_connecting(socket, wiring.security)
            link = LinkWatch.of(wiring.context, socket) if watches else None
            socket.connect(address)
        except (zmq.ZMQError, WireError) as error:
            socket.close(linger=0)
            raise WireError(f"cannot connect to {address}: {error}") from error
        dealer = cls(socket, Codec(receives, wiring.limits), wiring.limits)
        dealer.link = link
        return dealer

    def send(self, message: Message) -> bool:
        """Queues while the Router is away, up to the queue's length."""
        return _send(self, [], message)

    def drain(self) -> list[Message]:
        """What has arrived, at most a batch of it; `pending` says whether more waits."""
        return [message for _, message in _drain(self, self._limits.batch_len, num_names=0)]

    @property
    def pending(self) -> bool:
        return _is_readable(self.socket)

    @property
    def codec(self) -> Codec:
        return self._codec

    def close(self) -> None:
        self.socket.close()
        if self.link is not None:
            self.link.close()


def _bound(socket: Socket, limits: WireLimits, address: str) -> None:
    ping_ms = round(limits.heartbeat_s * 1000)
    for option, value in (
        (zmq.MAXMSGSIZE, limits.max_message_bytes),
        (zmq.SNDHWM, limits.queue_len),
        (zmq.RCVHWM, limits.queue_len),
        (zmq.LINGER, round(limits.linger_s * 1000)),  # endless by default: a dead peer would hold up our exit
        (zmq.HEARTBEAT_IVL, ping_ms),
        (zmq.HEARTBEAT_TIMEOUT, 3 * ping_ms),
        (zmq.IPV6, int("[" in address)),  # always on, it would report IPv4 addresses in their mapped form
    ):
        socket.setsockopt(option, value)


def _send(wire: Router | Dealer, prefix: list[bytes], message: Message) -> bool:
    try:
        payload = wire.codec.encode(message)
    except WireError:
        wire.counters.dropped_oversize += 1
        return False
    try:
        wire.socket.send_multipart([*prefix, payload], flags=zmq.NOBLOCK)
    except zmq.Again:
        wire.counters.dropped_full += 1
        return False
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        wire.counters.dropped_unreachable += 1
        return False
    wire.counters.sent += 1
    return True


def _drain(wire: Router | Dealer, limit: int, num_names: int) -> list[tuple[list[str], Message]]:
    """At most `limit` of what has arrived: the names in front of each message, and the message."""
    messages: list[tuple[list[str], Message]] = []
    for _ in range(limit):
        try:
            frames = wire.socket.recv_multipart(flags=zmq.NOBLOCK)
        except zmq.Again:
            break
        try:
            if len(frames) != num_names + 1:
                raise WireError(f"{len(frames)} frames")
            messages.append(([name.decode() for name in frames[:-1]], wire.codec.decode(frames[-1])))
        except ValueError:  # also WireError and a name that is not text
            wire.counters.malformed += 1
    wire.counters.received += len(messages)
    return messages


def _is_readable(socket: Socket) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
