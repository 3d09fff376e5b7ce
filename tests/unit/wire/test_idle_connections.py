"""A connection that something between the hosts forgot, as address translators do with idle ones: no word to either end."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from headstart.core.messages import Accepted, Drain
from headstart.core.request import ChoiceRef
from headstart.wire.channels import FROM_WORKER, TO_WORKER
from headstart.wire.limits import WireLimits
from headstart.wire.sockets import Dealer, Router, Wiring
from tests.support.steady import PATIENCE_MS, PATIENCE_S

LIMITS = WireLimits(heartbeat_s=0.3)


class Relay:
    """Carries bytes between a dealer and a router until it forgets the connections that it has; new ones it carries."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._partner: dict[socket.socket, socket.socket] = {}
        self._forgotten: list[socket.socket] = []
        self._stopped = False
        self.num_connections = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def forget(self) -> int:
        """From now on nothing of the open connections is carried, and neither end is told. How many there have been."""
        partner, self._partner = self._partner, {}
        self._forgotten += partner
        return self.num_connections

    def close(self) -> None:
        self._stopped = True
        self._thread.join()
        for end in (self._listener, *self._partner, *self._forgotten):
            end.close()

    def _run(self) -> None:
        while not self._stopped:
            partner = self._partner
            for ready in select.select([self._listener, *partner], [], [], 0.01)[0]:
                if ready is self._listener:
                    self._connect()
                elif data := _received(ready):
                    with suppress(OSError):  # an end that was held up may have been given up by the other
                        partner[ready].sendall(data)
                else:
                    for end in (ready, partner[ready]):
                        self._partner.pop(end, None)
                        end.close()
                    break

    def _connect(self) -> None:
        near, far = self._listener.accept()[0], socket.create_connection(self._target)
        self._partner = {**self._partner, near: far, far: near}
        self.num_connections += 1


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.behaviour("E16")
def test_the_first_message_after_an_idle_connection_was_forgotten_arrives(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    wiring = Wiring(context, LIMITS)
    router = Router.bind(wiring, "tcp://127.0.0.1:0", FROM_WORKER)
    relay = Relay(("127.0.0.1", int(router.address.rpartition(":")[2])))
    dealer = Dealer.connect(wiring, f"tcp://127.0.0.1:{relay.port}", "decode-0#1", TO_WORKER)
    try:
        dealer.send(Accepted(ChoiceRef("before")))
        assert router.socket.poll(PATIENCE_MS)
        assert len(router.drain()) == 1
        num_forgotten = relay.forget()
        deadline = time.monotonic() + PATIENCE_S
        while relay.num_connections == num_forgotten:  # idle: only the sockets' own pings are missing
            assert time.monotonic() < deadline, "nobody redialled"
            assert not dealer.socket.poll(20)
        assert dealer.send(Accepted(ChoiceRef("after")))
        assert router.socket.poll(PATIENCE_MS), "the first message"
        assert [message.ref.request_id for _, message in router.drain()] == ["after"]  # type: ignore[attr-defined]
        assert router.send("decode-0#1", Drain())
        assert dealer.socket.poll(PATIENCE_MS), "and its answer"
    finally:
        relay.close()
