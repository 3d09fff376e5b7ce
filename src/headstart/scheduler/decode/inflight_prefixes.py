"""Which pages of which prompts are about to be committed, and who waits for that instead of fetching them again.

An inflight prefix covers the whole prompt pages [low, high) that its leader lacked when it was leased. `low` rises as
they are committed. A follower names the page up to which the two prompts agree; it is released once the prefix is
committed past that page or ends, for whatever reason, and matches again. The first to do so becomes the leader of what
is still missing.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.core.request import ChoiceRef


@dataclass(slots=True, eq=False)
class InflightPrefix:
    leader: ChoiceRef
    namespace: bytes
    tokens: Int32Array  # [high * page_size]
    low: int
    high: int
    followers: dict[ChoiceRef, int] = field(default_factory=dict)  # follower -> page it waits for


class InflightPrefixes:
    """The prefixes by leader, found by namespace and first page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._by_leader: dict[ChoiceRef, InflightPrefix] = {}
        self._by_start: dict[Hashable, dict[ChoiceRef, InflightPrefix]] = {}
        self._following: dict[ChoiceRef, InflightPrefix] = {}

    def __len__(self) -> int:
        return len(self._by_leader)

    def make(self, leader: ChoiceRef, namespace: bytes, tokens: Int32Array, low: int, high: int) -> None:
        """`leader` will commit pages [low, high) of `tokens`; nothing happens if that is empty."""
        if low >= high:
            return
        prefix = InflightPrefix(leader, namespace, tokens[: high * self._page_size], low, high)
        self._by_leader[leader] = prefix
        self._by_start.setdefault(self._start(prefix), {})[leader] = prefix

    def find(self, namespace: bytes, tokens: Int32Array, page: int, limit: int) -> tuple[InflightPrefix, int] | None:
        """The prefix that will commit `page` of `tokens`, and how many pages (at most `limit`) the two will share."""
        size = self._page_size
        if page >= limit:
            return None
        for prefix in self._by_start.get((namespace, tokens[:size].tobytes()), {}).values():
            if not prefix.low <= page < prefix.high:
                continue
            if not np.array_equal(
                prefix.tokens[page * size : (page + 1) * size], tokens[page * size : (page + 1) * size]
            ):
                continue
            num_pages = min(limit, prefix.high)
            differs = prefix.tokens[: num_pages * size] != tokens[: num_pages * size]
            shared = int(differs.argmax()) // size if differs.any() else num_pages
            if shared > page:
                return prefix, shared
        return None

    def follow(self, follower: ChoiceRef, prefix: InflightPrefix, page: int) -> None:
        prefix.followers[follower] = page
        self._following[follower] = prefix

    def leave(self, follower: ChoiceRef) -> bool:
        """Stop following; False if it was not."""
        prefix = self._following.pop(follower, None)
        if prefix is None:
            return False
        del prefix.followers[follower]
        return True

    def progress(self, leader: ChoiceRef, num_pages: int) -> list[ChoiceRef]:
        """The leader has committed `num_pages` pages; returns the followers that this releases."""
        prefix = self._by_leader.get(leader)
        if prefix is None or num_pages <= prefix.low:
            return []
        prefix.low = num_pages
        if prefix.low >= prefix.high:
            return self.end(leader)
        return self._release(prefix, [ref for ref, page in prefix.followers.items() if page <= prefix.low])

    def end(self, leader: ChoiceRef) -> list[ChoiceRef]:
        """The prefix is over, committed or not; returns the followers that this releases."""
        prefix = self._by_leader.pop(leader, None)
        if prefix is None:
            return []
        start = self._start(prefix)
        del self._by_start[start][leader]
        if not self._by_start[start]:
            del self._by_start[start]
        return self._release(prefix, list(prefix.followers))

    @property
    def num_followers(self) -> int:
        return len(self._following)

    def leaders(self) -> set[ChoiceRef]:
        return set(self._by_leader)

    def follows(self, ref: ChoiceRef) -> bool:
        return ref in self._following

    def _release(self, prefix: InflightPrefix, refs: list[ChoiceRef]) -> list[ChoiceRef]:
        for ref in refs:
            del prefix.followers[ref]
            del self._following[ref]
        return refs

    def _start(self, prefix: InflightPrefix) -> Hashable:
        return prefix.namespace, prefix.tokens[: self._page_size].tobytes()
