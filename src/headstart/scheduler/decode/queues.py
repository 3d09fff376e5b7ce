"""Every unfinished choice and what its entry holds: the moves between queues that `entries` draws."""

from collections import Counter, deque
from collections.abc import Iterable
from sys import maxsize

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.core.errors import InvariantError
from headstart.core.layout import pages_for
from headstart.core.messages import TicketRef
from headstart.core.request import ChoiceRef
from headstart.kv.cache import PageLease, PrefixCache
from headstart.scheduler.decode.batching import InflightStep
from headstart.scheduler.decode.inflight_prefixes import InflightPrefix, InflightPrefixes
from headstart.scheduler.decode.miss_reason import CommittedPages
from headstart.scheduler.decode.states import (
    Choice,
    Entry,
    Holder,
    Preparing,
    Ready,
    Running,
    ScheduledRow,
    Waiting,
)
from headstart.scheduler.decode.waiting import WaitingLine, pages_in_reserve
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.tickets import Phase, TicketTable

OUTPUT_PAGES = 8


class DecodeQueues:
    """`stirred` says that something changed which may let a waiting choice in."""

    def __init__(self, cache: PrefixCache, limits: DecodeLimits, calls: TicketTable, counters: Counter[str]) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.limits = limits
        self.calls = calls
        self.counters = counters
        self.claims = InflightPrefixes(cache.page_size)
        self.committed = CommittedPages(cache.page_size)
        self.line = WaitingLine()
        self.entries: dict[ChoiceRef, Entry] = {}
        self.preparing: dict[TicketRef, Preparing] = {}
        self.ready: dict[ChoiceRef, Ready] = {}
        self.running: dict[ChoiceRef, Running] = {}
        self.steps: deque[InflightStep] = deque()  # in flight, oldest first
        self.stirred = False

    # ---- what it adds up to ------------------------------------------------------------------------------------------

    @property
    def num_holders(self) -> int:
        return len(self.preparing) + len(self.ready) + len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.line) + self.claims.num_followers

    def num_queued_tokens(self) -> int:
        """Tokens without KV of every choice that does not decode yet."""
        num_tokens = 0
        for entry in self.entries.values():
            num_missing = entry.choice.sequence.num_missing
            if num_missing > 1 or not isinstance(entry, Running):
                num_tokens += num_missing
        return num_tokens

    def holders(self) -> Iterable[Holder]:
        yield from self.preparing.values()
        yield from self.ready.values()
        yield from self.running.values()

    def reserve(self, choice: Choice, num_pages: int) -> int:
        """Pages that `choice`, holding `num_pages`, is expected to grow into."""
        reserved = self.limits.num_reserved_decode_tokens
        return pages_in_reserve(len(choice.sequence), choice.max_len, reserved, num_pages, self.page_size)

    def most_reserved(self) -> int:
        """Never less than `reserved`: every holder has pages for all its tokens but the last."""
        return self.num_holders * pages_for(self.limits.num_reserved_decode_tokens + 1, self.page_size)

    def reserved(self) -> int:
        return sum(self.reserve(entry.choice, len(entry.lease.pages)) for entry in self.holders())

    # ---- moves -------------------------------------------------------------------------------------------------------

    def wait(self, choice: Choice, retracted: bool = False) -> None:
        entry = Waiting(choice, retracted)
        self.entries[choice.ref] = entry
        self.line.add(entry)
        self.stirred = True

    def park(self, entry: Waiting, claim: InflightPrefix, page: int) -> None:
        """Out of the line until `claim` is past `page` or over."""
        self.line.remove(entry)
        self.claims.follow(entry.choice.ref, claim, page)
        self.counters["followed"] += 1

    def unpark(self, refs: Iterable[ChoiceRef]) -> None:
        """Back into the line, in their old places."""
        for ref in refs:
            entry = self.entries[ref]
            assert isinstance(entry, Waiting)
            self.line.add(entry)
            self.stirred = True

    def stop_following(self, choice: Choice) -> None:
        """It has waited for its leader long enough."""
        if self.claims.leave(choice.ref):
            self.unpark([choice.ref])
        self.stirred = True

    def claim(self, choice: Choice, lease: PageLease) -> None:
        """Others wait for the whole pages of this prompt instead of computing them again."""
        request, tokens = choice.request, choice.sequence.tokens
        if request.cacheable:
            self.claims.make(choice.ref, request.namespace, tokens, lease.num_shared, len(tokens) // self.page_size)

    def prepare(self, entry: Preparing) -> None:
        self.entries[entry.choice.ref] = entry
        self.preparing[entry.call.ref] = entry

    def make_ready(self, choice: Choice, lease: PageLease, hit_pages: int, chunked: bool) -> None:
        entry = Ready(choice, lease, hit_pages, chunked)
        self.entries[choice.ref] = entry
        self.ready[choice.ref] = entry

    def detach(self, entry: Preparing) -> None:
        """Its call is over or loose; the caller puts the lease into the next entry."""
        del self.preparing[entry.call.ref]
        del self.entries[entry.choice.ref]

    def run(self, entry: Ready) -> None:
        del self.ready[entry.choice.ref]
        prompt_pages = len(entry.choice.sequence) // self.page_size
        running = Running(entry.choice, entry.lease, entry.hit_pages, entry.chunked, prompt_pages)
        running.commit_at = self._next_commit(running)
        self.entries[entry.choice.ref] = running
        self.running[entry.choice.ref] = running

    def sort_running(self) -> None:
        """Oldest first: the oldest gets pages first."""
        self.running = dict(sorted(self.running.items(), key=lambda item: item[1].choice.order))

    def retract(self, entry: Ready | Running) -> None:
        """Keep its whole pages matchable, let go of them, and queue it before new admissions."""
        entry.choice.record.num_retractions += 1
        self.counters["retractions"] += 1
        self.leave(entry)
        entry.choice.sequence.num_computed = 0
        self.wait(entry.choice, retracted=True)

    def send_back(self, entry: Preparing) -> None:
        """To the waiting line, holding nothing; what has arrived stays matchable."""
        self.leave(entry)
        entry.choice.sequence.num_computed = 0
        self.wait(entry.choice)

    def leave(self, entry: Entry) -> None:
        """Take the entry out and release what it holds. Pages that a writer or a step in flight may touch stay
        inflight; its choice has no entry afterwards."""
        ref = entry.choice.ref
        del self.entries[ref]
        self.stirred = True
        if isinstance(entry, Waiting):
            if not self.claims.leave(ref):
                self.line.remove(entry)
            return
        match entry:
            case Preparing():
                del self.preparing[entry.call.ref]
                self.calls.cancel(entry.call)
            case Ready():
                del self.ready[ref]
            case Running():
                del self.running[ref]
                if entry.inflight:
                    self._hold(entry, entry.lease.pages)
                entry.has_left = True
        self.commit(entry)
        self.unpark(self.claims.end(ref))
        self.cache.release(entry.lease)

    # ---- pages -------------------------------------------------------------------------------------------------------

    def _hold(self, entry: Running, pages: Int32Array) -> InflightStep:
        """Keep these of its pages until the last step in flight that has a row of the entry is over. Returns that step."""
        step = next(step for step in reversed(self.steps) if step.has(entry))
        self.cache.add_reader(pages)
        step.held.append(pages)
        return step

    def commit(self, entry: Holder) -> None:
        """Make the entry's computed whole pages matchable, and tell those who wait for them."""
        choice, lease = entry.choice, entry.lease
        sequence = choice.sequence
        if not choice.request.cacheable or sequence.num_computed // self.page_size <= lease.num_shared:
            return
        tokens, first = sequence.tokens, lease.num_shared
        last = sequence.num_computed // self.page_size
        step = None
        if isinstance(entry, Running) and entry.inflight and not entry.has_left:
            step = self._hold(entry, lease.pages[first:last])  # the commit may free what rows in flight read
        num_remapped = self.cache.commit(lease, tokens, sequence.num_computed)
        self.counters["pages_remapped"] += num_remapped
        if step is not None and not num_remapped:
            self.cache.drop_reader(step.held.pop())
        self.committed.note(choice.request.namespace, tokens, first, lease.num_shared)
        self.unpark(self.claims.progress(choice.ref, lease.num_shared))

    def commit_computed(self, entry: Running) -> None:
        """From `commit_at` on. Outputs enter the tree some pages at a time, and all of them when the entry leaves."""
        self.commit(entry)
        entry.commit_at = self._next_commit(entry)

    def _next_commit(self, entry: Running) -> int:
        if not entry.choice.request.cacheable:
            return maxsize
        num_shared = entry.lease.num_shared
        num_new = 1 if num_shared < entry.prompt_pages else OUTPUT_PAGES
        return (num_shared + num_new) * self.page_size

    def take_step(self, step_id: int) -> list[ScheduledRow]:
        """The rows of the oldest step in flight, which has ended: it touches no page any more. None if it is another."""
        if not self.steps or self.steps[0].step_id != step_id:
            return []
        step = self.steps.popleft()
        for pages in step.held:
            self.cache.drop_reader(pages)
            self.stirred = True
        return step.rows

    def num_coming(self) -> int:
        """Pages that nobody leases and that come back soon: steps in flight may touch them, or their writer was asked to
        stop a moment ago."""
        num_inflight = self.cache.counts().inflight if self.steps else 0
        num_read = num_inflight - self.calls.num_open_pages() if num_inflight else 0
        return num_read + self.calls.num_coming()

    # ---- proof -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless every lease, ticket and place in line has exactly one owner."""
        self.cache.check()
        in_line = set(map(id, self.line))
        for ref, entry in self.entries.items():
            if entry.choice.ref != ref or not self._is_placed(entry, in_line):
                raise InvariantError(f"{ref} is not where its {type(entry).__name__} entry says")
        placed = self.num_holders + self.num_waiting
        if placed != len(self.entries):
            raise InvariantError(f"{placed} places for {len(self.entries)} unfinished choices")
        leases = [entry.lease for entry in self.holders()]
        if len({id(lease) for lease in leases}) != len(leases):
            raise InvariantError("two entries own one lease")
        if any(len(entry.lease.pages) * self.page_size < len(entry.choice.sequence) - 1 for entry in self.holders()):
            raise InvariantError("a holder lacks pages for tokens before its last one")
        if any(entry.commit_at != self._next_commit(entry) for entry in self.running.values()):
            raise InvariantError("a row commits too early or too late")
        rows = [row for step in self.steps for row in step.rows]
        if any(not entry.inflight == [row for row in rows if row.entry is entry] for entry in self.running.values()):
            raise InvariantError("a row in flight is not where its entry has it")
        if not self.claims.leaders() <= {entry.choice.ref for entry in self.holders()}:
            raise InvariantError("a claim outlives its leader")
        self._check_calls()

    def _check_calls(self) -> None:
        self.calls.check()
        opened: list[int] = []
        for call in self.calls:
            opened.extend(call.pages[call.missing].tolist())
            owner = self.preparing.get(call.ref)
            owned = call.phase in (Phase.OPEN, Phase.DONE)
            if owned != (owner is not None and owner.call is call):
                raise InvariantError(f"{call.ref} is {call.phase.value} but its owner is {owner}")
        if len(set(opened)) != len(opened):
            raise InvariantError("two tickets may write one page")
        for entry in self.preparing.values():
            if self.calls.get(entry.call.ref) is not entry.call:
                raise InvariantError(f"{entry.choice.ref} prepares without an open ticket")
        inflight = self.cache.counts().inflight
        tables = [pages for step in self.steps for pages in step.held]
        held = np.unique(np.concatenate(tables)) if tables else ()
        if not len(opened) <= inflight <= len(opened) + len(held):
            raise InvariantError(f"{inflight} pages inflight; {len(opened)} under tickets, {len(held)} under a step")

    def _is_placed(self, entry: Entry, in_line: set[int]) -> bool:
        ref = entry.choice.ref
        match entry:
            case Waiting():
                return self.claims.follows(ref) != (id(entry) in in_line)
            case Preparing():
                return self.preparing.get(entry.call.ref) is entry
            case Ready():
                return self.ready.get(ref) is entry
            case Running():
                return self.running.get(ref) is entry
