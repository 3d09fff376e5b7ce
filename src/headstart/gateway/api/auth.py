"""Who is asking: bearer keys, and the cache namespace that belongs to each."""

import hashlib
import hmac
from dataclasses import dataclass

from headstart.core.identity import cache_namespace
from headstart.gateway.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class Tenant:
    """An authenticated caller. `salt` is empty where no keys are configured."""

    salt: bytes = b""

    def namespace(self, client_salt: str) -> bytes:
        """Of KV and remembered text. A client's own salt can only divide what its key already owns."""
        if not client_salt:
            return cache_namespace(tenant_salt=self.salt)
        divided = hashlib.sha256(b"headstart/client-salt/1" + len(self.salt).to_bytes(8, "little") + self.salt)
        divided.update(client_salt.encode("utf-8", "surrogatepass"))
        return cache_namespace(tenant_salt=divided.digest())


class KeyRing:
    """The keys that are let in; none: everybody is, as one tenant."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def authenticate(self, authorization: str) -> Tenant:
        """Raises ApiError 401. Compares with every key in constant time."""
        if not self._digests:
            return Tenant()
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(401, "give a valid API key: Authorization: Bearer KEY", code="invalid_api_key")
        return Tenant(hashlib.sha256(b"headstart/tenant/1" + given).digest())


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"headstart/api-key/1" + key.encode("utf-8", "surrogatepass")).digest()
