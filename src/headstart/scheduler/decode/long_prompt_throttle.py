"""LongPromptThrottle of long prompts: pages are not leased for those that would only wait for another at the prefill worker.

A prefill worker computes prompts of one length one after the other, so leasing pages for many of them at once keeps
shorter ones out and speeds up nothing. While it works on one, others of about that length wait where the pages leased
for such prompts would come to more than a share of the pool. Nobody of about their length passes them there, and
whoever else does does them no harm.
"""

from collections.abc import Iterable

from headstart.core.messages import WorkerRef
from headstart.scheduler.decode.states import Preparing, Waiting

EARLY_SHARE = 0.375
"""Share of the pool that open calls of about the same length may lease."""
FEW_PAGES = 1 / 64
"""Share of the pool below which a prompt is too short to wait for its turn."""


class LongPromptThrottle:
    """Of one pass of admission. `waiting` are those that wait for their turn."""

    def __init__(self, preparing: Iterable[Preparing], num_pages: int) -> None:
        self.waiting: set[Waiting] = set()
        self._owed: list[tuple[WorkerRef, int]] = []
        self._num_pages = num_pages
        self._leased = [
            (entry.call.worker, len(entry.call.pages))
            for entry in preparing
            if 2 * len(entry.call.pages) >= FEW_PAGES * num_pages
        ]

    def take(self, worker: WorkerRef, num_new: int) -> None:
        """A call to `worker` is about to be opened behind `num_new` new pages."""
        self._leased.append((worker, num_new))

    def waits(self, entry: Waiting, worker: WorkerRef, num_new: int) -> bool:
        """Whether `worker` has a prompt of about this length, and leases for one more would come to too much, or it
        owes the next turn to an earlier entry."""
        if num_new < FEW_PAGES * self._num_pages:
            return False
        leased = [(other, num) for other, num in self._leased if _are_alike(num, num_new)]
        has_one = any(other == worker for other, _ in leased)
        is_owed = any(other == worker and _are_alike(num, num_new) for other, num in self._owed)
        too_much = num_new + sum(num for _, num in leased) > EARLY_SHARE * self._num_pages
        if not is_owed and not (has_one and too_much):
            return False
        self.waiting.add(entry)
        self._owed.append((worker, num_new))
        return True


def _are_alike(num: int, other: int) -> bool:
    return num <= 2 * other and other <= 2 * num
