"""Who may talk to whom: CURVE between hosts, plain sockets only where the address cannot leave this one.

A cluster shares keys out of band. A binding side needs its own key pair and the public keys it lets in; a connecting
side its own pair and the public key of the side that binds. Keys are ZeroMQ's 40-character Z85 text.
"""

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator

from headstart.wire.errors import WireError

_DOMAIN = "headstart"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One process's keys."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""
    """Public key of the side that binds; needed to connect."""


@dataclass(frozen=True, slots=True)
class Security:
    """How a socket protects itself."""

    keys: CurveKeys | None = None
    insecure: bool = False
    """The operator's word that a plain socket may leave this host."""


def check_address(address: str, security: Security) -> None:
    """Raise WireError for an address that is malformed, or would leave this host unencrypted."""
    scheme, host = _split(address)
    if scheme == "tcp" and security.keys is None and not security.insecure and not is_loopback(host):
        raise WireError(f"{address} leaves this host: give CURVE keys, or allow insecure sockets")


def secure_binding(socket: "zmq.Socket[bytes]", security: Security) -> None:
    """Needs `authenticate` in the socket's context: without it every connection is refused."""
    if security.keys is None:
        return
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = security.keys.public, security.keys.secret
    socket.zap_domain = _DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_connecting(socket: "zmq.Socket[bytes]", security: Security) -> None:
    if security.keys is None:
        return
    if not security.keys.server:
        raise WireError("connecting with CURVE needs the public key of the side that binds")
    socket.curve_serverkey = security.keys.server
    socket.curve_publickey, socket.curve_secretkey = security.keys.public, security.keys.secret


class _Allowed:
    """What zmq.auth asks about every client that proved to own its key."""

    def __init__(self, keys: Collection[bytes]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def authenticate(context: "zmq.Context[zmq.Socket[bytes]]", allowed: Collection[bytes]) -> ThreadAuthenticator:
    """Let the owners of these public keys in, and nobody else. One per context, before any socket of it binds with
    CURVE; the caller stops it."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=_Allowed(allowed))
    return authenticator


def _split(address: str) -> tuple[str, str]:
    scheme, separator, rest = address.partition("://")
    if not separator or not rest or scheme not in ("tcp", "ipc", "inproc"):
        raise WireError(f"not an address of this cluster: {address!r}")
    if scheme != "tcp":
        return scheme, ""
    try:
        parts = urlsplit(address)
        port = rest.rpartition(":")[2]
        if port != "*" and not 0 <= int(port) <= 65535:
            raise WireError(f"no such port in {address!r}")
    except ValueError as error:
        raise WireError(f"malformed address {address!r}: {error}") from error
    return scheme, parts.hostname or ""


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name or "*": taken to leave this host, without asking a resolver
