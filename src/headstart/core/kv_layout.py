"""What one page of KV consists of: the only place that knows its shape, its bytes and their order.

A pool is one block of memory, page first. Within a page the order is

    [kv_head, layer, part, token, dim]          parts: K, then V

so all layers of a page lie together (one page is one descriptor of a transfer), and a range of heads of a page is one
run of bytes, whatever part of the heads either side of a transfer holds. A kernel sees one layer's K or V as a strided
view `[pages, kv_heads, page, dim]`, of which the last two dimensions are contiguous.

The type can name more than is built: several groups of layers, other spans, parts of different widths. `only_group`
refuses what nothing can store yet.
"""

import hashlib
import math
from typing import NamedTuple

import msgspec
from msgspec import Struct

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "uint8": 1,
    "uint64": 8,
}
"""Bytes of one stored number, by the name of its type."""

FULL = "full"


class Part(Struct, frozen=True):
    """One array of each layer: keys or values."""

    name: str
    heads: int
    dim: int  # elements of one head and token
    dtype: str  # a key of DTYPE_BYTES


class PageGroup(Struct, frozen=True):
    """Layers whose KV lives in the same pages."""

    num_layers: int
    parts: tuple[Part, ...]
    span: str = FULL  # positions that a query reads: all before it


class HeadRange(NamedTuple):
    """Where some heads of a page lie, in bytes from its beginning."""

    offset: int
    num_bytes: int


class KVLayout(Struct, frozen=True):
    """Pages of `page_size` tokens. Equal layouts are interchangeable byte for byte."""

    page_size: int
    groups: tuple[PageGroup, ...]

    @classmethod
    def full(cls, page_size: int, num_layers: int, kv_heads: int, head_dim: int, dtype: str) -> "KVLayout":
        """One group of layers that all keep the KV of every token, keys and values alike."""
        parts = (Part("k", kv_heads, head_dim, dtype), Part("v", kv_heads, head_dim, dtype))
        return cls(page_size, (PageGroup(num_layers, parts),))

    @property
    def only_group(self) -> PageGroup:
        """The one group of full attention. Raises ValueError for any other layout: it is not built."""
        if len(self.groups) != 1:
            raise ValueError(f"KV of {len(self.groups)} groups of layers is not built")
        group = self.groups[0]
        kinds = {(part.heads, part.dim, part.dtype) for part in group.parts}
        if group.span != FULL or [part.name for part in group.parts] != ["k", "v"] or len(kinds) != 1:
            raise ValueError(f"KV of a {group.span} span with parts {group.parts} is not built")
        return group

    @property
    def dtype(self) -> str:
        return self.only_group.parts[0].dtype

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """`[kv_heads, layers, parts, page_size, head_dim]`, contiguous."""
        group = self.only_group
        key = group.parts[0]
        return (key.heads, group.num_layers, len(group.parts), self.page_size, key.dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers, K and V."""
        of_token = (
            group.num_layers * part.heads * part.dim * DTYPE_BYTES[part.dtype]
            for group in self.groups
            for part in group.parts
        )
        return self.page_size * sum(of_token)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in the pool."""
        return self.page_bytes // self.page_size

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """Sizes of a pool's tensor, `[num_pages, kv_heads, layers, parts, page_size, head_dim]`."""
        return (num_pages, *self.page_shape)

    def strides(self) -> tuple[int, ...]:
        """Of that tensor, in elements."""
        shape = self.page_shape
        return tuple(math.prod(shape[i:]) for i in range(len(shape) + 1))

    def head_range(self, first: int, count: int) -> HeadRange:
        """Where heads [first, first + count) of a page lie: one run. Raises ValueError past the last head."""
        heads = self.page_shape[0]
        if not 0 <= first < first + count <= heads:
            raise ValueError(f"heads [{first}, {first + count}) of {heads}")
        head_bytes = self.page_bytes // heads
        return HeadRange(first * head_bytes, count * head_bytes)

    @property
    def fingerprint(self) -> str:
        """Hex digest that equal layouts share, on any host."""
        return hashlib.sha256(b"headstart/kv-layout/1" + msgspec.msgpack.encode(self)).hexdigest()

    def described(self) -> dict[str, object]:
        """The layout by the names that settings and messages use, for logs and comparison."""
        found: dict[str, object] = {"page_size": self.page_size, "num_groups": len(self.groups)}
        for i, group in enumerate(self.groups):
            where = f"group_{i}." if len(self.groups) > 1 else ""
            found |= {f"{where}num_layers": group.num_layers, f"{where}span": group.span}
            found[f"{where}parts"] = ", ".join(part.name for part in group.parts)
            found[f"{where}kv_dtype"] = _of_parts([part.dtype for part in group.parts])
            found[f"{where}num_kv_heads"] = _of_parts([part.heads for part in group.parts])
            found[f"{where}head_dim"] = _of_parts([part.dim for part in group.parts])
        return found

    def first_mismatch(self, other: "KVLayout") -> str | None:
        """Name the first property that differs, with both values; None if the layouts are equal."""
        if self == other:
            return None
        ours, theirs = self.described(), other.described()
        names = list(dict.fromkeys((*ours, *theirs)))
        return next(
            differing(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)
        )


def differing(name: str, ours: object, theirs: object) -> str:
    """One sentence about a property that two workers do not share."""
    return f"{name} differs: {ours!r} here, {theirs!r} there"


def _of_parts(values: list[str] | list[int]) -> str | int:
    """One value if all parts have it, else all of them."""
    return values[0] if len(set(values)) == 1 else ", ".join(map(str, values))
