"""PrefixCache against a naive model, over random histories, with every owner set checked after every operation.

The model keeps one entry per cached prefix and finds the next page to evict by looking at all of them. It predicts every
match, every grant and refusal, every count of pages, whose pages go first if owners have quotas, and what each
page holds: pages are labelled with the prefix whose
KV they would hold, writers and launched steps scribble over theirs until they end, and no shared page may ever change.
"""

import os
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from headstart.core.arrays import Int32Array, int32_array
from headstart.core.errors import InvariantError
from headstart.core.identity import cache_owner, divide_namespace
from headstart.kv.cache import Match, PageCounts, PageLease, PrefixCache

NUM_OPERATIONS = int(os.environ.get("HEADSTART_KV_OPERATIONS", "100000"))
STEPS_PER_EXAMPLE = 20
OPERATIONS_PER_STEP = 10
MAX_TOKENS = 12
MAX_LEASES = 6
NAMESPACES = (b"one", divide_namespace(b"one" * 6, b"part"), b"one" * 6, b"other")
"""Of three owners: the middle two are one owner's."""
OPERATIONS = (
    *("admit", "admit", "admit", "commit", "commit", "commit", "release", "release", "release", "extend", "replace"),
    *("open_write", "close_write", "add_reader", "drop_reader", "squeeze"),
)

Prefix = tuple[bytes, tuple[int, ...]]


class Asked(NamedTuple):
    """A match that was kept: of the `asked` ones of its tokens."""

    match: Match
    namespace: bytes
    tokens: tuple[int, ...]
    asked: tuple[int, ...]


