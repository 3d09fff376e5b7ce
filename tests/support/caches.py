"""A small cache and its callers, as schedulers use it."""

import numpy as np

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.identity import cache_namespace
from headstart.core.layout import pages_for, reusable_len
from headstart.kv.cache import PageCounts, PageLease, PrefixCache

NAMESPACE = cache_namespace()
PAGE = 8


def prompt(num_tokens: int, seed: int = 0) -> Int32Array:
    return int32_array(np.random.default_rng(seed).integers(1000, size=num_tokens, dtype=np.int32))


def joined(*parts: Int32Array) -> Int32Array:
    return int32_array(np.concatenate(parts))


def admit(cache: PrefixCache, tokens: Int32Array, num_spare: int = 0) -> PageLease:
    """Lease a prompt as a scheduler does: match all but its last token, allocate the rest."""
    match = cache.match(NAMESPACE, tokens, reusable_len(len(tokens), cache.page_size))
    lease = cache.try_lease(match, pages_for(len(tokens), cache.page_size) - match.num_pages + num_spare)
    assert lease is not None
    return lease


def serve(cache: PrefixCache, tokens: Int32Array) -> int:
    """Run a sequence to its end and return how many of its tokens were found. The last one never gets KV."""
    lease = admit(cache, tokens)
    found = lease.num_shared * cache.page_size
    cache.commit(lease, tokens, len(tokens) - 1)
    cache.release(lease)
    cache.check()
    return found


def clean(cache: PrefixCache) -> None:
    """Nothing is owned but by the tree, and a flush empties that."""
    cache.check()
    counts = cache.counts()
    assert (counts.inflight, counts.private, counts.pinned) == (0, 0, 0)
    assert cache.flush() == counts.cached
    assert cache.counts() == PageCounts(0, 0, 0, 0, cache.num_pages)
    cache.check()
