"""PrefixCache: the one place that hands out, shares and takes back KV pages.

STATUS: interface agreed on; the kv package implements it.
"""

from dataclasses import dataclass

from headstart.core.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; they add up to the pool."""

    inflight: int  # a ticket covers it, or no lease holds it and a launched step may still touch it
    private: int  # one lease
    pinned: int  # in the tree, k >= 1 leases
    cached: int  # in the tree, no lease
    free: int


class Match:
    """What the cache holds of a prompt when it was asked. Holds nothing; may be stale by the time it is leased."""

    num_pages: int
    prefix_len: int  # num_pages * page_size


class PageLease:
    """Right to a sequence's pages until released. Pages come in position order."""

    pages: Int32Array  # page table, shared pages first; a fresh array after every change, never edited in place
    num_shared: int  # leading pages that are in the tree and pinned by this lease
    namespace: bytes


class PrefixCache:
    """Radix cache over a pool of `num_pages` pages of `page_size` tokens."""

    def __init__(self, num_pages: int, page_size: int) -> None: ...

    def match(self, namespace: bytes, tokens: Int32Array, max_len: int | None = None) -> Match:
        """Longest committed prefix of `tokens[:max_len]`, in whole pages. Pure: changes nothing, not even LRU order."""

    def num_available(self, match: Match | None = None) -> int:
        """Pages `try_lease(match, n)` could take beyond the match: free plus evictable, without the match's own."""

    def try_lease(self, match: Match, num_new: int) -> PageLease | None:
        """Pin the match and allocate `num_new` pages behind it, evicting if needed; all or nothing."""

    def try_extend(self, lease: PageLease, num_new: int) -> bool:
        """Append `num_new` private pages; all or nothing."""

    def try_replace(self, lease: PageLease, first: int, count: int) -> bool:
        """Give private pages [first, first + count) of the lease up for fresh ones; all or nothing."""

    def make_room(self, num_pages: int) -> int:
        """Evict in one pass until `num_pages` are free, if possible. Returns pages now free."""

    def commit(self, lease: PageLease, tokens: Int32Array, num_tokens: int) -> int:
        """Insert the lease's whole pages of `tokens[:num_tokens]` into the tree. Where the tree already has a page the
        lease is remapped to it and its own copy given up. Returns the number of pages remapped; a strict no-op where
        nothing new is whole."""

    def release(self, lease: PageLease) -> None:
        """Unpin shared pages, give private ones up. Exactly once per lease."""

    def open_write(self, pages: Int32Array) -> None:
        """A peer may write these pages from now on (its ticket owns them)."""

    def close_write(self, pages: Int32Array) -> None:
        """The peer's word, or proof of its end, that it writes these no more."""

    def hold(self, pages: Int32Array) -> None:
        """A launched step or an open transfer handle may touch these pages, whoever leases them."""

    def unhold(self, pages: Int32Array) -> None: ...

    def flush(self) -> int:
        """Drop every unpinned page from the tree; returns how many."""

    def counts(self) -> PageCounts: ...

    def check(self) -> None:
        """Raise InvariantError unless every page's owner set, the tree's pins and the free list agree."""
