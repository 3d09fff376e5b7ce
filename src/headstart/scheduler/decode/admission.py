"""Admission: which waiting choices get a lease in this pass, and where their delta goes.

A pass runs only if something changed since the last one. It takes the line in order and matches a bounded number of
choices that then are not admitted. One that does not fit is bypassed by those that do, a bounded number of times;
retracted choices are not. A pass pins what it admits first, evicts once for all of it, and allocates then.
`LongPromptThrottle` says which long prompts wait although there is room.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from headstart.core.clock import Clock
from headstart.core.errors import InvariantError
from headstart.core.layout import reusable_len
from headstart.core.messages import WorkerRef
from headstart.kv.cache import Match, PageLease, PrefixCache
from headstart.scheduler.decode.prefill_client import PrefillClient
from headstart.scheduler.decode.prefill_workers import LATER, Local, NoPeer, Place, Placement, PrefillPeer
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Choice, LastMatch, Waiting
from headstart.scheduler.decode.waiting import LongPromptThrottle, pages_to_lease
from headstart.scheduler.limits import MAX_BYPASSED

MAX_SCANNED = 128
MAX_FAILED_MATCHES = 16
MATCH_AGAIN_S = 0.2
"""A choice that was not admitted is matched again after this, or once its last match would fit."""


class Blocked(Enum):
    """What a choice waits for."""

    PAGES = "pages"
    CREDIT = "credit"
    TURN = "turn"
    LEADER = "leader"


@dataclass(slots=True, eq=False)
class Admitted:
    choice: Choice
    lease: PageLease  # the hit, pinned
    num_new: int
    place: Local | PrefillPeer


@dataclass(slots=True, eq=False)
class AdmissionPass:
    """What one pass has promised so far."""

    now: float
    throttle: LongPromptThrottle
    admitted: list[Admitted] = field(default_factory=list)
    num_new: int = 0  # pages to allocate for the admitted
    num_reserved: int = 0  # pages in reserve for the admitted
    reserved_before: int | None = None  # pages in reserve for others, once somebody had to know
    planned: dict[WorkerRef, list[int]] = field(default_factory=dict)  # prompt tokens of tickets to open
    num_failed_matches: int = 0
    no_credit: tuple[float, float] = inf, -inf  # shortest and longest prompt that found none
    credit_is_spoken_for: bool = False


class Admission:
    def __init__(
        self,
        queues: DecodeQueues,
        cache: PrefixCache,
        placement: Placement,
        prefill_client: PrefillClient,
        clock: Clock,
        counters: Counter[str],
    ) -> None:
        self._queues = queues
        self._cache = cache
        self._placement = placement
        self._prefill_client = prefill_client
        self._clock = clock
        self._counters = counters

    def advance(self, max_holders: int) -> None:
        """One pass. So many choices may hold pages."""
        self._queues.begin_admission()
        if len(self._queues.waiting):
            throttle = LongPromptThrottle(self._queues.preparing.values(), self._cache.num_pages)
            this_pass = AdmissionPass(self._clock.now(), throttle)
            self._scan(this_pass, max_holders)
            self._allocate(this_pass)

    def _scan(self, this_pass: AdmissionPass, max_holders: int) -> None:
        for position, entry in enumerate(self._queues.waiting):
            is_full = self._queues.num_holders + len(this_pass.admitted) >= max_holders
            if is_full or position == MAX_SCANNED or this_pass.num_failed_matches == MAX_FAILED_MATCHES:
                break
            blocked = self._consider(entry, this_pass)
            waits_no_longer = entry.retracted or entry.num_bypassed >= MAX_BYPASSED
            if blocked is Blocked.PAGES and waits_no_longer:
                break
            if blocked is Blocked.CREDIT and waits_no_longer:
                this_pass.credit_is_spoken_for = True

    def _consider(self, entry: Waiting, this_pass: AdmissionPass) -> Blocked | None:
        """Admit the entry, or return what it waits for."""
        blocked = self._still_blocked(entry, this_pass)
        if blocked is not None:
            return blocked
        queues, choice, request = self._queues, entry.choice, entry.choice.request
        tokens, page_size = choice.sequence.tokens, self._cache.page_size
        limit = reusable_len(len(tokens), page_size) if request.cacheable else 0
        match = self._cache.match(request.namespace, tokens, limit)
        may_follow = request.cacheable and this_pass.now < choice.fallback_at
        if may_follow and queues.follow_leader(entry, match.num_pages, limit // page_size):
            return Blocked.LEADER
        num_new = pages_to_lease(len(tokens), match.num_pages, page_size)
        reserve = queues.reserve(choice, match.num_pages + num_new)
        entry.last_match = LastMatch(match.prefix_len, num_new, num_new + reserve, this_pass.now + MATCH_AGAIN_S)
        place = self._place(choice, match.prefix_len, this_pass)
        if self._waits_its_turn(entry, num_new, place, this_pass):
            blocked = Blocked.TURN
        elif not self._has_room(num_new + (0 if self._is_alone(this_pass) else reserve), this_pass, match):
            blocked = Blocked.PAGES
        elif isinstance(place, NoPeer):
            blocked = Blocked.CREDIT
        if blocked is not None or isinstance(place, NoPeer):
            this_pass.num_failed_matches += 1
            return blocked
        this_pass.num_reserved += reserve
        self._promise(entry, match, num_new, place, this_pass)
        return None

    def _still_blocked(self, entry: Waiting, this_pass: AdmissionPass) -> Blocked | None:
        """What the entry's last match, if it is not old, says without another."""
        last = entry.last_match
        if last is None or this_pass.now >= last.match_again_at or self._is_alone(this_pass):
            return None
        place = self._place(entry.choice, last.prefix_len, this_pass)
        if self._waits_its_turn(entry, last.num_new, place, this_pass):
            return Blocked.TURN
        if not self._has_room(last.pages_wanted, this_pass):
            return Blocked.PAGES
        return Blocked.CREDIT if isinstance(place, NoPeer) else None

    def _place(self, choice: Choice, start: int, this_pass: AdmissionPass) -> Place:
        """Where the delta would be computed. A length between two that found no credit in this pass finds none."""
        num_tokens, usual = len(choice.sequence) - 1, not choice.failed_on and this_pass.now < choice.fallback_at
        low, high = this_pass.no_credit
        if usual and low <= num_tokens <= high and not self._placement.is_short(choice, start):
            return LATER
        place = self._placement.pick(choice, start, this_pass.planned, this_pass.now)
        if usual and place is LATER:
            this_pass.no_credit = min(low, num_tokens), max(high, num_tokens)
        return LATER if isinstance(place, PrefillPeer) and this_pass.credit_is_spoken_for else place

    def _waits_its_turn(self, entry: Waiting, num_new: int, place: Place, this_pass: AdmissionPass) -> bool:
        if not isinstance(place, PrefillPeer) or entry.retracted:
            return False
        return this_pass.throttle.waits(entry, place.worker, num_new)

    def _has_room(self, num_pages: int, this_pass: AdmissionPass, match: Match | None = None) -> bool:
        """Whether there are so many pages beyond `match` that neither this pass has promised nor anyone is expected to
        grow into. If there are plenty it need not be known how many those are."""
        match_pages = 0 if match is None else match.num_pages
        wanted = num_pages + this_pass.num_new + this_pass.num_reserved
        if self._cache.num_available() - match_pages - wanted >= self._queues.most_reserved():
            return True
        if this_pass.reserved_before is None:
            this_pass.reserved_before = self._queues.reserved()
        return self._cache.num_available(match) - wanted >= this_pass.reserved_before

    def _is_alone(self, this_pass: AdmissionPass) -> bool:
        """Nobody else holds pages, so nobody is helped by a reserve."""
        return not this_pass.admitted and not self._queues.num_holders

    def _promise(
        self, entry: Waiting, match: Match, num_new: int, place: Local | PrefillPeer, this_pass: AdmissionPass
    ) -> None:
        choice, queues = entry.choice, self._queues
        queues.waiting.bypass(entry, this_pass.throttle.waiting)
        lease = queues.lease(entry, match)
        self._note_hit(choice, match, this_pass.now)
        this_pass.admitted.append(Admitted(choice, lease, num_new, place))
        this_pass.num_new += num_new
        if isinstance(place, PrefillPeer):
            this_pass.planned.setdefault(place.worker, []).append(len(choice.sequence) - 1)
            this_pass.throttle.admit(place.worker, num_new)

    def _allocate(self, this_pass: AdmissionPass) -> None:
        """Take the promised pages, evicting once, and start each delta."""
        if this_pass.num_new:
            self._cache.make_room(this_pass.num_new, [(each.lease, each.num_new) for each in this_pass.admitted])
        for admitted in this_pass.admitted:
            choice, lease, place = admitted.choice, admitted.lease, admitted.place
            if not self._cache.try_extend(lease, admitted.num_new):
                raise InvariantError("admission promised pages that are not there")
            hit_pages = lease.num_shared
            if isinstance(place, PrefillPeer):
                self._prefill_client.begin(choice, lease, hit_pages, place)
            else:
                self._queues.make_ready(choice, lease, hit_pages, place is Local.CHUNKED, this_pass.now)

    def _note_hit(self, choice: Choice, match: Match, now: float) -> None:
        self._counters["admitted"] += 1
        self._counters["prompt_tokens"] += len(choice.sequence)
        self._counters["hit_tokens"] += match.prefix_len
        if "admitted" not in choice.metrics.timestamps:
            choice.metrics.timestamp("admitted", now)
            choice.metrics.found(match.prefix_len, self._miss_reason(choice, match))

    def _miss_reason(self, choice: Choice, match: Match) -> str:
        if not choice.request.cacheable:
            return "uncacheable"
        if match.prefix_len == reusable_len(len(choice.sequence), self._cache.page_size):
            return ""
        if self._queues.had_page(choice, match.num_pages):
            return "evicted"
        if not match.num_pages:
            return "cold"
        return "diverged" if self._cache.holds_others_behind(match) else "new"
