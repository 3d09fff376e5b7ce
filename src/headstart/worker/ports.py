"""Addresses and security of a worker's sockets."""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from headstart.config.errors import ConfigError, require
from headstart.config.secret_files import read_secret
from headstart.config.settings import ClusterSettings, GatewaySettings
from headstart.wire.security import CurveKeys, Security, authenticate
from headstart.wire.sockets import Context, Wiring


@dataclass(frozen=True, slots=True)
class OpenWiring:
    """A process's ZeroMQ context, and who lets members in where the cluster has a key."""

    wiring: Wiring
    authenticator: ThreadAuthenticator | None

    def close(self) -> None:
        """Once every socket is closed: returns when their last messages have left or lingered out."""
        if self.authenticator is not None:
            self.authenticator.stop()
        self.wiring.context.term()


def open_wiring(settings: ClusterSettings) -> OpenWiring:
    """A ZeroMQ context that speaks CURVE where the cluster has a key. Raises ConfigError for a bad key file.

    All processes of a cluster hold one key pair: whoever has it is a member.
    """
    if not settings.cluster_key:
        return OpenWiring(Wiring(zmq.Context(), security=Security(insecure=settings.insecure_control)), None)
    public, secret = read_cluster_key(Path(settings.cluster_key))
    context: Context = zmq.Context()
    keys = CurveKeys(public, secret, server=public)
    return OpenWiring(Wiring(context, security=Security(keys)), authenticate(context, [public]))


def read_cluster_key(path: Path) -> tuple[bytes, bytes]:
    """The (public, secret) pair that `headstart key` wrote."""
    try:
        public, secret = read_secret(path, "--cluster-key").split()
        if zmq.curve_public(secret.encode()) != public.encode():
            raise ValueError("the two keys do not belong together")
    except ValueError as error:
        raise ConfigError(f"--cluster-key {path}: {error}") from error
    return public.encode(), secret.encode()


def new_cluster_key() -> str:
    """A fresh pair, one key a line."""
    public, secret = zmq.curve_keypair()
    return f"{public.decode()}\n{secret.decode()}\n"


def http_family(host: str) -> socket.AddressFamily:
    """IPv6 for an address of that kind, else IPv4."""
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        return False  # a name


def refuse_ipv6(host: str, flag: str) -> None:
    """Raise ConfigError: workers and gateway meet over IPv4, only clients may come over IPv6."""
    require(
        not is_ipv6(host), f"{flag} {host}: workers meet their gateway over IPv4 only; give an IPv4 address or a name"
    )


def control_url(join: str) -> str:
    """ZeroMQ's address for HOST:PORT; names become numbers, which the wire can tell from loopback. Raises ConfigError."""
    host, _, port = join.rpartition(":")
    refuse_ipv6(host, "--join")
    try:
        return f"tcp://{socket.gethostbyname(host)}:{int(port)}"
    except (OSError, ValueError) as error:
        raise ConfigError(f"--join {join}: {error}") from error


def control_bind_url(settings: GatewaySettings) -> str:
    """Where a gateway listens for its workers."""
    host = "*" if settings.control_host == "0.0.0.0" else settings.control_host
    return f"tcp://{host}:{settings.resolved_control_port}"


def peer_url(join: str) -> str:
    """Where a worker listens for its peers, without the port: the interface that leads to the gateway."""
    host, _, port = join.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing; asks the routing table
        return f"tcp://{probe.getsockname()[0]}"
