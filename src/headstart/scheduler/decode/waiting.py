"""How many pages a choice takes, and the line it waits in.

A choice is charged the pages that its lease takes now, plus a reserve: pages for the tokens it is expected to produce,
at most `num_reserved_decode_tokens` and never past its last possible token. The reserve counts from the exact prompt
length, so the free tail of the last page is part of it. Whoever has a lease keeps its reserve until it has grown into
it. With page 16 and a reserve of 34 tokens, 14 tokens of prompt need 48 tokens in 3 pages, not 16 + 34 in 4.
"""

from bisect import insort
from collections.abc import Collection, Iterator

from headstart.core.layout import pages_for
from headstart.scheduler.decode.states import Waiting


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

    def overtake(self, entry: Waiting, unharmed: Collection[Waiting]) -> None:
        """`entry` was admitted: everyone before it who would have gained by its place was bypassed once more."""
        for other in self._line:
            if _place(other) >= _place(entry):
                break
            if other not in unharmed:
                other.num_bypassed += 1


def _place(entry: Waiting) -> tuple[bool, int]:
    return not entry.retracted, entry.choice.order