class NaiveCache:
    """Which prefixes are cached, and when each was last used. `page_size` tokens more are one page more."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.last_use: dict[Prefix, int] = {}
        self.tick = 0

    def prefixes(self, namespace: bytes, tokens: tuple[int, ...], num_pages: int) -> list[Prefix]:
        return [(namespace, tokens[: (k + 1) * self.page_size]) for k in range(num_pages)]

    def match(self, namespace: bytes, tokens: tuple[int, ...]) -> int:
        whole = self.prefixes(namespace, tokens, len(tokens) // self.page_size)
        return next((k for k, prefix in enumerate(whole) if prefix not in self.last_use), len(whole))

    def use(self, prefixes: Iterable[Prefix]) -> None:
        self.tick += 1
        self.last_use |= dict.fromkeys(prefixes, self.tick)

    def evict_oldest(self, pinned: set[Prefix], owner: bytes | None = None) -> Prefix | None:
        unpinned = self.last_use.keys() - pinned
        if owner is not None:
            unpinned = {prefix for prefix in unpinned if cache_owner(prefix[0]) == owner}
        oldest = min(unpinned, key=lambda prefix: (self.last_use[prefix], -len(prefix[1])), default=None)
        if oldest is not None:
            del self.last_use[oldest]
        return oldest


class Holder:
    """A live lease and the tokens of the sequence it serves."""

    def __init__(self, lease: PageLease, namespace: bytes, tokens: tuple[int, ...]) -> None:
        self.lease = lease
        self.namespace = namespace
        self.tokens = tokens


class Dice:
    """Small numbers out of four drawn bytes: one draw for many operations keeps 100,000 of them quick."""

    def __init__(self, drawn: int) -> None:
        self.rest = drawn

    def below(self, sides: int) -> int:
        self.rest, rolled = divmod(self.rest, sides)
        return rolled


class KVMachine(RuleBasedStateMachine):
    def __init__(self, operations: Counter[str]) -> None:
        super().__init__()
        self.operations = operations

    @initialize(page_size=st.integers(1, 3), num_pages=st.integers(6, 24), owner_pages=st.none() | st.integers(1, 12))
    def build(self, page_size: int, num_pages: int, owner_pages: int | None) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.owner_pages = owner_pages
        self.cache = PrefixCache(num_pages, page_size, owner_pages)
        self.model = NaiveCache(page_size)
        self.page_of: dict[Prefix, int] = {}  # of every cached prefix
        self.content: list[object] = [None] * num_pages
        self.holders: list[Holder] = []
        self.matches: list[Asked] = []
        self.writes: list[Int32Array] = []
        self.holds: list[Int32Array] = []

    @rule(script=st.binary(min_size=4 * OPERATIONS_PER_STEP, max_size=4 * OPERATIONS_PER_STEP))
    def operate(self, script: bytes) -> None:
        for start in range(0, len(script), 4):
            dice = Dice(int.from_bytes(script[start : start + 4], "little"))
            name = OPERATIONS[dice.below(len(OPERATIONS))]
            possible = {"admit": True, "squeeze": True, "close_write": self.writes, "drop_reader": self.holds}
            name = name if possible.get(name, self.holders) else "admit"
            getattr(self, "release" if name == "admit" and len(self.holders) == MAX_LEASES else name)(dice)
            self.check()

    # ---- what the world does ----

    def admit(self, dice: Dice) -> None:
        """Match a prompt without its last tokens; lease now, later, or what was matched earlier."""
        spare, when = dice.below(3), dice.below(8)
        namespace = NAMESPACES[dice.below(len(NAMESPACES))]
        stem = self.matches[-1].tokens[: dice.below(MAX_TOKENS + 1)] if self.matches else ()
        tokens = (stem + tuple(dice.below(2) for _ in range(dice.below(MAX_TOKENS + 1))))[:MAX_TOKENS]
        match = self.cache.match(namespace, int32_array(tokens), len(tokens) - spare if spare else None)
        self.matches.append(Asked(match, namespace, tokens, tokens[: max(0, len(tokens) - spare)]))
        self.expect_right(match, self.matches[-1])
        self.ask_again()
        if when > 5:
            self.operations["match"] += 1
        else:
            self.lease(self.matches.pop(-1 if when < 4 else 0), num_spare=spare)

    def ask_again(self) -> None:
        """Whether what was remembered of a match is still right, the cache says by itself."""
        for asked in (self.matches[0], self.matches[-1]):
            self.expect_right(self.cache.match_again(asked.match), asked)

    def expect_right(self, match: Match, asked: Asked) -> None:
        assert match.num_pages == self.model.match(asked.namespace, asked.asked)
        assert match.prefix_len == match.num_pages * self.page_size

    def lease(self, matched: Asked, num_spare: int) -> None:
        match, namespace, tokens, _ = matched
        num_new = -(-len(tokens) // self.page_size) - match.num_pages + num_spare
        still = min(match.num_pages, self.model.match(namespace, tokens))
        path = self.model.prefixes(namespace, tokens, still)
        evictable, owned = self.evictable(), self.owned(namespace, num_new)
        num_free, available = self.num_free(), self.num_free() + len(evictable - set(path))
        assert self.cache.num_available(match) == available
        lease = self.cache.try_lease(match, num_new)
        assert (lease is not None) == (still == match.num_pages and num_new <= available)
        self.operations["lease" if lease else "stale lease" if still < match.num_pages else "refused lease"] += 1
        if lease is not None:
            assert lease.pages[:still].tolist() == [self.page_of[prefix] for prefix in path]
            self.model.use(path)
            self.take(lease.pages[still:], num_free, self.pinned() | set(path), owned)
            self.holders.append(Holder(lease, namespace, tokens))
            assert (lease.num_shared, len(lease.pages)) == (still, still + num_new)

    def extend(self, dice: Dice) -> None:
        lease, num_new = self.pick(dice).lease, dice.below(4)
        owned = self.owned(lease.namespace, num_new)
        before, num_free, available = lease.pages, self.num_free(), self.num_free() + len(self.evictable())
        grown = self.cache.try_extend(lease, num_new)
        assert grown == (num_new <= available)
        self.operations["extend" if grown else "refused extend"] += 1
        assert lease.pages[: len(before)].tolist() == before.tolist()
        assert len(lease.pages) == len(before) + num_new * grown
        self.take(lease.pages[len(before) :], num_free, self.pinned(), owned)

    def replace(self, dice: Dice) -> None:
        lease = self.pick(dice).lease
        first = min(lease.num_shared + dice.below(3), len(lease.pages))
        last = min(first + 1 + dice.below(3), len(lease.pages))
        owned = self.owned(lease.namespace, last - first)
        before, num_free, available = lease.pages, self.num_free(), self.num_free() + len(self.evictable())
        replaced = self.cache.try_replace(lease, first, last - first)
        assert replaced == (last - first <= available)
        self.operations["replace" if replaced else "refused replace"] += 1
        kept = np.delete(np.arange(len(before)), slice(first, last))
        assert lease.pages[kept].tolist() == before[kept].tolist()
        if replaced:
            assert not set(lease.pages[first:last].tolist()) & set(before.tolist())
            self.take(lease.pages[first:last], num_free, self.pinned(), owned)

    def commit(self, dice: Dice) -> None:
        holder, num_tokens = self.pick(dice), dice.below(3 * MAX_TOKENS)
        lease, before, shared = holder.lease, holder.lease.pages, holder.lease.num_shared
        num_tokens = min(num_tokens, len(holder.tokens), len(before) * self.page_size)
        last, tokens = num_tokens // self.page_size, int32_array(holder.tokens)
        self.operations["commit" if last > shared else "empty commit"] += 1
        if last <= shared:
            assert self.cache.commit(lease, tokens, num_tokens) == 0
            assert lease.pages is before
        elif self.written()[before[shared:last]].any():
            with pytest.raises(InvariantError):
                self.cache.commit(lease, tokens, num_tokens)
        else:
            prefixes = self.model.prefixes(holder.namespace, holder.tokens, last)
            known = self.model.match(holder.namespace, holder.tokens[: last * self.page_size])
            for prefix, page in zip(prefixes[known:], before[known:last].tolist(), strict=True):
                self.content[page], self.page_of[prefix] = prefix, page
            assert self.cache.commit(lease, tokens, num_tokens) == known - shared
            assert lease.pages[:last].tolist() == [self.page_of[prefix] for prefix in prefixes]
            assert lease.pages[last:].tolist() == before[last:].tolist()
            self.model.use(prefixes)

    def release(self, dice: Dice) -> None:
        self.operations["release"] += 1
        holder = self.holders.pop(dice.below(len(self.holders)))
        self.model.use(self.path(holder))
        self.cache.release(holder.lease)

    def open_write(self, dice: Dice) -> None:
        lease = self.pick(dice).lease
        pages = lease.pages[lease.num_shared :]
        pages = pages[~self.written()[pages] & (self.readers()[pages] == 0)][: 1 + dice.below(3)]
        self.operations["open_write"] += 1
        self.cache.open_write(pages)
        self.writes.append(pages)

    def close_write(self, dice: Dice) -> None:
        self.operations["close_write"] += 1
        pages = self.writes.pop(dice.below(len(self.writes)))
        self.scribble(pages)
        self.cache.close_write(pages)

    def add_reader(self, dice: Dice) -> None:
        self.operations["add_reader"] += 1
        pages = np.tile(self.pick(dice).lease.pages[dice.below(4) :], 1 + dice.below(2))
        self.cache.add_reader(pages)
        self.holds.append(pages)

    def drop_reader(self, dice: Dice) -> None:
        self.operations["drop_reader"] += 1
        self.cache.drop_reader(self.holds.pop(dice.below(len(self.holds))))

    def squeeze(self, dice: Dice) -> None:
        """Flush, or make room for a few pages."""
        num_pages = dice.below(7)
        if num_pages == 0:
            self.operations["flush"] += 1
            dropped = self.model.last_use.keys() - self.pinned()
            assert self.cache.flush() == len(dropped)
            for prefix in dropped:
                del self.model.last_use[prefix], self.page_of[prefix]
        else:
            self.operations["make_room"] += 1
            self.evict(num_pages - self.num_free(), self.pinned(), self.owned())
            assert self.cache.make_room(num_pages) == self.num_free()

    # ---- what must hold after each ----

    def check(self) -> None:
        self.cache.check()
        assert self.cache.counts() == self.expected_counts()
        assert self.page_of.keys() == self.model.last_use.keys()
        assert all(self.content[page] == prefix for prefix, page in self.page_of.items())
        for holder in self.holders:
            shared = holder.lease.pages[: holder.lease.num_shared].tolist()
            assert [self.content[page] for page in shared] == self.path(holder)

    # ---- the model's view ----

    def pick(self, dice: Dice) -> Holder:
        return self.holders[dice.below(len(self.holders))]

    def path(self, holder: Holder) -> list[Prefix]:
        return self.model.prefixes(holder.namespace, holder.tokens, holder.lease.num_shared)

    def pinned(self) -> set[Prefix]:
        return {prefix for holder in self.holders for prefix in self.path(holder)}

    def evictable(self) -> set[Prefix]:
        """Prefixes whose eviction frees a page."""
        readers, pinned = self.readers(), self.pinned()
        return {prefix for prefix, page in self.page_of.items() if prefix not in pinned and not readers[page]}

    def written(self) -> NDArray[np.bool_]:
        written = np.zeros(self.num_pages, dtype=bool)
        written[[page for pages in self.writes for page in pages]] = True
        return written

    def readers(self) -> NDArray[np.int64]:
        held = [page for pages in self.holds for page in pages]
        return np.bincount(np.array(held, dtype=np.int64), minlength=self.num_pages)

    def num_free(self) -> int:
        return self.expected_counts().free

    def expected_counts(self) -> PageCounts:
        written, held = self.written().tolist(), self.readers().tolist()
        leased = {page for holder in self.holders for page in holder.lease.pages.tolist()}
        cached = set(self.page_of.values())
        states = Counter(
            "inflight"
            if written[page] or (held[page] and page not in leased)
            else ("pinned" if page in leased else "cached")
            if page in cached
            else ("private" if page in leased else "free")
            for page in range(self.num_pages)
        )
        return PageCounts(*(states[name] for name in ("inflight", "private", "pinned", "cached", "free")))

    def owned(self, namespace: bytes = b"", num_new: int = 0) -> Counter[bytes]:
        """Pages of each owner, with those that are about to be handed out."""
        owned = Counter(cache_owner(prefix[0]) for prefix in self.page_of)
        for holder in self.holders:
            owned[cache_owner(holder.namespace)] += len(holder.lease.pages) - holder.lease.num_shared
        owned[cache_owner(namespace)] += num_new
        return owned

    def evict(self, num_pages: int, pinned: set[Prefix], owned: Counter[bytes]) -> None:
        """Owners beyond their quota first, down to it, the farthest first; then whatever is oldest."""
        limit = self.num_pages * 2 if self.owner_pages is None else self.owner_pages
        beyond = sorted(((count - limit, owner) for owner, count in owned.items() if count > limit), reverse=True)
        for excess, owner in beyond:
            num_pages = self.drop(num_pages, pinned, owner, excess)
        self.drop(num_pages, pinned, None, self.num_pages)

    def drop(self, num_pages: int, pinned: set[Prefix], owner: bytes | None, most: int) -> int:
        """Returns how many of `num_pages` are still to be freed."""
        readers = self.readers()
        while num_pages > 0 and most > 0 and (prefix := self.model.evict_oldest(pinned, owner)) is not None:
            self.operations["eviction" if owner is None else "eviction for a quota"] += 1
            num_pages -= int(readers[self.page_of.pop(prefix)] == 0)
            most -= 1
        return num_pages

    def take(self, pages: Int32Array, num_free: int, pinned: set[Prefix], owned: Counter[bytes]) -> None:
        """`pages` were just handed out where `num_free` were free: nothing else may own them, now or later."""
        self.evict(len(pages) - num_free, pinned, owned)
        assert not self.written()[pages].any()
        assert not self.readers()[pages].any()
        assert not set(pages.tolist()) & set(self.page_of.values())
        self.scribble(pages)

    def scribble(self, pages: Int32Array) -> None:
        for page in pages.tolist():
            self.content[page] = object()


def test_100_000_random_operations_agree_with_a_naive_cache() -> None:
    operations: Counter[str] = Counter()
    run_state_machine_as_test(
        lambda: KVMachine(operations),  # type: ignore[arg-type]
        settings=settings(
            max_examples=NUM_OPERATIONS * 6 // 5 // STEPS_PER_EXAMPLE // OPERATIONS_PER_STEP,
            stateful_step_count=STEPS_PER_EXAMPLE,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{operations.total()} operations: {dict(operations.most_common())}")
    evictions = operations.pop("eviction"), operations.pop("eviction for a quota")
    assert operations.total() >= NUM_OPERATIONS
    assert min(evictions) > 100
    assert (
        min(operations[kind] for kind in ("refused lease", "stale lease", "refused extend", "replace", "flush")) > 100
    )
