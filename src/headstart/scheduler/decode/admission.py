"""Admission: which waiting choices get a lease in this pass, and where their delta goes.

A pass runs only when something stirred, looks at the line in order and matches a bounded number of choices that then do
not get in. Who does not fit is bypassed by those who do, a bounded number of times; retracted choices are not. A pass
pins what it admits first, evicts once for all of it, and allocates then. `turns` says which long prompts wait although
there is room.
"""

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from headstart.core.clock import Clock
from headstart.core.errors import InvariantError
from headstart.core.layout import reusable_len
from headstart.core.messages import WorkerRef
from headstart.kv.cache import Match, PageLease
from headstart.scheduler.decode.long_prompt_throttle import LongPromptThrottle
from headstart.scheduler.decode.placement import LATER, Local, Placement
from headstart.scheduler.decode.prefill_client import PrefillClient
from headstart.scheduler.decode.prefill_workers import NoPeer, PrefillPeer
from headstart.scheduler.decode.queues import DecodeQueues
from headstart.scheduler.decode.states import Choice, LastMatch, Waiting
from headstart.scheduler.decode.waiting import pages_to_lease
from headstart.scheduler.limits import MAX_BYPASSED

MAX_SCANNED = 128
MAX_VAIN_MATCHES = 16
LOOK_AGAIN_S = 0.2
"""A choice that did not get in is matched again after this, or once its last match would fit."""


class Blocked(Enum):
    PAGES = "pages"
    CREDIT = "credit"
    TURN = "turn"
    LEADER = "leader"


@dataclass(slots=True, eq=False)
class Admitted:
    choice: Choice
    lease: PageLease  # the hit, pinned
    num_new: int
    pick: Local | PrefillPeer


@dataclass(slots=True, eq=False)
class AdmissionPass:
    """What one pass has promised so far."""

    now: float
    turns: LongPromptThrottle
    admitted: list[Admitted] = field(default_factory=list)
    num_new: int = 0  # pages to allocate for the admitted
    num_reserved: int = 0  # pages in reserve for the admitted
    reserved_before: int | None = None  # pages in reserve for others, once somebody had to know
    calls: dict[WorkerRef, list[int]] = field(default_factory=dict)  # prompt tokens of calls to open
    num_vain: int = 0
    no_credit: tuple[float, float] = inf, -inf  # shortest and longest prompt that found none
    credit_is_spoken_for: bool = False


