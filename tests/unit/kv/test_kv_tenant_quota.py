"""The pages of an owner beyond its quota are evicted before anybody else's."""

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.core.identity import cache_namespace, divide_namespace
from headstart.core.layout import pages_for, reusable_len
from headstart.kv.cache import PageLease, PrefixCache
from tests.support.caches import PAGE, prompt

VICTIM, GREEDY = (cache_namespace(tenant_salt=salt) for salt in (b"victim", b"greedy"))


def lease(cache: PrefixCache, namespace: bytes, tokens: Int32Array) -> PageLease | None:
    match = cache.match(namespace, tokens, reusable_len(len(tokens), PAGE))
    return cache.try_lease(match, pages_for(len(tokens), PAGE) - match.num_pages)


def serve(cache: PrefixCache, namespace: bytes, tokens: Int32Array) -> int:
    """Run a sequence to its end and return how many of its pages were found."""
    held = lease(cache, namespace, tokens)
    assert held is not None
    found = held.num_shared
    cache.commit(held, tokens, len(tokens) - 1)
    cache.release(held)
    cache.check()
    return found


def fresh(seed: int, num_pages: int = 4) -> Int32Array:
    return prompt(num_pages * PAGE + 1, seed)


def found(cache: PrefixCache, namespace: bytes, tokens: Int32Array) -> int:
    return cache.match(namespace, tokens).num_pages


def test_a_flood_of_one_owners_prompts_leaves_the_pages_of_another_where_they_are() -> None:
    cache = PrefixCache(20, PAGE, owner_pages=10)
    serve(cache, VICTIM, fresh(0))
    for seed in range(1, 50):
        serve(cache, GREEDY, fresh(seed))
    assert serve(cache, VICTIM, fresh(0)) == 4


def test_without_quotas_the_same_flood_takes_everything() -> None:
    cache = PrefixCache(20, PAGE)
    serve(cache, VICTIM, fresh(0))
    for seed in range(1, 50):
        serve(cache, GREEDY, fresh(seed))
    assert serve(cache, VICTIM, fresh(0)) == 0


def test_parts_of_an_owners_cache_have_one_quota_together() -> None:
    cache = PrefixCache(20, PAGE, owner_pages=10)
    serve(cache, VICTIM, fresh(0))
    for seed in range(1, 50):
        serve(cache, divide_namespace(GREEDY, str(seed).encode()), fresh(1))
    assert serve(cache, VICTIM, fresh(0)) == 4


def test_an_owner_may_fill_a_pool_that_nobody_else_needs() -> None:
    cache = PrefixCache(20, PAGE, owner_pages=5)
    for seed in range(4):
        serve(cache, GREEDY, fresh(seed))
    assert [found(cache, GREEDY, fresh(seed)) for seed in range(4)] == [4, 4, 4, 4]


def test_what_an_owner_has_beyond_its_quota_goes_as_soon_as_another_needs_it_and_no_more_than_that() -> None:
    cache = PrefixCache(20, PAGE, owner_pages=10)
    for seed in range(4):
        serve(cache, GREEDY, fresh(seed))
    serve(cache, VICTIM, fresh(9))
    assert [found(cache, GREEDY, fresh(seed)) for seed in range(4)] == [3, 4, 4, 4]
    assert found(cache, VICTIM, fresh(9)) == 4


def test_requests_that_run_are_never_evicted_however_far_beyond_its_quota_their_owner_is() -> None:
    cache = PrefixCache(20, PAGE, owner_pages=2)
    running = [lease(cache, GREEDY, fresh(seed, num_pages=4)) for seed in range(4)]
    assert lease(cache, VICTIM, fresh(9)) is None
    pages = np.concatenate([held.pages for held in running if held is not None])
    assert len(set(pages.tolist())) == 20
    cache.check()


def test_a_request_that_runs_counts_for_the_quota_of_its_owner() -> None:
    cache = PrefixCache(16, PAGE, owner_pages=8)
    serve(cache, GREEDY, fresh(1))
    serve(cache, VICTIM, fresh(0))
    held = lease(cache, GREEDY, fresh(2, num_pages=7))
    assert held is not None
    extra = lease(cache, VICTIM, fresh(5, num_pages=3))
    assert extra is not None
    assert found(cache, VICTIM, fresh(0)) == 4
    assert found(cache, GREEDY, fresh(1)) == 0
    cache.check()


def test_a_flush_forgets_whose_pages_they_were() -> None:
    cache = PrefixCache(20, PAGE, owner_pages=4)
    for namespace in (GREEDY, VICTIM):
        serve(cache, namespace, fresh(1, num_pages=6))
    cache.flush()
    cache.check()
    serve(cache, GREEDY, fresh(2, num_pages=4))
    serve(cache, VICTIM, fresh(2, num_pages=15))
    assert found(cache, GREEDY, fresh(2, num_pages=4)) == 4
