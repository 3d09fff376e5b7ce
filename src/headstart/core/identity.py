"""What makes two KV pages interchangeable.

A page may be reused only where the model, the KV's dtype and layout, the adapter, the tenant and every token before
its end agree. The first two are compared once per pair of workers (`KVSpec`), the middle two form the cache namespace,
the tokens are the path in the radix tree.
"""

import hashlib

from msgspec import Struct

PROTOCOL_VERSION = 1
OWNER_BYTES = 16


class KVSpec(Struct, frozen=True):
    """Everything both ends of a transfer must agree on. Compared at connect, field by field."""

    protocol_version: int
    model_fingerprint: str
    page_size: int
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: str

    def page_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one page, all layers, K and V."""
        return self.num_layers * 2 * self.num_kv_heads * self.page_size * self.head_dim * dtype_bytes


def first_mismatch(ours: KVSpec, theirs: KVSpec) -> str | None:
    """Name the first field that differs with both values, or None when the specs agree."""
    if ours == theirs:
        return None
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in KVSpec.__struct_fields__)
    return next(f"{name} differs: {mine!r} here, {other!r} there" for name, mine, other in pairs if mine != other)


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
