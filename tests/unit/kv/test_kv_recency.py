"""Whoever was used last is evicted last."""

from headstart.kv.cache import PrefixCache
from tests.support.caches import NAMESPACE, PAGE, admit, prompt, serve


def test_a_prefix_that_was_used_again_outlives_one_that_was_not() -> None:
    cache = PrefixCache(8, PAGE)
    first, second = prompt(3 * PAGE + 1, seed=1), prompt(3 * PAGE + 1, seed=2)
    serve(cache, first)
    serve(cache, second)
    assert serve(cache, first) == 3 * PAGE
    cache.make_room(5)
    cache.check()
    assert cache.match(NAMESPACE, first).num_pages == 3
    assert cache.match(NAMESPACE, second).num_pages == 0


def test_a_use_counts_from_its_end() -> None:
    cache = PrefixCache(8, PAGE)
    first, second = prompt(3 * PAGE + 1, seed=1), prompt(3 * PAGE + 1, seed=2)
    serve(cache, first)
    lease = admit(cache, first)
    serve(cache, second)
    cache.release(lease)
    cache.make_room(5)
    assert cache.match(NAMESPACE, first).num_pages == 3
