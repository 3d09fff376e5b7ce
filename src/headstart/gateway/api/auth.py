"""Who is asking: bearer keys, the cache namespace that belongs to each, and the one key that may operate the server."""

import hashlib
import hmac
from dataclasses import dataclass

from headstart.core.identity import cache_namespace, divide_namespace
from headstart.gateway.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class Tenant:
    """An authenticated caller. `salt` is empty if no keys are configured."""

    salt: bytes = b""

    def namespace(self, client_salt: str) -> bytes:
        """Of KV and remembered text. A client's own salt can only divide what its key already owns, and its quota."""
        own = cache_namespace(tenant_salt=self.salt)
        return divide_namespace(own, client_salt.encode("utf-8", "surrogatepass")) if client_salt else own


class KeyRing:
    """The keys that are let in; none: everybody is, as one tenant.

    `admin_key` may operate the server, and is let in like any other. If it is empty nobody operates it, unless no
    keys are configured at all and only this machine can ask (`is_local`): then everybody may.
    """

    def __init__(self, keys: tuple[str, ...], admin_key: str = "", *, is_local: bool = True) -> None:
        self._digests = tuple(_digest(key) for key in keys)
        self._admin = _digest(admin_key) if admin_key else None
        self._is_open = not keys and not admin_key and is_local

    @property
    def asks_for_keys(self) -> bool:
        return bool(self._digests)

    @property
    def asks_for_admin_key(self) -> bool:
        return not self._is_open

    def authenticate(self, authorization: str) -> Tenant:
        """Raises ApiError 401."""
        if not self._digests:
            return Tenant()
        given = _bearer(authorization)
        if not (self._is_admin(given) or self._is_client(given)):
            raise _unknown("a valid API key")
        return Tenant(hashlib.sha256(b"headstart/tenant/1" + given).digest())

    def authorize(self, authorization: str) -> None:
        """Let through whoever may operate the server. Raises ApiError 401, or 403 for a key that may not."""
        if self._is_open:
            return
        given = _bearer(authorization)
        if self._is_admin(given):
            return
        nobody_may = self._admin is None and not self._digests
        if nobody_may or self._is_client(given):
            raise ApiError(403, "this needs the admin key (--admin-key-file)", code="admin_key_needed")
        raise _unknown("the admin key (--admin-key-file)")

    def _is_client(self, given: bytes) -> bool:
        """Compares with every key, in a time that does not depend on how much of one agrees."""
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(known)

    def _is_admin(self, given: bytes) -> bool:
        return self._admin is not None and hmac.compare_digest(given, self._admin)


def _bearer(authorization: str) -> bytes:
    """Digest of the key that a header gives; of no key, and nobody's, if it gives none."""
    scheme, _, key = authorization.partition(" ")
    return _digest(key.strip()) if scheme.lower() == "bearer" else b""


def _unknown(wanted: str) -> ApiError:
    return ApiError(401, f"give {wanted}: Authorization: Bearer KEY", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"headstart/api-key/1" + key.encode("utf-8", "surrogatepass")).digest()
