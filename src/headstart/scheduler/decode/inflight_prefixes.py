"""InflightPrefixes: who is about to commit which pages of which prompt, and who waits for that instead of fetching them again.

A claim covers the whole prompt pages [low, high) that its leader lacked when it was leased. `low` rises as they are
committed. A follower names the page up to which the two prompts agree; it is released once the claim is past that page
or ends, for whatever reason, and matches again. The first to do so becomes the leader of what is still missing.
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
    followers: dict[ChoiceRef, int] = field(default_factory=dict)  # follower -> page it waits for the claim to reach


class InflightPrefixes:
    """InflightPrefixes by leader, found by namespace and first page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._by_leader: dict[ChoiceRef, InflightPrefix] = {}
        self._by_start: dict[Hashable, dict[ChoiceRef, InflightPrefix]] = {}
        self._following: dict[ChoiceRef, InflightPrefix] = {}

    def __len__(self) -> int:
        return len(self._by_leader)

    def make(self, leader: ChoiceRef, namespace: bytes, tokens: Int32Array, low: int, high: int) -> None:
        """`leader` will commit pages [low, high) of `tokens`; nothing to claim where that is empty."""
        if low >= high:
            return
        claim = InflightPrefix(leader, namespace, tokens[: high * self._page_size], low, high)
        self._by_leader[leader] = claim
        self._by_start.setdefault(self._start(claim), {})[leader] = claim

    def find(self, namespace: bytes, tokens: Int32Array, page: int, limit: int) -> tuple[InflightPrefix, int] | None:
        """The claim that will commit `page` of `tokens`, and how many pages (at most `limit`) the two will share."""
        size = self._page_size
        if page >= limit:
            return None
        for claim in self._by_start.get((namespace, tokens[:size].tobytes()), {}).values():
            if not claim.low <= page < claim.high:
                continue
            if not np.array_equal(
                claim.tokens[page * size : (page + 1) * size], tokens[page * size : (page + 1) * size]
            ):
                continue
            num_pages = min(limit, claim.high)
            differs = claim.tokens[: num_pages * size] != tokens[: num_pages * size]
            shared = int(differs.argmax()) // size if differs.any() else num_pages
            if shared > page:
                return claim, shared
        return None

    def follow(self, follower: ChoiceRef, claim: InflightPrefix, page: int) -> None:
        claim.followers[follower] = page
        self._following[follower] = claim

    def leave(self, follower: ChoiceRef) -> bool:
        """Stop following; False if it was not."""
        claim = self._following.pop(follower, None)
        if claim is None:
            return False
        del claim.followers[follower]
        return True

    def progress(self, leader: ChoiceRef, num_pages: int) -> list[ChoiceRef]:
        """The leader has committed `num_pages` pages; returns the followers that this releases."""
        claim = self._by_leader.get(leader)
        if claim is None or num_pages <= claim.low:
            return []
        claim.low = num_pages
        if claim.low >= claim.high:
            return self.end(leader)
        return self._release(claim, [ref for ref, page in claim.followers.items() if page <= claim.low])

    def end(self, leader: ChoiceRef) -> list[ChoiceRef]:
        """The claim is over, kept or not; returns the followers that this releases."""
        claim = self._by_leader.pop(leader, None)
        if claim is None:
            return []
        start = self._start(claim)
        del self._by_start[start][leader]
        if not self._by_start[start]:
            del self._by_start[start]
        return self._release(claim, list(claim.followers))

    @property
    def num_followers(self) -> int:
        return len(self._following)

    def leaders(self) -> set[ChoiceRef]:
        return set(self._by_leader)

    def follows(self, ref: ChoiceRef) -> bool:
        return ref in self._following

    def _release(self, claim: InflightPrefix, refs: list[ChoiceRef]) -> list[ChoiceRef]:
        for ref in refs:
            del claim.followers[ref]
            del self._following[ref]
        return refs

    def _start(self, claim: InflightPrefix) -> Hashable:
        return claim.namespace, claim.tokens[: self._page_size].tobytes()
