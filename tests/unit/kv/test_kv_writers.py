"""Writers, readers and broken promises: who keeps a page from being reused."""

import pytest

from headstart.core.errors import InvariantError
from headstart.kv.cache import PageCounts, PrefixCache
from tests.support.caches import PAGE, admit, clean, prompt


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


def test_a_page_freed_while_written_and_read_waits_for_the_last_of_both() -> None:
    cache = PrefixCache(4, PAGE)
    lease = admit(cache, prompt(2 * PAGE))
    pages = lease.pages
    cache.open_write(pages)
    cache.add_reader(pages)
    cache.add_reader(pages)
    cache.release(lease)
    for drop in (cache.drop_reader, cache.close_write):
        drop(pages)
        assert cache.counts().inflight == 2
        cache.check()
    cache.drop_reader(pages)
    clean(cache)


def test_a_cached_page_that_a_step_still_reads_is_not_counted_as_room() -> None:
    cache = PrefixCache(4, PAGE)
    tokens = prompt(4 * PAGE)
    lease = admit(cache, tokens)
    cache.commit(lease, tokens, len(tokens))
    held = lease.pages[2:]
    cache.add_reader(held)
    cache.release(lease)
    assert cache.num_available() == 2
    assert cache.make_room(3) == 2
    cache.check()
    cache.drop_reader(held)
    clean(cache)


@pytest.mark.behaviour("79")
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


def test_a_commit_refused_for_a_page_that_the_tree_has_already_changes_nothing() -> None:
    cache = PrefixCache(10, PAGE)
    lease, other = admit(cache, prompt(4 * PAGE)), admit(cache, prompt(2 * PAGE))
    cache.commit(other, prompt(2 * PAGE), 2 * PAGE)
    cache.open_write(lease.pages[:1])
    before = cache.counts()
    with pytest.raises(InvariantError, match="may still write"):
        cache.commit(lease, prompt(4 * PAGE), 4 * PAGE)
    assert (cache.counts(), lease.num_shared) == (before, 0)
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
        lambda: cache.drop_reader(pages[:1]),
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
        lambda: cache.add_reader(pages),
        lambda: cache.open_write(pages),
    ):
        with pytest.raises(InvariantError):
            broken()


def test_a_page_table_cannot_be_edited_in_place() -> None:
    lease = admit(PrefixCache(8, PAGE), prompt(3 * PAGE))
    with pytest.raises(ValueError, match="read-only"):
        lease.pages[0] = 7


def test_what_is_read_twice_waits_for_both_whoever_lets_go_first() -> None:
    """The same batch and a part of it: noted while leased, told apart once the lease is gone."""
    cache = PrefixCache(4, PAGE)
    lease = admit(cache, prompt(3 * PAGE))
    pages, part = lease.pages, lease.pages[1:]
    for held in (pages, part, pages):
        cache.add_reader(held)
    cache.drop_reader(pages)
    cache.release(lease)
    assert cache.counts().inflight == 3
    cache.check()
    cache.drop_reader(pages)
    assert (cache.counts().inflight, cache.counts().free) == (2, 2)
    cache.drop_reader(part)
    clean(cache)


def test_a_page_that_is_read_is_not_opened_for_a_writer() -> None:
    cache = PrefixCache(4, PAGE)
    lease = admit(cache, prompt(2 * PAGE))
    cache.add_reader(lease.pages)
    with pytest.raises(InvariantError, match="not private and untouched"):
        cache.open_write(lease.pages[:1])


def test_a_reader_that_was_never_added_cannot_be_dropped() -> None:
    cache = PrefixCache(4, PAGE)
    lease = admit(cache, prompt(2 * PAGE))
    with pytest.raises(InvariantError, match="more readers dropped than added"):
        cache.drop_reader(lease.pages)
