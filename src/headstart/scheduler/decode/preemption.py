"""Pages for the tokens of the next step, and who gives way when there are none.

A running row that needs a page: evict; else retract the youngest ready choice; else cancel the youngest preparing one,
whose pages count as coming once its writer was asked to stop, and the row is skipped while those suffice; else retract a
running one, never the oldest, whose pages are coming while steps in flight may touch them. A choice that is alone and
still finds no page fails; nobody else does. Drafts make nobody give way: they are cut to the pages that are there.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from headstart.core.errors import ErrorCode
from headstart.core.layout import pages_for
from headstart.kv.cache import PageLease, PrefixCache
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Abort, Preparing, Ready, Running, ScheduledRow
from headstart.scheduler.tickets import TicketTable


class Preemption:
    def __init__(self, queues: DecodeQueues, cache: PrefixCache, tickets: TicketTable, counters: Counter[str]) -> None:
        self._queues = queues
        self._cache = cache
        self._tickets = tickets
        self._counters = counters

    def reserve_or_preempt(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """Those of `rows`, oldest first, whose entries still run and have pages for what they compute."""
        lacking = self._lacking(rows)
        if lacking:
            rows = self._reserve(rows, lacking)
        for row in rows:
            if row.drafts is not None:
                self._reserve_drafts(row)
        return rows

    def _reserve(self, rows: list[ScheduledRow], lacking: dict[PageLease, int]) -> list[ScheduledRow]:
        self._cache.make_room(sum(lacking.values()), lacking.items())
        num_skipped = 0  # pages that skipped rows lack
        kept: list[ScheduledRow] = []
        for row in rows:
            entry, num_pages = row.entry, lacking.get(row.entry.lease, 0)
            if entry.has_left:
                continue  # it gave way to an older one
            if not num_pages or self._grow(entry, num_pages, num_skipped):
                kept.append(row)
            elif not entry.has_left:
                num_skipped += num_pages
                self._counters["rows_skipped"] += 1
        return [row for row in kept if not row.entry.has_left]

    def _grow(self, entry: Running, num_pages: int, num_skipped: int) -> bool:
        """Whether the entry has its pages now. If not it is skipped, was retracted, or failed."""
        queues = self._queues
        while not self._cache.try_extend(entry.lease, num_pages):
            if (ready := youngest(queues.ready.values())) is not None:
                queues.retract(ready)
            elif num_skipped + num_pages <= queues.num_coming():
                return False
            elif (preparing := youngest(queues.preparing.values())) is not None:
                self._counters["preparing_cancelled"] += 1
                queues.send_back(preparing)
            elif (victim := running_victim(queues.running.values(), self._cache.page_size)) is not None:
                queues.retract(victim)
                if victim is entry:
                    return False
            elif self._tickets.num_open_pages() or queues.num_coming():
                return False
            else:
                message = f"no page for token {len(entry.choice.sequence)}: the pool is full and nothing else runs"
                queues.end(entry.choice, Abort(ErrorCode.TOO_LONG, message))
                return False
        return True

    def _lacking(self, rows: list[ScheduledRow]) -> dict[PageLease, int]:
        """The leases with too few pages for what `rows` compute, drafts apart, and how many they lack."""
        size = self._cache.page_size
        lacking: dict[PageLease, int] = {}
        for row in rows:
            stop, lease = row.start + row.num_new, row.entry.lease
            if stop > len(lease.pages) * size:
                lacking[lease] = pages_for(stop, size) - len(lease.pages)
        return lacking

    def _reserve_drafts(self, row: ScheduledRow) -> None:
        assert row.drafts is not None
        lease, size = row.entry.lease, self._cache.page_size
        lacks = pages_for(row.stop + len(row.drafts), size) - len(lease.pages)
        if lacks > 0 and not self._cache.try_extend(lease, lacks):
            room = len(lease.pages) * size - row.stop
            row.drafts = row.drafts[:room] if room else None


_Entry = TypeVar("_Entry", Preparing, Ready)


def youngest(entries: Iterable[_Entry]) -> _Entry | None:
    """The last to arrive gives way first."""
    return max(entries, key=lambda entry: entry.choice.order, default=None)


def running_victim(running: Iterable[Running], page_size: int) -> Running | None:
    """The one that frees most pages of its own per token to compute again; never the oldest.

    Pages of the prefix that it found in the cache are left out on both sides: others may hold them, and they stay
    matchable. Ties go to the youngest.
    """

    def worth(entry: Running) -> tuple[float, int]:
        pages = len(entry.lease.pages) - entry.hit_pages
        tokens = entry.choice.sequence.num_computed - entry.hit_pages * page_size
        return pages / max(1, tokens), entry.choice.order

    entries = sorted(running, key=lambda entry: entry.choice.order)
    return max(entries[1:], key=worth, default=None)
