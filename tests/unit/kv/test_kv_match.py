"""Matching: what is found of a prompt, and that nothing else ever is."""

from collections.abc import Callable, Iterator

import pytest

from headstart.core.arrays import EMPTY
from headstart.core.identity import cache_namespace
from headstart.kv.cache import PrefixCache
from tests.support.caches import NAMESPACE, PAGE, admit, clean, joined, prompt, serve


@pytest.mark.behaviour("4")
def test_a_prompt_shorter_than_a_page_never_hits() -> None:
    cache = PrefixCache(10, PAGE)
    assert [serve(cache, prompt(PAGE - 1)) for _ in range(3)] == [0, 0, 0]
    assert cache.counts().cached == 0
    clean(cache)


@pytest.mark.behaviour("5")
def test_a_match_is_floored_to_whole_pages() -> None:
    cache = PrefixCache(30, PAGE)
    serve(cache, prompt(10 * PAGE + 5))
    match = cache.match(NAMESPACE, joined(prompt(10 * PAGE + 5), prompt(20, seed=1)))
    assert (match.num_pages, match.prefix_len) == (10, 10 * PAGE)
    assert cache.match(NAMESPACE, prompt(10 * PAGE + 5), max_len=4 * PAGE - 1).num_pages == 3
    assert cache.match(NAMESPACE, prompt(10 * PAGE + 5), max_len=0).num_pages == 0


@pytest.mark.behaviour("6")
def test_prompts_that_share_three_pages_and_two_tokens_share_three_pages() -> None:
    cache = PrefixCache(30, PAGE)
    common = prompt(3 * PAGE + 2)
    assert serve(cache, joined(common, prompt(20, seed=1))) == 0
    assert serve(cache, joined(common, prompt(20, seed=2))) == 3 * PAGE
    clean(cache)


@pytest.mark.behaviour("7")
def test_the_next_turn_hits_prompt_and_output_but_the_last_token() -> None:
    cache = PrefixCache(60, PAGE)
    turn = prompt(12 * PAGE + 4 + 4)  # prompt and output: 13 pages exactly
    serve(cache, turn)
    assert serve(cache, joined(turn, prompt(30, seed=1))) == (len(turn) - 1) // PAGE * PAGE == 12 * PAGE
    clean(cache)


def test_a_prompt_of_whole_pages_repeated_hits_all_but_its_last_page() -> None:
    cache = PrefixCache(30, PAGE)
    assert [serve(cache, prompt(10 * PAGE)) for _ in range(2)] == [0, 9 * PAGE]


def test_a_match_changes_nothing_and_not_even_who_is_evicted_next() -> None:
    cache = PrefixCache(4, PAGE)
    old, young = prompt(2 * PAGE + 1, seed=1)[: 2 * PAGE], prompt(2 * PAGE, seed=2)
    for tokens in (old, young):
        lease = admit(cache, tokens)
        cache.commit(lease, tokens, len(tokens))
        cache.release(lease)
    before = cache.counts()
    assert cache.match(NAMESPACE, old).num_pages == 2
    assert cache.counts() == before
    cache.make_room(2)
    assert cache.match(NAMESPACE, old).num_pages == 0
    assert cache.match(NAMESPACE, young).num_pages == 2


@pytest.mark.parametrize(
    "other",
    [cache_namespace(adapter="a"), cache_namespace(tenant_salt=b"a"), cache_namespace(adapter="a", tenant_salt=b"b")],
)
@pytest.mark.behaviour("14", "K3", "K4", "K8")
def test_namespaces_never_cross(other: bytes) -> None:
    cache = PrefixCache(20, PAGE)
    serve(cache, prompt(5 * PAGE))
    assert cache.match(NAMESPACE, prompt(5 * PAGE)).num_pages == 4
    assert cache.match(other, prompt(5 * PAGE)).num_pages == 0


@pytest.mark.behaviour("K2")
def test_a_reloaded_adapter_has_a_namespace_of_its_own() -> None:
    assert cache_namespace(adapter="poet@1") != cache_namespace(adapter="poet@2")
    assert cache_namespace(adapter="ab", tenant_salt=b"c") != cache_namespace(adapter="a", tenant_salt=b"bc")


@pytest.mark.behaviour("K1")
def test_a_namespace_is_the_same_in_every_process() -> None:
    """The digest was computed by another process: nothing of one (hash seed, address, version) goes into it."""
    digest = cache_namespace(adapter="a", tenant_salt=b"b").hex()
    assert digest == "a94a4df9418a5ec663fda5d28ab1adadee8030ab25dfae1b4518ce419ffad775"


