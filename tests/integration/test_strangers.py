"""Case M3: bytes from nobody in particular, sent straight to the ports of gateway and workers, stop no process."""

import pickle
import socket
from contextlib import suppress
from random import Random
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq
from cluster import Cluster

REQUEST = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}'
NOISE = (REQUEST, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", b"\x00" * 64, pickle.dumps({"prompt": [1]}))
"""A probe meant for an HTTP server, what a browser might send, and a pickle."""


def ports(cluster: Cluster) -> list[int]:
    """Every TCP port that a process of the cluster takes messages at."""
    addresses = [worker["peer_address"] for worker in cluster.living() if worker["role"] == "prefill"]
    peers = [urlsplit(address).port for address in addresses if address.startswith("tcp://")]
    return [cluster.port, cluster.control_port, *(port for port in peers if port)]


def incarnations(cluster: Cluster) -> dict[str, int]:
    return {worker["name"]: worker["incarnation"] for worker in cluster.living()}


def shout(port: int, payload: bytes) -> None:
    """The port may hang up as soon as it has seen enough."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as line, suppress(OSError):
        line.sendall(payload)
        line.shutdown(socket.SHUT_WR)


def dial(context: zmq.Context, address: str) -> None:
    """Speak the sockets' own protocol without a key, in frames that are no message of ours."""
    with context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.IDENTITY, b"decode-0#1")
        line.setsockopt(zmq.LINGER, 100)
        line.connect(address)
        for frame in (b"", b"\xff" * 100, msgspec.msgpack.encode({"type": "Prefill"}), pickle.dumps([1])):
            line.send(frame)
        line.poll(100)


@pytest.mark.behaviour("M3")
def test_noise_at_every_port_costs_no_process_and_no_request(remote: Cluster) -> None:
    before = incarnations(remote)
    rng = Random(7)
    open_ports = ports(remote)
    assert len(open_ports) >= 3, "gateway, control and a prefill worker's peer port"
    for port in open_ports:
        for payload in (*NOISE, rng.randbytes(5000)):
            shout(port, payload)
    with zmq.Context() as context:
        for port in open_ports[1:]:
            dial(context, f"tcp://127.0.0.1:{port}")
    answer = remote.complete([rng.randrange(100, 40_000) for _ in range(50)], 4)
    assert len(answer["choices"][0]["token_ids"]) == 4
    assert answer["usage"]["headstart"]["bytes_moved"] > 0
    assert incarnations(remote) == before
