"""PrefixCache in small worlds: what each caller sees, named after the behaviour or failure case it rules out."""

import time

import numpy as np
import pytest

from headstart.core.arrays import EMPTY, Int32Array, int32_array
from headstart.core.errors import InvariantError
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


# ---- matching ----


def test_behaviour_4_a_prompt_shorter_than_a_page_never_hits() -> None:
    cache = PrefixCache(10, PAGE)
    assert [serve(cache, prompt(PAGE - 1)) for _ in range(3)] == [0, 0, 0]
    assert cache.counts().cached == 0
    clean(cache)


def test_behaviour_5_a_match_is_floored_to_whole_pages() -> None:
    cache = PrefixCache(30, PAGE)
    serve(cache, prompt(10 * PAGE + 5))
    match = cache.match(NAMESPACE, joined(prompt(10 * PAGE + 5), prompt(20, seed=1)))
    assert (match.num_pages, match.prefix_len) == (10, 10 * PAGE)
    assert cache.match(NAMESPACE, prompt(10 * PAGE + 5), max_len=4 * PAGE - 1).num_pages == 3
    assert cache.match(NAMESPACE, prompt(10 * PAGE + 5), max_len=0).num_pages == 0


def test_behaviour_6_prompts_that_share_three_pages_and_two_tokens_share_three_pages() -> None:
    cache = PrefixCache(30, PAGE)
    common = prompt(3 * PAGE + 2)
    assert serve(cache, joined(common, prompt(20, seed=1))) == 0
    assert serve(cache, joined(common, prompt(20, seed=2))) == 3 * PAGE
    clean(cache)


def test_behaviour_7_the_next_turn_hits_prompt_and_output_but_the_last_token() -> None:
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
def test_behaviour_14_and_failure_cases_K3_K4_K8_namespaces_never_cross(other: bytes) -> None:
    cache = PrefixCache(20, PAGE)
    serve(cache, prompt(5 * PAGE))
    assert cache.match(NAMESPACE, prompt(5 * PAGE)).num_pages == 4
    assert cache.match(other, prompt(5 * PAGE)).num_pages == 0


def test_failure_case_K2_a_reloaded_adapter_has_a_namespace_of_its_own() -> None:
    assert cache_namespace(adapter="poet@1") != cache_namespace(adapter="poet@2")
    assert cache_namespace(adapter="ab", tenant_salt=b"c") != cache_namespace(adapter="a", tenant_salt=b"bc")


def test_failure_case_K1_a_namespace_is_the_same_in_every_process() -> None:
    """The digest was computed by another process: nothing of one (hash seed, address, version) goes into it."""
    digest = cache_namespace(adapter="a", tenant_salt=b"b").hex()
    assert digest == "a94a4df9418a5ec663fda5d28ab1adadee8030ab25dfae1b4518ce419ffad775"


def test_failure_case_K6_a_flush_leaves_nothing_to_match_in_any_namespace() -> None:
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


def test_failure_case_K9_a_hash_collision_reuses_nothing() -> None:
    cache = PrefixCache(40, 1)
    for seed in range(10):
        tokens = prompt(3, seed)
        lease = cache.try_lease(cache.match(SameHash(bytes([seed])), EMPTY), 3)
        assert lease is not None
        cache.commit(lease, tokens, 3)
    for seed in range(10):
        found = [cache.match(SameHash(bytes([name])), prompt(3, seed)).num_pages for name in range(10)]
        assert found == [3 if name == seed else 0 for name in range(10)]


