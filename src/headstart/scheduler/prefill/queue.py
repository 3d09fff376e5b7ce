"""Who of the calls is admitted when, and how the admitted share the steps: short prompts pass long ones, and the oldest
always makes progress.

A quarter of a step is the oldest run's. The rest goes to the runs with least left first, and what they leave to the
oldest again. So the oldest prompt is never slower than at a quarter of the speed, and a short one behind it waits for
prompts of its own length only.

A waiting call is admitted when the next step has room for it: not counting runs with more than twice its
length left, which it passes, except for the oldest one's quarter. Since only clearly shorter prompts are let in beside a
run, the pages reserved beside the longest are few. A call waits too while its next page is being computed for another
in a step in flight: it will be a hit. If pages are short, a bounded number of calls pass one that waits for them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from headstart.kv.cache import PrefixCache
from headstart.scheduler.limits import MAX_BYPASSED, PrefillLimits
from headstart.scheduler.prefill.states import Call, Run
from headstart.scheduler.sender import PushKey

NumLeft = Callable[[Run], int]
"""Tokens that a run has left: to compute, or to launch."""


class PrefillQueue:
    """Calls that wait for admission, oldest first."""

    def __init__(self, limits: PrefillLimits, cache: PrefixCache) -> None:
        self._limits = limits
        self._cache = cache
        self._calls: list[Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def __contains__(self, key: PushKey) -> bool:
        return any(call.key == key for call in self._calls)

    def add(self, call: Call) -> None:
        self._calls.append(call)

    def drop(self, ends: Callable[[Call], bool]) -> list[Call]:
        """Take out the calls that end, and return them."""
        dropped = [call for call in self._calls if ends(call)]
        if dropped:
            self._calls = [call for call in self._calls if not ends(call)]
        return dropped

    def candidates(self, runs: Sequence[Run], max_admitted: int, num_left: NumLeft) -> Iterator[Call]:
        """The calls for which there is room beside `runs`, in order, up to `max_admitted` of them taken. The caller either
        takes a candidate out by `admit` and makes it one of `runs`, or leaves it here for want of pages."""
        without_pages: list[Call] = []
        shortest_out = sys.maxsize  # a call that would compute as much as one that did not get in does not either
        for call in tuple(self._calls):
            if max_admitted <= 0:
                return
            if call.num_expected >= shortest_out:
                continue
            if has_room(call.num_expected, map(num_left, runs), self._limits.chunked_prefill_size):
                call.found = self._cache.match_again(call.found)
                if is_being_computed(call, runs, self._cache.page_size):
                    continue
                yield call
                if call not in self._calls:
                    max_admitted -= 1
                    for other in without_pages:
                        other.num_bypassed += 1
                    continue
                if call.num_bypassed >= MAX_BYPASSED:
                    return
                without_pages.append(call)
            shortest_out = call.num_expected

    def admit(self, call: Call) -> None:
        """Take a candidate out."""
        self._calls.remove(call)


def reserved_for_oldest(budget: int) -> int:
    return (budget + 3) // 4


def split_token_budget(runs: Iterable[Run], budget: int) -> list[tuple[Run, int]]:
    """What each run computes in a step of `budget` tokens. `runs` are in order of admission."""
    open_runs = [run for run in runs if run.num_to_launch > 0]
    if not open_runs:
        return []
    oldest, *others = open_runs
    reserved = min(oldest.num_to_launch, reserved_for_oldest(budget))
    left = budget - reserved
    parts: list[tuple[Run, int]] = []
    for run in sorted(others, key=lambda run: run.num_to_launch):
        num_new = min(run.num_to_launch, left)
        left -= num_new
        if num_new:
            parts.append((run, num_new))
    return [(oldest, min(oldest.num_to_launch, reserved + left)), *parts]


def has_room(num_tokens: int, lefts: Iterable[int], budget: int) -> bool:
    """Whether a call that would compute `num_tokens` gets some of the next step, after runs with so many tokens left. Not
    earlier: what runs before a prompt may yet be a hit for it."""
    num_before = 0
    is_oldest = True
    for num_left in lefts:
        if num_left == 0:
            continue
        if num_left <= 2 * num_tokens:
            num_before += num_left
        elif is_oldest:
            num_before += min(num_left, reserved_for_oldest(budget))
        is_oldest = False
    return num_before < budget


def is_being_computed(call: Call, runs: Iterable[Run], page_size: int) -> bool:
    """Whether a step in flight computes, for a run, the page that the call misses first."""
    message, start = call.message, call.found.prefix_len
    stop = start + page_size
    return message.cacheable and any(
        run.num_computed < stop <= run.num_launched
        and run.push.is_open
        and run.message.cacheable
        and run.message.namespace == message.namespace
        and np.array_equal(run.message.tokens[:stop], message.tokens[:stop])
        for run in runs
    )
