"""Every open choice and what its entry holds: the moves between queues that `states` draws, and the one way out, `end`."""

from collections import Counter, deque
from collections.abc import Iterable
from sys import maxsize

import numpy as np

from headstart.core.arrays import Int32Array
from headstart.core.errors import InvariantError
from headstart.core.layout import pages_for
from headstart.core.messages import TicketRef
from headstart.core.request import ChoiceRef
from headstart.kv.cache import Match, PageLease, PrefixCache
from headstart.scheduler.decode.batching import InflightStep
from headstart.scheduler.decode.deadlines import Deadlines
from headstart.scheduler.decode.gateway_port import GatewayPort
from headstart.scheduler.decode.inflight_prefixes import InflightPrefixes
from headstart.scheduler.decode.metrics import CommittedPages
from headstart.scheduler.decode.states import (
    Choice,
    Entry,
    Holder,
    Outcome,
    Preparing,
    Ready,
    Running,
    ScheduledRow,
    Waiting,
)
from headstart.scheduler.decode.waiting import WaitingLine, pages_in_reserve
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.tickets import Phase, Ticket, TicketTable

OUTPUT_PAGES = 8


class DecodeQueues:
    """Its dictionaries are for others to read; what changes them is here."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: DecodeLimits,
        tickets: TicketTable,
        gateways: GatewayPort,
        deadlines: Deadlines,
        counters: Counter[str],
    ) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self._limits = limits
        self._tickets = tickets
        self._gateways = gateways
        self._deadlines = deadlines
        self.counters = counters
        self._leaders = InflightPrefixes(cache.page_size)
        self._committed = CommittedPages(cache.page_size)
        self._needs_admission = False
        self.entries: dict[ChoiceRef, Entry] = {}
        self.waiting = WaitingLine()
        self.preparing: dict[TicketRef, Preparing] = {}
        self.ready: dict[ChoiceRef, Ready] = {}
        self.running: dict[ChoiceRef, Running] = {}
        self.steps: deque[InflightStep] = deque()  # in flight, oldest first

    # ---- what it adds up to ------------------------------------------------------------------------------------------

    @property
    def num_holders(self) -> int:
        return len(self.preparing) + len(self.ready) + len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self._leaders.num_followers

    def num_queued_tokens(self) -> int:
        """Tokens without KV of every choice that does not decode yet."""
        num_tokens = 0
        for entry in self.entries.values():
            num_missing = entry.choice.sequence.num_missing
            if num_missing > 1 or not isinstance(entry, Running):
                num_tokens += num_missing
        return num_tokens

    @property
    def is_quiet(self) -> bool:
        """Whether the next pass takes a step's output and launches the same rows again, unless something comes in."""
        can_start = bool(self.ready) and len(self.running) < self._limits.max_running_requests
        if self._needs_admission or can_start or self._tickets.are_watched or len(self.steps) != 1:
            return False
        return not self.steps[0].held and len(self.steps[0].rows) == len(self.running)

    def holders(self) -> Iterable[Holder]:
        yield from self.preparing.values()
        yield from self.ready.values()
        yield from self.running.values()

    def reserve(self, choice: Choice, num_pages: int) -> int:
        """Pages that `choice`, holding `num_pages`, is expected to grow into."""
        reserved = self._limits.num_reserved_decode_tokens
        return pages_in_reserve(len(choice.sequence), choice.max_len, reserved, num_pages, self.page_size)

    def most_reserved(self) -> int:
        """At least `reserved`: every holder has pages for all its tokens but the last."""
        return self.num_holders * pages_for(self._limits.num_reserved_decode_tokens + 1, self.page_size)

    def reserved(self) -> int:
        return sum(self.reserve(entry.choice, len(entry.lease.pages)) for entry in self.holders())

    def num_coming(self) -> int:
        """Pages that nobody leases and that come back soon: steps in flight may touch them, or their writer was asked to
        stop a moment ago."""
        num_read = self.cache.counts().inflight - self._tickets.num_open_pages() if self.steps else 0
        return num_read + self._tickets.num_coming()

    # ---- admission ---------------------------------------------------------------------------------------------------

    @property
    def needs_admission(self) -> bool:
        """Whether something changed that may let a waiting choice in."""
        return self._needs_admission

    def request_admission(self) -> None:
        self._needs_admission = True

    def begin_admission(self) -> None:
        """What changes from now on is for the next pass of admission."""
        self._needs_admission = False

    def enqueue(self, choice: Choice) -> None:
        """A new choice: it waits."""
        self._deadlines.set(choice, choice.fallback_at)
        self._wait(choice)

    def _wait(self, choice: Choice, retracted: bool = False) -> None:
        entry = Waiting(choice, retracted)
        self.entries[choice.ref] = entry
        self.waiting.add(entry)
        self._needs_admission = True

    def follow_leader(self, entry: Waiting, num_matched: int, limit: int) -> bool:
        """Take the entry out of line if another choice is about to commit the next page of its prompt, until that one is
        past what the two share, or over. Pages from `limit` on do not count."""
        request, tokens = entry.choice.request, entry.choice.sequence.tokens
        found = self._leaders.find(request.namespace, tokens, num_matched, limit)
        if found is None:
            return False
        self.waiting.remove(entry)
        self._leaders.follow(entry.choice.ref, *found)
        self.counters["followed"] += 1
        return True

    def stop_following(self, choice: Choice) -> None:
        """It has waited for its leader long enough."""
        if self._leaders.leave(choice.ref):
            self._release_followers([choice.ref])
        self._needs_admission = True

    def _release_followers(self, refs: Iterable[ChoiceRef]) -> None:
        """Back into the line, in their old places."""
        for ref in refs:
            entry = self.entries[ref]
            assert isinstance(entry, Waiting)
            self.waiting.add(entry)
            self._needs_admission = True

    def lease(self, entry: Waiting, match: Match) -> PageLease:
        """Take the entry out of line and pin its match. The caller extends the lease and puts it into the next queue."""
        choice = entry.choice
        lease = self.cache.try_lease(match, 0)
        if lease is None:
            raise InvariantError("a match made in this pass is stale")
        self.waiting.remove(entry)
        choice.sequence.num_computed = match.prefix_len
        self._lead(choice, lease)
        return lease

    def _lead(self, choice: Choice, lease: PageLease) -> None:
        """Others wait for the whole pages of this prompt instead of computing them again."""
        request, tokens = choice.request, choice.sequence.tokens
        if request.cacheable:
            self._leaders.make(choice.ref, request.namespace, tokens, lease.num_shared, len(tokens) // self.page_size)

    def had_page(self, choice: Choice, page: int) -> bool:
        """Whether the cache ever held this page of the choice, as far as remembered."""
        return self._committed.had(choice.request.namespace, choice.sequence.tokens, page)

    # ---- moves -------------------------------------------------------------------------------------------------------

    def prepare(self, choice: Choice, lease: PageLease, ticket: Ticket, hit_pages: int) -> Preparing:
        """Open a ticket for part of the lease."""
        self._tickets.add(ticket)
        entry = Preparing(choice, lease, ticket, hit_pages)
        self.entries[choice.ref] = entry
        self.preparing[ticket.ref] = entry
        return entry

    def make_ready(self, choice: Choice, lease: PageLease, hit_pages: int, chunked: bool, now: float) -> None:
        entry = Ready(choice, lease, hit_pages, chunked)
        self.entries[choice.ref] = entry
        self.ready[choice.ref] = entry
        choice.metrics.timestamp("ready", now)

    def detach(self, entry: Preparing) -> None:
        """Its ticket is over or cancelled; the caller puts the lease into the next entry."""
        del self.preparing[entry.ticket.ref]
        del self.entries[entry.choice.ref]

    def try_renew(self, entry: Preparing) -> bool:
        """Replace the pages of the ticket that lack KV, which the writer may still write, and detach the entry. Its
        followers match again. False if there are no pages."""
        ticket = entry.ticket
        first = ticket.start // self.page_size + ticket.num_arrived
        if not self.cache.try_replace(entry.lease, first, len(ticket.pages) - ticket.num_arrived):
            return False
        self.detach(entry)
        self._release_followers(self._leaders.end(entry.choice.ref))
        self._lead(entry.choice, entry.lease)
        return True

    def start_ready(self, max_running: int) -> None:
        """As many as may run, oldest first, which is the order in which they get pages and budgets."""
        num_free = max_running - len(self.running)
        oldest = sorted(self.ready.values(), key=lambda entry: entry.choice.order)[: max(0, num_free)]
        for entry in oldest:
            self._run(entry)
        if oldest:
            self.running = dict(sorted(self.running.items(), key=lambda item: item[1].choice.order))

    def _run(self, entry: Ready) -> None:
        del self.ready[entry.choice.ref]
        prompt_pages = len(entry.choice.sequence) // self.page_size
        running = Running(entry.choice, entry.lease, entry.hit_pages, entry.chunked, prompt_pages)
        running.commit_at = self._next_commit(running)
        self.entries[entry.choice.ref] = running
        self.running[entry.choice.ref] = running

    def retract(self, entry: Ready | Running) -> None:
        """Keep its whole pages matchable, release them, and queue it before new admissions."""
        entry.choice.metrics.num_retractions += 1
        self.counters["retractions"] += 1
        self._leave(entry)
        entry.choice.sequence.num_computed = 0
        self._wait(entry.choice, retracted=True)

    def send_back(self, entry: Preparing) -> None:
        """To the waiting line, holding nothing; what has arrived stays matchable."""
        self._leave(entry)
        entry.choice.sequence.num_computed = 0
        self._wait(entry.choice)

    def end(self, choice: Choice, outcome: Outcome) -> None:
        """The only way in which an open choice ends, whatever its state: release what it holds and tell its gateway."""
        self._leave(self.entries[choice.ref])
        self._deadlines.drop(choice)
        self._gateways.end(choice, outcome)

    def _leave(self, entry: Entry) -> None:
        """Take the entry out and release what it holds. Pages that a writer or a step in flight may touch stay
        inflight; its choice has no entry afterwards."""
        ref = entry.choice.ref
        del self.entries[ref]
        self._needs_admission = True
        match entry:
            case Waiting():
                if not self._leaders.leave(ref):
                    self.waiting.remove(entry)
                return
            case Preparing():
                del self.preparing[entry.ticket.ref]
                self._tickets.cancel(entry.ticket)
            case Ready():
                del self.ready[ref]
            case Running():
                del self.running[ref]
                if entry.inflight:
                    self._add_reader(entry, entry.lease.pages)
                entry.has_left = True
        self.commit(entry)
        self._release_followers(self._leaders.end(ref))
        self.cache.release(entry.lease)

    # ---- pages and steps ---------------------------------------------------------------------------------------------

    def _add_reader(self, entry: Running, pages: Int32Array) -> InflightStep:
        """Keep these of its pages until the last step in flight that has a row of the entry is over. Returns that step."""
        step = next(step for step in reversed(self.steps) if step.has(entry))
        self.cache.add_reader(pages)
        step.held.append(pages)
        return step

    def take_step(self, step_id: int) -> list[ScheduledRow]:
        """The rows of the oldest step in flight, which has ended: it touches no page any more. None if it is another."""
        if not self.steps or self.steps[0].step_id != step_id:
            return []
        step = self.steps.popleft()
        for pages in step.held:
            self.cache.drop_reader(pages)
            self._needs_admission = True
        return step.rows

    def commit(self, entry: Holder) -> None:
        """Make the entry's computed whole pages matchable, and release the followers that wait for them."""
        choice, lease = entry.choice, entry.lease
        sequence = choice.sequence
        if not choice.request.cacheable or sequence.num_computed // self.page_size <= lease.num_shared:
            return
        first = lease.num_shared
        step = None
        if isinstance(entry, Running) and entry.inflight and not entry.has_left:
            own = lease.pages[first : sequence.num_computed // self.page_size]
            step = self._add_reader(entry, own)  # the commit may free what rows in flight read
        num_remapped = self.cache.commit(lease, sequence.tokens, sequence.num_computed)
        self.counters["pages_remapped"] += num_remapped
        if step is not None and not num_remapped:
            self.cache.drop_reader(step.held.pop())
        self._committed.add(choice.request.namespace, sequence.tokens, first, lease.num_shared)
        self._release_followers(self._leaders.progress(choice.ref, lease.num_shared))

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

    # ---- proof -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless every lease, ticket and place in line has exactly one owner."""
        self.cache.check()
        in_line = set(map(id, self.waiting))
        for ref, entry in self.entries.items():
            if entry.choice.ref != ref or not self._is_placed(entry, in_line):
                raise InvariantError(f"{ref} is not where its {type(entry).__name__} entry says")
        placed = self.num_holders + self.num_waiting
        if placed != len(self.entries):
            raise InvariantError(f"{placed} places for {len(self.entries)} open choices")
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
        if not self._leaders.leaders() <= {entry.choice.ref for entry in self.holders()}:
            raise InvariantError("a leader holds no pages")
        self._check_tickets()

    def _check_tickets(self) -> None:
        self._tickets.check()
        opened: list[int] = []
        for ticket in self._tickets:
            opened.extend(ticket.pages[ticket.missing].tolist())
            owner = self.preparing.get(ticket.ref)
            owned = ticket.phase in (Phase.OPEN, Phase.DONE)
            if owned != (owner is not None and owner.ticket is ticket):
                raise InvariantError(f"{ticket.ref} is {ticket.phase.value} but its owner is {owner}")
        if len(set(opened)) != len(opened):
            raise InvariantError("two tickets may write one page")
        for entry in self.preparing.values():
            if self._tickets.get(entry.ticket.ref) is not entry.ticket:
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
                return self._leaders.follows(ref) != (id(entry) in in_line)
            case Preparing():
                return self.preparing.get(entry.ticket.ref) is entry
            case Ready():
                return self.ready.get(ref) is entry
            case Running():
                return self.running.get(ref) is entry
