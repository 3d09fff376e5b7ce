"""How many pages a choice takes, the line it waits in, and which long prompts wait although there is room.

A choice is charged the pages that its lease takes now, plus a reserve: pages for the tokens it is expected to produce,
at most `num_reserved_decode_tokens` and never past its last possible token. The reserve counts from the exact prompt
length, so the free tail of the last page is part of it. Whoever has a lease keeps its reserve until it has grown into
it. With page 16 and a reserve of 34 tokens, 14 tokens of prompt need 48 tokens in 3 pages, not 16 + 34 in 4.

A prefill worker computes prompts of one length one after the other, so leasing pages for many of them at once keeps
shorter ones out and speeds up nothing. While it works on one, others of about that length wait if the pages leased
for such prompts would come to more than a share of the pool. Nobody of about their length passes them there, and
whoever else does so does them no harm.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator

from headstart.core.layout import pages_for
from headstart.core.messages import WorkerRef
from headstart.scheduler.decode.states import Preparing, Waiting

EARLY_SHARE = 0.375
"""Share of the pool that open tickets of about the same length may lease."""
FEW_PAGES = 1 / 64
"""Share of the pool below which a prompt is too short to wait for its turn."""


def pages_to_lease(num_tokens: int, hit_pages: int, page_size: int) -> int:
    """Pages that a lease behind a hit takes: for every token up to and with the last one."""
    return pages_for(num_tokens, page_size) - hit_pages


def pages_in_reserve(num_tokens: int, max_len: int, num_reserved: int, num_pages: int, page_size: int) -> int:
    """Pages beyond the `num_pages` held that a choice of `num_tokens` tokens is expected to grow into.

    Its last possible token gets no KV.
    """
    expected = min(num_tokens + num_reserved, max_len - 1)
    return max(0, pages_for(expected, page_size) - num_pages)


class WaitingLine:
    """Waiting choices in the order they are considered: retracted ones first, then by arrival."""

    def __init__(self) -> None:
        self._line: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._line))

    def add(self, entry: Waiting) -> None:
        insort(self._line, entry, key=_place)

    def remove(self, entry: Waiting) -> None:
        self._line.remove(entry)

    def bypass(self, entry: Waiting, unharmed: Collection[Waiting]) -> None:
        """Count that `entry` is admitted before others that would have gained by its place."""
        for other in self._line:
            if _place(other) >= _place(entry):
                break
            if other not in unharmed:
                other.num_bypassed += 1


class LongPromptThrottle:
    """Which long prompts wait in one pass of admission. `waiting` are those that do."""

    def __init__(self, preparing: Iterable[Preparing], num_pages: int) -> None:
        self.waiting: set[Waiting] = set()
        self._owed: list[tuple[WorkerRef, int]] = []
        self._num_pages = num_pages
        self._leased = [
            (entry.ticket.worker, len(entry.ticket.pages))
            for entry in preparing
            if 2 * len(entry.ticket.pages) >= FEW_PAGES * num_pages
        ]

    def admit(self, worker: WorkerRef, num_new: int) -> None:
        """A ticket for `worker` is about to be opened behind `num_new` new pages."""
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


def _place(entry: Waiting) -> tuple[bool, int]:
    return not entry.retracted, entry.choice.order


def _are_alike(num: int, other: int) -> bool:
    return num <= 2 * other and other <= 2 * num