class Admission:
    def __init__(self, board: DecodeQueues, router: Placement, fetching: PrefillClient, clock: Clock) -> None:
        self._board = board
        self._router = router
        self._fetching = fetching
        self._clock = clock

    def advance(self) -> None:
        board = self._board
        if not board.stirred:
            return
        board.stirred = False
        if len(board.line):
            admissions = AdmissionPass(
                self._clock.now(), LongPromptThrottle(board.preparing.values(), board.cache.num_pages)
            )
            self._scan(admissions)
            self._allocate(admissions)

    def _scan(self, admissions: AdmissionPass) -> None:
        board = self._board
        for position, entry in enumerate(board.line):
            is_full = board.num_holders + len(admissions.admitted) >= 2 * board.limits.max_running_requests
            if is_full or position == MAX_SCANNED or admissions.num_vain == MAX_VAIN_MATCHES:
                break
            blocked = self._consider(entry, admissions)
            waits_no_longer = entry.retracted or entry.num_bypassed >= MAX_BYPASSED
            if blocked is Blocked.PAGES and waits_no_longer:
                break
            if blocked is Blocked.CREDIT and waits_no_longer:
                admissions.credit_is_spoken_for = True

    def _consider(self, entry: Waiting, admissions: AdmissionPass) -> Blocked | None:
        """Admit the entry, or say what it waits for."""
        blocked = self._still_blocked(entry, admissions)
        if blocked is not None:
            return blocked
        board, choice, request = self._board, entry.choice, entry.choice.request
        tokens = choice.sequence.tokens
        limit = reusable_len(len(tokens), board.page_size) if request.cacheable else 0
        match = board.cache.match(request.namespace, tokens, limit)
        if request.cacheable and admissions.now < choice.half_time:
            limit_pages = limit // board.page_size
            claimed = board.claims.find(request.namespace, tokens, match.num_pages, limit_pages)
            if claimed is not None:
                board.park(entry, *claimed)
                return Blocked.LEADER
        num_new = pages_to_lease(len(tokens), match.num_pages, board.page_size)
        reserve = board.reserve(choice, match.num_pages + num_new)
        entry.hint = LastMatch(match.prefix_len, num_new, num_new + reserve, admissions.now + LOOK_AGAIN_S)
        pick = self._pick(choice, match.prefix_len, admissions)
        blocked = None
        if self._waits_its_turn(entry, num_new, pick, admissions):
            blocked = Blocked.TURN
        elif not self._has_room(num_new + (0 if self._is_alone(admissions) else reserve), admissions, match):
            blocked = Blocked.PAGES
        elif isinstance(pick, NoPeer):
            blocked = Blocked.CREDIT
        if blocked is not None or isinstance(pick, NoPeer):
            admissions.num_vain += 1
            return blocked
        self._promise(entry, match, num_new, reserve, pick, admissions)
        return None

    def _still_blocked(self, entry: Waiting, admissions: AdmissionPass) -> Blocked | None:
        """What the entry's last match, if it is not old, says without another."""
        hint = entry.hint
        if hint is None or admissions.now >= hint.look_again_at or self._is_alone(admissions):
            return None
        pick = self._pick(entry.choice, hint.prefix_len, admissions)
        if self._waits_its_turn(entry, hint.num_new, pick, admissions):
            return Blocked.TURN
        if not self._has_room(hint.pages_wanted, admissions):
            return Blocked.PAGES
        return Blocked.CREDIT if isinstance(pick, NoPeer) else None

    def _pick(self, choice: Choice, start: int, admissions: AdmissionPass) -> Local | PrefillPeer | NoPeer:
        """Where the delta would be computed. A length between two that found no credit in this pass finds none."""
        num_tokens, usual = len(choice.sequence) - 1, not choice.failed_on and admissions.now < choice.half_time
        low, high = admissions.no_credit
        if usual and low <= num_tokens <= high and not self._router.is_short(choice, start):
            return LATER
        pick = self._router.pick(choice, start, admissions.calls, admissions.now)
        if usual and pick is LATER:
            admissions.no_credit = min(low, num_tokens), max(high, num_tokens)
        return LATER if isinstance(pick, PrefillPeer) and admissions.credit_is_spoken_for else pick

    def _waits_its_turn(
        self, entry: Waiting, num_new: int, pick: Local | PrefillPeer | NoPeer, admissions: AdmissionPass
    ) -> bool:
        return (
            isinstance(pick, PrefillPeer)
            and not entry.retracted
            and admissions.turns.waits(entry, pick.worker, num_new)
        )

    def _has_room(self, num_pages: int, admissions: AdmissionPass, match: Match | None = None) -> bool:
        """Whether there are so many pages beyond `match` that neither this pass has promised nor anyone is expected to
        grow into. Where there are plenty it need not be known how many those are."""
        board, match_pages = self._board, 0 if match is None else match.num_pages
        wanted = num_pages + admissions.num_new + admissions.num_reserved
        if board.cache.num_available() - match_pages - wanted >= board.most_reserved():
            return True
        if admissions.reserved_before is None:
            admissions.reserved_before = board.reserved()
        return board.cache.num_available(match) - wanted >= admissions.reserved_before

    def _is_alone(self, admissions: AdmissionPass) -> bool:
        """Nobody else holds pages, so nobody is helped by a reserve."""
        return not admissions.admitted and not self._board.num_holders

    def _promise(
        self,
        entry: Waiting,
        match: Match,
        num_new: int,
        reserve: int,
        pick: Local | PrefillPeer,
        admissions: AdmissionPass,
    ) -> None:
        board, choice = self._board, entry.choice
        lease = board.cache.try_lease(match, 0)
        if lease is None:
            raise InvariantError("a match made in this pass is stale")
        board.line.overtake(entry, admissions.turns.waiting)
        board.line.remove(entry)
        choice.sequence.num_computed = match.prefix_len
        self._note_hit(choice, match, admissions.now)
        board.claim(choice, lease)
        admissions.admitted.append(Admitted(choice, lease, num_new, pick))
        admissions.num_new += num_new
        admissions.num_reserved += reserve
        if isinstance(pick, PrefillPeer):
            admissions.calls.setdefault(pick.worker, []).append(len(choice.sequence) - 1)
            admissions.turns.take(pick.worker, num_new)

    def _allocate(self, admissions: AdmissionPass) -> None:
        """Take the promised pages, evicting once, and start each delta."""
        board = self._board
        if admissions.num_new:
            board.cache.make_room(admissions.num_new, [(each.lease, each.num_new) for each in admissions.admitted])
        for admitted in admissions.admitted:
            choice, lease = admitted.choice, admitted.lease
            if not board.cache.try_extend(lease, admitted.num_new):
                raise InvariantError("admission promised pages that are not there")
            hit_pages = lease.num_shared
            if isinstance(admitted.pick, PrefillPeer):
                self._fetching.begin(choice, lease, hit_pages, admitted.pick)
            else:
                board.make_ready(choice, lease, hit_pages, chunked=admitted.pick is Local.CHUNKED)
                choice.record.mark("ready", admissions.now)

    def _note_hit(self, choice: Choice, match: Match, now: float) -> None:
        board, record = self._board, choice.record
        board.counters["admitted"] += 1
        board.counters["prompt_tokens"] += len(choice.sequence)
        board.counters["hit_tokens"] += match.prefix_len
        if "admitted" in record.marks:
            return
        record.mark("admitted", now)
        record.decode_prefix_len = match.prefix_len
        record.miss_reason = self._miss_reason(choice, match)

    def _miss_reason(self, choice: Choice, match: Match) -> str:
        request, tokens = choice.request, choice.sequence.tokens
        if not request.cacheable:
            return "uncacheable"
        if match.prefix_len == reusable_len(len(tokens), self._board.page_size):
            return ""
        if self._board.committed.holds(request.namespace, tokens, match.num_pages):
            return "evicted"
        if not match.num_pages:
            return "cold"
        return "diverged" if self._board.cache.holds_others_behind(match) else "new"
