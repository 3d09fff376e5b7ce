"""Where a KV pool lies in memory, in plain integers: what transfer backends and the pool agree on.

What a page holds is the business of `core.kv_layout`.
"""

from msgspec import Struct


class PoolRegion(Struct, frozen=True):
    """A contiguous KV pool. Page `i` is the `page_bytes` bytes at `address + i * page_bytes`."""

    address: int
    num_pages: int
    page_bytes: int
    device: str = "cpu"


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens (the last may be partial)."""
    return -(-num_tokens // page_size)


def page_floor(num_tokens: int, page_size: int) -> int:
    """The largest multiple of `page_size` that is <= `num_tokens`."""
    return num_tokens // page_size * page_size


def reusable_len(prompt_len: int, page_size: int) -> int:
    """Most tokens of a prompt that may come from a cache: whole pages, and never the last token.

    The last prompt token always runs on the decode worker, as the request's first decode row.
    """
    return page_floor(max(prompt_len - 1, 0), page_size)
