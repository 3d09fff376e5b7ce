"""Calls that wait for admission to a prefill worker, oldest first.

Who finds no room in the next step is passed by shorter ones; who finds no pages, a bounded number of times.
"""

import sys
from collections.abc import Callable, Iterator, Mapping

from headstart.scheduler.decode.waiting import MAX_BYPASSED
from headstart.scheduler.limits import PrefillLimits
from headstart.scheduler.prefill.batching import has_room
from headstart.scheduler.prefill.states import Call, CallKey, Run


class PrefillQueue:
    def __init__(self, limits: PrefillLimits) -> None:
        self._limits = limits
        self._calls: list[Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def __contains__(self, key: CallKey) -> bool:
        return key in [call.key for call in self._calls]

    def add(self, call: Call) -> None:
        self._calls.append(call)

    def drop(self, ends: Callable[[Call], bool]) -> list[Call]:
        """Take out the calls that end, and return them."""
        dropped = [call for call in self._calls if ends(call)]
        if dropped:
            self._calls = [call for call in self._calls if not ends(call)]
        return dropped

    def admit(self, runs: Mapping[CallKey, Run], try_admit: Callable[[Call], bool]) -> None:
        """Take out whoever gets in now. `try_admit` makes it one of `runs`; False where there are no pages for it."""
        budget, max_runs = self._limits.chunked_prefill_size, self._limits.max_running_requests
        without_pages: list[Call] = []
        shortest_out = sys.maxsize  # a call that would compute as much as one that did not get in does not either
        for call in tuple(self._calls):
            if len(runs) >= max_runs:
                break
            if call.num_expected >= shortest_out:
                continue
            if has_room(call.num_expected, runs.values(), budget):
                if try_admit(call):
                    self._calls.remove(call)
                    for other in without_pages:
                        other.num_bypassed += 1
                    continue
                if call.num_bypassed >= MAX_BYPASSED:
                    break
                without_pages.append(call)
            shortest_out = call.num_expected