# ---- leases ----


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("succeeds", [False, True])
def test_behaviours_17_to_20_and_failure_case_B1_every_path_drops_what_it_took(warm: bool, succeeds: bool) -> None:
    cache = PrefixCache(30, PAGE)
    if warm:
        serve(cache, prompt(6 * PAGE + 1))
    before = cache.counts()
    lease = admit(cache, joined(prompt(6 * PAGE), prompt(20, seed=1)))
    assert lease.num_shared == (6 if warm else 0)
    delta = lease.pages[lease.num_shared :]
    cache.open_write(delta)
    cache.check()
    cache.close_write(delta)
    if succeeds:
        cache.commit(lease, joined(prompt(6 * PAGE), prompt(20, seed=1)), 6 * PAGE + 19)
    cache.release(lease)
    assert cache.counts().pinned == cache.counts().private == cache.counts().inflight == 0
    if not succeeds:
        assert cache.counts() == before
    clean(cache)


def test_behaviour_21_the_same_hit_many_times_drifts_nowhere() -> None:
    cache = PrefixCache(60, PAGE)
    serve(cache, prompt(5 * PAGE + 1))
    before = cache.counts()
    for _ in range(6):
        assert serve(cache, prompt(5 * PAGE + 1)) == 5 * PAGE
    leases = [admit(cache, prompt(5 * PAGE + 1)) for _ in range(6)]
    cache.check()
    for lease in leases:
        cache.commit(lease, prompt(5 * PAGE + 1), 5 * PAGE)
        cache.release(lease)
    assert cache.counts() == before
    clean(cache)


def test_behaviour_22_a_hit_that_does_not_fit_keeps_no_lock_and_fits_later() -> None:
    cache = PrefixCache(10, PAGE)
    serve(cache, prompt(4 * PAGE + 1))
    other = admit(cache, prompt(5 * PAGE, seed=1))
    before = cache.counts()
    match = cache.match(NAMESPACE, prompt(4 * PAGE + 1))
    assert cache.num_available(match) == 1
    assert cache.try_lease(match, 2) is None
    assert cache.counts() == before
    cache.release(other)
    assert cache.try_lease(match, 2) is not None
    cache.check()


def test_behaviour_23_and_failure_case_B14_a_pinned_leaf_survives_every_eviction() -> None:
    cache = PrefixCache(10, PAGE)
    serve(cache, prompt(4 * PAGE + 1))
    lease = admit(cache, prompt(4 * PAGE + 1))
    assert cache.make_room(10) == 5
    assert cache.flush() == 0
    assert cache.match(NAMESPACE, prompt(4 * PAGE + 1)).num_pages == 4
    cache.check()
    cache.release(lease)
    clean(cache)


def test_behaviour_24_and_failure_case_C20_one_page_too_many_is_a_no_and_not_a_crash() -> None:
    cache = PrefixCache(10, PAGE)
    lease = admit(cache, prompt(10 * PAGE))
    assert cache.num_available() == 0
    assert cache.try_lease(cache.match(NAMESPACE, EMPTY), 1) is None
    assert not cache.try_extend(lease, 1)
    assert not cache.try_replace(lease, 0, 1)
    assert cache.make_room(1) == 0
    assert len(lease.pages) == 10
    cache.check()


def test_behaviour_25_and_failure_case_A13_the_loser_of_two_equal_inserts_is_remapped_before_its_copy_goes() -> None:
    cache = PrefixCache(30, PAGE)
    tokens = prompt(4 * PAGE + 1)
    first, second = admit(cache, tokens), admit(cache, tokens)
    own, launched = second.pages.copy(), second.pages
    cache.hold(launched)
    assert cache.commit(first, tokens, 4 * PAGE) == 0
    assert cache.commit(second, tokens, 4 * PAGE) == 4
    assert second.pages[:4].tolist() == first.pages[:4].tolist()
    assert second.pages[4] == own[4]
    assert launched.tolist() == own.tolist()  # what the launched step was given never changes
    assert cache.counts().inflight == 4  # nor is it given to anyone while the step runs
    cache.check()
    cache.unhold(launched)
    assert cache.counts() == PageCounts(inflight=0, private=2, pinned=4, cached=0, free=24)
    cache.release(first)
    cache.check()
    assert cache.match(NAMESPACE, tokens).num_pages == 4
    cache.release(second)
    clean(cache)


