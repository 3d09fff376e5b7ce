"""Pages for the tokens of the next step, and who gives way when there are none.

A running row that needs a page: evict; else retract the youngest ready choice; else cancel the youngest preparing one,
whose pages count as coming once its writer was asked to stop, and the row sits out while those suffice; else retract a
running one, never the oldest, whose pages are coming while steps in flight may touch them. A choice that is alone and
still finds no page fails; nobody else does. Drafts make nobody give way: they are cut to the pages that are there.
"""

from headstart.core.errors import ErrorCode
from headstart.core.layout import pages_for
from headstart.kv.cache import PageLease
from headstart.scheduler.decode.gateway_port import GatewayPort
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Running, ScheduledRow
from headstart.scheduler.decode.victims import running_victim, youngest_preparing, youngest_ready


class Preemption:
    def __init__(self, board: DecodeQueues, desk: GatewayPort) -> None:
        self._board = board
        self._desk = desk

    def keep(self, parts: list[ScheduledRow]) -> list[ScheduledRow]:
        """Those of `parts`, oldest first, whose entries still run and have pages for what they compute."""
        wanted = self._wanted(parts)
        if not wanted:
            return self._with_pages_for_drafts(parts)
        self._board.cache.make_room(sum([lacks for _, lacks in wanted]), wanted)
        lacking = dict(wanted)
        num_sitting = 0
        kept: list[ScheduledRow] = []
        for part in parts:
            if not self._runs(part.entry):
                continue  # it gave way to an older one
            lacks = lacking.get(part.entry.lease, 0)
            if not lacks or self._grow(part.entry, lacks, num_sitting):
                kept.append(part)
            elif self._runs(part.entry):
                num_sitting += lacks
                self._board.counters["rows_sat_out"] += 1
        return self._with_pages_for_drafts([part for part in kept if self._runs(part.entry)])

    def _with_pages_for_drafts(self, parts: list[ScheduledRow]) -> list[ScheduledRow]:
        board, size = self._board, self._board.page_size
        for part in parts:
            if part.drafts is None:
                continue
            lease, stop = part.entry.lease, part.stop + len(part.drafts)
            lacks = pages_for(stop, size) - len(lease.pages)
            if lacks > 0 and not board.cache.try_extend(lease, lacks):
                room = len(lease.pages) * size - part.stop
                part.drafts = part.drafts[:room] if room else None
        return parts

    def _grow(self, entry: Running, num_pages: int, num_sitting: int) -> bool:
        """Whether the entry has its pages now. If not it sits out, was retracted, or failed."""
        board = self._board
        while not board.cache.try_extend(entry.lease, num_pages):
            if (ready := youngest_ready(board.ready.values())) is not None:
                board.retract(ready)
            elif num_sitting + num_pages <= board.num_coming():
                return False
            elif (preparing := youngest_preparing(board.preparing.values())) is not None:
                board.counters["preparing_cancelled"] += 1
                board.send_back(preparing)
            elif (victim := running_victim(board.running.values(), board.page_size)) is not None:
                board.retract(victim)
                if victim is entry:
                    return False
            elif board.calls.num_open_pages() or board.num_coming():
                return False
            else:
                board.leave(entry)
                message = f"no page for token {len(entry.choice.sequence)}: the pool is full and nothing else runs"
                self._desk.fail(entry.choice, ErrorCode.TOO_LONG, message)
                return False
        return True

    def _wanted(self, parts: list[ScheduledRow]) -> list[tuple[PageLease, int]]:
        """The leases with too few pages for what `parts` compute, and how many they lack."""
        size = self._board.page_size
        wanted: list[tuple[PageLease, int]] = []
        for part in parts:
            stop, lease = part.start + part.num_new, part.entry.lease
            if stop > len(lease.pages) * size:
                wanted.append((lease, pages_for(stop, size) - len(lease.pages)))
        return wanted

    def _runs(self, entry: Running) -> bool:
        return self._board.running.get(entry.choice.ref) is entry
