"""What makes two KV pages interchangeable.

A page may be reused only where the model, the KV's dtype and layout, the adapter, the tenant and every token before
its end agree. The first two are compared once per pair of workers (`KVSpec`), the middle two form the cache namespace,
the tokens are the path in the radix tree.
"""

import hashlib

from msgspec import Struct

from headstart.core.kv_layout import KVLayout, differing

PROTOCOL_VERSION = 2
OWNER_BYTES = 16


class KVSpec(Struct, frozen=True):
    """Everything both ends of a transfer must agree on. Compared at connect, field by field."""

    protocol_version: int
    model_fingerprint: str
    rope: str
    layout: KVLayout

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    def described(self) -> dict[str, object]:
        """All that is compared, and the bytes of a page, by the names that messages use."""
        own: dict[str, object] = {
            "protocol_version": self.protocol_version,
            "model_fingerprint": self.model_fingerprint,
            "rope": self.rope,
        }
        return own | self.layout.described() | {"page_bytes": self.layout.page_bytes}


def first_mismatch(ours: KVSpec, theirs: KVSpec) -> str | None:
    """Name the first field that differs with both values, or None if the specs agree."""
    for name in ("protocol_version", "model_fingerprint", "rope"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return differing(name, mine, other)
    return ours.layout.first_mismatch(theirs.layout)


def cache_namespace(adapter: str = "", tenant_salt: bytes = b"") -> bytes:
    """Digest that keeps adapters and tenants apart in every cache: sha256 over typed, length-prefixed parts.

    Stable across processes, hosts and Python versions.
    """
    digest = hashlib.sha256(b"headstart/cache-namespace/1")
    for kind, part in ((b"adapter", adapter.encode()), (b"tenant", tenant_salt)):
        digest.update(kind + len(part).to_bytes(8, "little") + part)
    return digest.digest()


def cache_owner(namespace: bytes) -> bytes:
    """Whose namespace it is: what `divide_namespace` keeps. Quotas count by it."""
    return namespace[:OWNER_BYTES]


def divide_namespace(namespace: bytes, part: bytes) -> bytes:
    """A namespace of the same owner that shares nothing with the undivided one or with another part."""
    digest = hashlib.sha256(b"headstart/cache-part/1" + len(namespace).to_bytes(8, "little") + namespace + part)
    return cache_owner(namespace) + digest.digest()[:OWNER_BYTES]