def test_behaviour_27_an_idle_flush_frees_the_pool_and_a_busy_one_loses_nothing_in_use() -> None:
    cache = PrefixCache(30, PAGE)
    tokens = joined(prompt(4 * PAGE), prompt(4 * PAGE, seed=1))
    serve(cache, tokens)
    lease = admit(cache, prompt(4 * PAGE + 1))
    assert lease.num_shared == 4
    assert cache.flush() == 3
    assert cache.match(NAMESPACE, tokens).num_pages == 4
    cache.check()
    cache.release(lease)
    clean(cache)


@pytest.mark.parametrize("stage", ["leased", "writing", "held", "committed", "retracted"])
def test_failure_case_K7_a_flush_in_any_state_of_a_request_keeps_the_ledger_exact(stage: str) -> None:
    cache = PrefixCache(12, PAGE)
    serve(cache, prompt(3 * PAGE + 1))
    tokens = joined(prompt(3 * PAGE), prompt(3 * PAGE, seed=1))
    lease = admit(cache, tokens)
    delta = lease.pages[lease.num_shared :]
    if stage == "writing":
        cache.open_write(delta)
    if stage == "held":
        cache.hold(delta)
    if stage in ("committed", "retracted"):
        cache.commit(lease, tokens, 5 * PAGE)
    if stage == "retracted":
        cache.release(lease)
    cache.flush()
    cache.check()
    if stage == "writing":
        cache.close_write(delta)
    if stage == "held":
        cache.unhold(delta)
    if stage != "retracted":
        cache.release(lease)
    clean(cache)


def test_behaviour_30_output_is_evicted_before_the_prompt_it_follows() -> None:
    cache = PrefixCache(10, PAGE)
    serve(cache, prompt(10 * PAGE))
    cache.make_room(5)
    assert cache.match(NAMESPACE, prompt(10 * PAGE)).num_pages == 5
    cache.check()


def test_behaviour_31_a_request_that_fits_only_by_its_own_hit_is_admitted() -> None:
    cache = PrefixCache(5, PAGE)
    serve(cache, prompt(5 * PAGE))
    match = cache.match(NAMESPACE, prompt(5 * PAGE), reusable_len(5 * PAGE, PAGE))
    assert match.num_pages == 4
    assert cache.num_available(match) == 1  # its own four pages are not counted as evictable as well
    assert cache.try_lease(match, 2) is None
    lease = cache.try_lease(match, 1)
    assert lease is not None
    assert cache.counts() == PageCounts(inflight=0, private=1, pinned=4, cached=0, free=0)


@pytest.mark.parametrize("prefix_pages", range(7))
def test_behaviours_69_and_70_a_hit_never_needs_more_than_a_miss(prefix_pages: int) -> None:
    cache = PrefixCache(12, PAGE)
    serve(cache, prompt(6 * PAGE + 1))
    busy = admit(cache, prompt(2 * PAGE, seed=1))
    hit, miss = cache.match(NAMESPACE, prompt(6 * PAGE + 1)[: prefix_pages * PAGE]), cache.match(NAMESPACE, EMPTY)
    total = cache.num_available(miss)
    assert total == 10
    assert hit.num_pages == prefix_pages
    assert cache.num_available(hit) >= total - hit.num_pages
    lease = cache.try_lease(hit, total - hit.num_pages)
    assert lease is not None
    assert len(lease.pages) == total
    cache.release(lease)
    cache.release(busy)
    clean(cache)