@pytest.mark.behaviour("K6")
def test_a_flush_leaves_nothing_to_match_in_any_namespace() -> None:
    cache = PrefixCache(20, PAGE)
    serve(cache, prompt(5 * PAGE))
    other = cache.try_lease(cache.match(b"other", EMPTY), 2)
    assert other is not None
    cache.commit(other, prompt(2 * PAGE), 2 * PAGE)
    cache.release(other)
    assert cache.flush() == 6
    assert cache.match(NAMESPACE, prompt(5 * PAGE)).num_pages == cache.match(b"other", prompt(5 * PAGE)).num_pages == 0


class SameHash(bytes):
    """A key that collides with every other."""

    def __hash__(self) -> int:
        return 0


@pytest.mark.behaviour("K9")
def test_a_hash_collision_reuses_nothing() -> None:
    cache = PrefixCache(40, 1)
    for seed in range(10):
        tokens = prompt(3, seed)
        lease = cache.try_lease(cache.match(SameHash(bytes([seed])), EMPTY), 3)
        assert lease is not None
        cache.commit(lease, tokens, 3)
    for seed in range(10):
        found = [cache.match(SameHash(bytes([name])), prompt(3, seed)).num_pages for name in range(10)]
        assert found == [3 if name == seed else 0 for name in range(10)]


def test_a_match_whose_pages_were_evicted_is_refused_and_not_shortened() -> None:
    cache = PrefixCache(8, PAGE)
    serve(cache, prompt(6 * PAGE + 1))
    match = cache.match(NAMESPACE, prompt(6 * PAGE))
    cache.make_room(4)
    before = cache.counts()
    assert cache.try_lease(match, 1) is None
    assert cache.counts() == before
    shorter = cache.match(NAMESPACE, prompt(6 * PAGE))
    assert shorter.num_pages == 4
    assert cache.try_lease(shorter, 1) is not None


def test_a_match_leases_the_same_pages_after_splits_and_merges() -> None:
    cache = PrefixCache(30, PAGE)
    serve(cache, prompt(6 * PAGE + 1))
    match = cache.match(NAMESPACE, prompt(6 * PAGE))
    fork = admit(cache, joined(prompt(2 * PAGE), prompt(2 * PAGE, seed=1)))
    split = cache.try_lease(match, 1)
    assert split is not None
    cache.release(fork)
    merged = cache.try_lease(match, 1)
    assert merged is not None
    assert split.pages[:6].tolist() == merged.pages[:6].tolist()
    cache.check()


STEM, ASKED = prompt(2 * PAGE), prompt(6 * PAGE + 1)
OTHER = prompt(2 * PAGE + 1, seed=1)


def divided(cache: PrefixCache) -> Iterator[None]:
    yield
    admit(cache, joined(prompt(4 * PAGE), OTHER))


def made_one_node(cache: PrefixCache) -> Iterator[None]:
    stem = admit(cache, joined(STEM, OTHER[:1]))
    yield
    cache.release(stem)
    admit(cache, ASKED)


def trimmed(cache: PrefixCache) -> Iterator[None]:
    serve(cache, OTHER)
    yield
    cache.make_room(cache.counts().free + 1)


def evicted(cache: PrefixCache) -> Iterator[None]:
    serve(cache, OTHER)
    yield
    cache.make_room(cache.counts().free + 6)


def flushed(cache: PrefixCache) -> Iterator[None]:
    yield
    cache.flush()


@pytest.mark.parametrize("what_becomes_of_its_path", [divided, made_one_node, trimmed, evicted, flushed])
def test_a_match_tells_of_the_tree_as_it_is_when_asked_and_not_as_it_was(
    what_becomes_of_its_path: Callable[[PrefixCache], Iterator[None]],
) -> None:
    cache = PrefixCache(30, PAGE)
    serve(cache, ASKED)
    events = what_becomes_of_its_path(cache)
    next(events)
    match = cache.match(NAMESPACE, ASKED)
    next(events, None)
    fresh = cache.match(NAMESPACE, ASKED)
    assert cache.match_again(match).num_pages == fresh.num_pages
    assert cache.num_available(match) == cache.num_available(fresh)
    assert cache.holds_others_behind(match) == cache.holds_others_behind(fresh)
    lease = cache.try_lease(match, 0)
    assert (lease is not None) == (fresh.num_pages == match.num_pages == 6)
    cache.check()


def test_a_prompt_matched_again_finds_what_was_committed_meanwhile() -> None:
    cache = PrefixCache(30, PAGE)
    match = cache.match(NAMESPACE, prompt(6 * PAGE))
    assert cache.match_again(match) is match
    lease = cache.try_lease(match, 6)
    assert lease is not None
    for num_pages in (2, 3, 6):  # a new leaf, and one that grows in place
        cache.commit(lease, prompt(6 * PAGE), num_pages * PAGE)
        match = cache.match_again(match)
        assert (match.num_pages, match.prefix_len) == (num_pages, num_pages * PAGE)
        assert cache.match_again(match) is match
    cache.release(lease)
    assert cache.match_again(match) is match
    cache.flush()
    assert cache.match_again(match).num_pages == 0