@pytest.mark.parametrize(("prompt_len", "hit_len", "num_tokens"), [(14, 0, 48), (32, 0, 66), (2064, 2048, 50)])
def test_behaviours_71_and_72_what_admission_charges_is_what_the_allocator_takes(
    prompt_len: int, hit_len: int, num_tokens: int
) -> None:
    """Page 16, 34 tokens reserved for growth: the prompt's rounded-up tail counts towards them."""
    num_pages = pages_for(prompt_len + 34, 16) - hit_len // 16
    assert num_pages == pages_for(num_tokens, 16)
    cache = PrefixCache(hit_len // 16 + num_pages, 16)
    tokens = prompt(prompt_len)
    if hit_len:
        serve(cache, tokens[: hit_len + 1])
    match = cache.match(NAMESPACE, tokens, reusable_len(prompt_len, 16))
    assert (match.prefix_len, cache.num_available(match)) == (hit_len, num_pages)
    assert cache.try_lease(match, num_pages + 1) is None
    assert cache.try_lease(match, num_pages) is not None
    assert cache.num_available() == 0


def test_behaviour_73_the_tail_begins_behind_the_whole_promised_prefix() -> None:
    cache = PrefixCache(20, PAGE)
    serve(cache, prompt(4 * PAGE + 1))
    tokens = joined(prompt(4 * PAGE), prompt(2 * PAGE, seed=1))
    lease = admit(cache, tokens)
    shared = lease.pages[:4].tolist()
    assert (lease.num_shared, len(lease.pages)) == (4, 6)
    assert cache.try_extend(lease, 2)
    assert lease.pages[:4].tolist() == shared
    assert len(set(lease.pages.tolist())) == 8


def test_failure_case_B13_exactly_what_matched_is_pinned() -> None:
    cache = PrefixCache(20, PAGE)
    serve(cache, prompt(64 + 1))
    lease = admit(cache, joined(prompt(40), prompt(30, seed=1)))
    counts = cache.counts()
    assert (counts.pinned, counts.cached) == (5, 3)
    again = admit(cache, joined(prompt(40), prompt(30, seed=2)))
    for held, seed in ((lease, 1), (again, 2)):
        cache.commit(held, joined(prompt(40), prompt(30, seed=seed)), 69)
        cache.check()
        cache.release(held)
    assert cache.counts().cached == 8 + 3 + 3
    clean(cache)


def test_failure_case_B15_ten_retractions_of_one_request_hold_no_more_than_one() -> None:
    cache = PrefixCache(20, PAGE)
    tokens = prompt(6 * PAGE + 3)
    pinned = []
    for _ in range(10):
        lease = admit(cache, tokens)
        cache.commit(lease, tokens, len(tokens))
        pinned.append(cache.counts().pinned)
        cache.release(lease)
        cache.check()
    assert pinned == [6] * 10
    clean(cache)


def test_failure_case_B17_a_flush_says_what_went_and_counts_say_what_stays() -> None:
    cache = PrefixCache(20, PAGE)
    serve(cache, prompt(8 * PAGE + 1))
    paused = admit(cache, prompt(3 * PAGE + 1))
    assert cache.flush() == 5
    assert cache.counts() == PageCounts(inflight=0, private=1, pinned=3, cached=0, free=16)
    cache.release(paused)
    assert cache.flush() == 3


@pytest.mark.parametrize("num_tokens", range(3 * PAGE + 1))
def test_failure_case_C12_a_commit_of_nothing_new_changes_nothing(num_tokens: int) -> None:
    cache = PrefixCache(20, PAGE)
    serve(cache, prompt(3 * PAGE + 1))
    lease = admit(cache, prompt(5 * PAGE))
    before, counts = lease.pages, cache.counts()
    assert cache.commit(lease, prompt(5 * PAGE), num_tokens) == 0
    assert lease.pages is before
    assert cache.counts() == counts
    cache.check()


def full_cache() -> PrefixCache:
    """128 sequences of 16 pages: nothing free, everything evictable."""
    cache = PrefixCache(128 * 16, 16)
    for seed in range(128):
        tokens = prompt(16 * 16, seed)
        lease = admit(cache, tokens)
        cache.commit(lease, tokens, len(tokens))
        cache.release(lease)
    assert cache.counts().cached == cache.num_pages
    return cache


def test_failure_case_L8_128_admissions_into_a_full_cache_need_one_pass_of_under_5_ms() -> None:
    stalls_s = []
    for _ in range(3):
        cache = full_cache()
        start = time.process_time()
        assert cache.make_room(128 * 8) == 128 * 8
        stalls_s.append(time.process_time() - start)
        cached = cache.counts().cached
        assert None not in [cache.try_lease(cache.match(b"new", EMPTY), 8) for _ in range(128)]
        assert cache.counts().cached == cached  # the one pass was enough
        cache.check()
    assert min(stalls_s) < 0.005


# ---- staleness ----


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


# ---- writers and readers ----


def test_a_page_given_up_under_a_ticket_is_free_only_when_the_ticket_closes() -> None:
    cache = PrefixCache(4, PAGE)
    lease = admit(cache, prompt(2 * PAGE))
    late = lease.pages
    cache.open_write(late)
    assert cache.try_replace(lease, 0, 2)
    assert not set(late.tolist()) & set(lease.pages.tolist())
    cache.release(lease)
    assert cache.counts() == PageCounts(inflight=2, private=0, pinned=0, cached=0, free=2)
    assert cache.num_available() == 2
    cache.close_write(late[:1])
    assert cache.counts().free == 3
    cache.close_write(late[1:])
    clean(cache)


def test_a_page_given_up_while_written_and_read_waits_for_the_last_of_both() -> None:
    cache = PrefixCache(4, PAGE)
    lease = admit(cache, prompt(2 * PAGE))
    pages = lease.pages
    cache.open_write(pages)
    cache.hold(pages)
    cache.hold(pages)
    cache.release(lease)
    for let_go in (cache.unhold, cache.close_write):
        let_go(pages)
        assert cache.counts().inflight == 2
        cache.check()
    cache.unhold(pages)
    clean(cache)


def test_a_cached_page_that_a_step_still_reads_is_not_counted_as_room() -> None:
    cache = PrefixCache(4, PAGE)
    tokens = prompt(4 * PAGE)
    lease = admit(cache, tokens)
    cache.commit(lease, tokens, len(tokens))
    held = lease.pages[2:]
    cache.hold(held)
    cache.release(lease)
    assert cache.num_available() == 2
    assert cache.make_room(3) == 2
    cache.check()
    cache.unhold(held)
    clean(cache)


def test_a_page_that_a_peer_may_still_write_is_never_committed() -> None:
    cache = PrefixCache(8, PAGE)
    tokens = prompt(3 * PAGE)
    lease = admit(cache, tokens)
    cache.open_write(lease.pages[1:2])
    with pytest.raises(InvariantError, match="may still write"):
        cache.commit(lease, tokens, 2 * PAGE)
    assert cache.commit(lease, tokens, PAGE) == 0
    assert lease.num_shared == 1
    cache.check()


def test_broken_promises_raise_at_once() -> None:
    cache = PrefixCache(8, PAGE)
    tokens = prompt(3 * PAGE)
    lease = admit(cache, tokens)
    pages = lease.pages
    cache.open_write(pages[:1])
    for broken in (
        lambda: cache.open_write(pages[:1]),  # a second writer
        lambda: cache.close_write(pages[1:2]),  # a ticket that was never opened, or is closed
        lambda: cache.unhold(pages[:1]),
        lambda: cache.try_replace(lease, 2, 2),
        lambda: cache.commit(lease, tokens, 3 * PAGE + 1),
    ):
        with pytest.raises(InvariantError):
            broken()
    cache.close_write(pages[:1])
    cache.release(lease)
    for broken in (
        lambda: cache.release(lease),
        lambda: cache.try_extend(lease, 1),
        lambda: cache.hold(pages),
        lambda: cache.open_write(pages),
    ):
        with pytest.raises(InvariantError):
            broken()


def test_a_page_table_cannot_be_edited_in_place() -> None:
    lease = admit(PrefixCache(8, PAGE), prompt(3 * PAGE))
    with pytest.raises(ValueError, match="read-only"):
        lease.pages[0] = 7
