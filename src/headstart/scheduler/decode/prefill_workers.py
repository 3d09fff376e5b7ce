"""What the decode worker knows of each prefill worker, and where a delta is computed: here, or by which of them.

    (membership names it) ─► greeting ──Welcome──► welcome        a new incarnation starts over at greeting
                               │ ▲└────Refused──► refused         both processes live; it gets no calls
                               │ └── a call comes back as UNAVAILABLE: greeted again
                               └ Hello is repeated until answered

One peer per worker name, for its latest incarnation. A peer is called while it is welcome, alive and not backing off.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from math import inf

from headstart.core.messages import Hello, PeerState, Refused, Send, Welcome, WorkerRef, WorkerState
from headstart.scheduler.decode.states import Choice
from headstart.scheduler.limits import DecodeLimits
from headstart.scheduler.tickets import TicketTable

HELLO_REPEAT_S = 0.5
GREETING_PATIENCE_S = 1.0
SUSPECT_PATIENCE_S = 2.0
"""A worker that answers no Hello, or is silent, is waited for this long. Then it is as if there were none."""
BACKOFF_S = 0.1


class Handshake(Enum):
    GREETING = "greeting"
    WELCOME = "welcome"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class PrefillPeer:
    peer: PeerState  # as first listed
    state: WorkerState
    state_since: float
    greeted_at: float
    next_hello: float
    handshake: Handshake = Handshake.GREETING
    capacity_tokens: int = 0
    credit_tokens: int = 0
    busy_until: float = 0.0

    @property
    def worker(self) -> WorkerRef:
        return self.peer.worker


class NoPeer(Enum):
    """Why there is no prefill worker to call."""

    LATER = "later"  # one that could take the prompt has no credit or no answer yet
    NEVER = "never"  # no live one can hold it


class PrefillWorkers:
    def __init__(self, hello: Hello, send: Send, counters: Counter[str]) -> None:
        self._hello = hello
        self._send = send
        self._counters = counters
        self._peers: dict[str, PrefillPeer] = {}
        self._unproven: list[PeerState] = []  # replaced by namesakes that prove nothing of their end
        self._mismatches: dict[WorkerRef, str] = {}  # as those that refused us state them
        self._listed: tuple[PeerState, ...] | None = None  # the last list, while it would change nothing
        self.next_at = inf  # when `advance` is due
        self._is_settled = False  # `next_at` is right

    def on_membership(self, peers: tuple[PeerState, ...], now: float) -> tuple[list[WorkerRef], list[WorkerRef]]:
        """Take the gateway's list. Returns the incarnations proven ended, and those to fail requests over from.

        A gateway that was restarted may list a namesake of a worker that it never heard: it is proof of nothing. A later
        one under the former's lock still is.
        """
        ended: list[WorkerRef] = []
        lost: list[WorkerRef] = []
        if peers == self._listed:
            return ended, lost
        self._listed, self._is_settled = peers, False
        listed = {peer.worker.name: peer for peer in peers}
        for name, known in self._peers.items():
            if name not in listed and known.state != WorkerState.DEAD:
                known.state = WorkerState.DEAD
                lost.append(known.worker)
        for peer in listed.values():
            former = self._peers.get(peer.worker.name)
            if former is not None and former.worker.incarnation > peer.worker.incarnation:
                self._counters["stale_members"] += 1
                self._listed = None
                continue
            if former is None or former.worker != peer.worker:
                self._peers[peer.worker.name] = PrefillPeer(peer, peer.state, now, now, now)
                if former is not None:
                    self._unproven.append(former.peer)
                    self._mismatches.pop(former.worker, None)
                ended += self._take_proven(peer)
                if former is not None and former.worker not in ended:
                    lost.append(former.worker)
                continue
            if peer.state == WorkerState.DEAD and former.state != WorkerState.DEAD:
                lost.append(former.worker)
            elif (
                peer.state != WorkerState.DEAD
                and former.state == WorkerState.DEAD
                and former.handshake is not Handshake.REFUSED
            ):
                former.handshake, former.greeted_at, former.next_hello = Handshake.GREETING, now, now
            if former.state != peer.state:
                former.state, former.state_since = peer.state, now
        return ended, lost

    def _take_proven(self, peer: PeerState) -> list[WorkerRef]:
        """Those replaced ones, however long ago, whose end `peer` proves."""
        proven = [former.worker for former in self._unproven if peer.proves_end_of(former)]
        self._unproven = [former for former in self._unproven if former.worker not in proven]
        return proven

    def on_exited(self, worker: WorkerRef) -> None:
        self._unproven = [former for former in self._unproven if former.worker != worker]
        if (peer := self._to_change(worker)) is not None:
            peer.state = WorkerState.DEAD
            self._listed = None

    def on_disconnected(self, name: str) -> WorkerRef | None:
        """The transport to this peer is closed: dead for requests until membership says otherwise."""
        for peer in self._peers.values():
            if str(peer.worker) == name:
                peer.state = WorkerState.DEAD
                self._listed, self._is_settled = None, False
                return peer.worker
        return None

    def on_welcome(self, sender: str, message: Welcome) -> bool:
        peer = self._answered(sender, message.worker)
        if peer is None:
            return False
        peer.handshake = Handshake.WELCOME
        peer.capacity_tokens = message.capacity_tokens
        peer.credit_tokens = message.credit_tokens
        return True

    def on_refused(self, sender: str, message: Refused) -> bool:
        """Both sides live on; this incarnation gets no calls."""
        peer = self._answered(sender, message.worker)
        if peer is None:
            return False
        peer.handshake = Handshake.REFUSED
        self._counters["refused_links"] += 1
        self._mismatches[message.worker] = message.message
        return True

    def mismatches(self) -> tuple[str, ...]:
        """What each live prefill worker that refused us and this worker disagree on."""
        refused = [
            peer
            for peer in self._peers.values()
            if peer.handshake is Handshake.REFUSED and peer.state != WorkerState.DEAD
        ]
        return tuple(self._mismatches[peer.worker] for peer in refused if peer.worker in self._mismatches)

    def on_mismatch(self, worker: WorkerRef) -> None:
        """A call came back as incompatible: no more on this pair."""
        if (peer := self._to_change(worker)) is not None:
            peer.handshake = Handshake.REFUSED

    def greet_again(self, worker: WorkerRef, now: float) -> None:
        """It could not write to us: its connection may be lost. It gets no calls before it has answered a Hello."""
        peer = self._to_change(worker)
        if peer is not None and peer.handshake is Handshake.WELCOME:
            peer.handshake, peer.greeted_at, peer.next_hello = Handshake.GREETING, now, now

    def on_busy(self, worker: WorkerRef, now: float) -> None:
        if (peer := self._to_change(worker)) is not None:
            peer.busy_until = now + BACKOFF_S

    def advance(self, now: float) -> bool:
        """Repeat Hellos. Whether a wait is over, so that somebody may be called now."""
        is_due = now >= self.next_at
        if self._is_settled and not is_due:
            return False
        times: list[float] = []
        for peer in self._peers.values():
            if peer.handshake is Handshake.GREETING and peer.state != WorkerState.DEAD:
                if now >= peer.next_hello:
                    self._send(str(peer.worker), self._hello)
                    peer.next_hello = now + HELLO_REPEAT_S
                times.append(peer.next_hello)
                if now < peer.greeted_at + GREETING_PATIENCE_S:
                    times.append(peer.greeted_at + GREETING_PATIENCE_S)
            times.extend(time for time in (peer.busy_until, peer.state_since + SUSPECT_PATIENCE_S) if now < time)
        self.next_at, self._is_settled = min(times, default=inf), True
        return is_due

    def choose(
        self,
        ranking: tuple[str, ...],
        num_tokens: int,
        excluded: Collection[WorkerRef],
        usage: Callable[[WorkerRef], tuple[int, int]],
        now: float,
    ) -> PrefillPeer | NoPeer:
        """The best-ranked worker that can take a prompt of `num_tokens` now; those not ranked come last, least used
        first. `usage(worker)` is (tickets open there, their prompt tokens)."""

        def can_take(peer: PrefillPeer) -> bool:
            if peer.state != WorkerState.ALIVE or peer.handshake is not Handshake.WELCOME or now < peer.busy_until:
                return False
            num_tickets, tokens = usage(peer.worker)
            return num_tickets == 0 or tokens + num_tokens <= peer.credit_tokens

        for name in ranking:
            ranked = self._peers.get(name)
            if ranked is not None and self._may_serve(ranked, num_tokens, excluded, now) and can_take(ranked):
                return ranked
        usable = [peer for peer in self._peers.values() if self._may_serve(peer, num_tokens, excluded, now)]
        others = [peer for peer in usable if peer.worker.name not in ranking]
        others.sort(key=lambda peer: (usage(peer.worker)[1], peer.worker.name))
        best = next((peer for peer in others if can_take(peer)), None)
        return best or (NoPeer.LATER if usable else NoPeer.NEVER)

    def _may_serve(self, peer: PrefillPeer, num_tokens: int, excluded: Collection[WorkerRef], now: float) -> bool:
        """Whether waiting for `peer` makes sense."""
        if peer.state == WorkerState.DEAD or peer.worker in excluded:
            return False
        if peer.state == WorkerState.SUSPECT and now >= peer.state_since + SUSPECT_PATIENCE_S:
            return False
        if peer.handshake is Handshake.GREETING:
            return now < peer.greeted_at + GREETING_PATIENCE_S
        return peer.handshake is Handshake.WELCOME and num_tokens <= peer.capacity_tokens

    def _to_change(self, worker: WorkerRef) -> PrefillPeer | None:
        """The peer of this incarnation, which the caller is about to change."""
        peer = self._peers.get(worker.name)
        if peer is None or peer.worker != worker:
            return None
        self._is_settled = False
        return peer

    def _answered(self, sender: str, worker: WorkerRef) -> PrefillPeer | None:
        peer = self._to_change(worker)
        if peer is None or sender != str(worker):
            self._counters["stray_messages"] += 1
            return None
        return peer


class Local(Enum):
    """Why a delta is computed here."""

    SHORT = "short"  # out of the step's budget for short deltas
    CHUNKED = "chunked"  # for want of a prefill worker, or of time to wait for one


Place = Local | PrefillPeer | NoPeer
LATER = NoPeer.LATER


class Placement:
    """Short deltas and those that nobody else can compute in time stay here; the rest go where there is credit."""

    def __init__(self, limits: DecodeLimits, workers: PrefillWorkers, tickets: TicketTable) -> None:
        self.workers = workers
        self._limits = limits
        self._tickets = tickets

    def is_short(self, choice: Choice, start: int) -> bool:
        return len(choice.sequence) - 1 - start <= self._limits.local_prefill_tokens

    def pick(self, choice: Choice, start: int, planned: dict[WorkerRef, list[int]], now: float) -> Place:
        """For the delta [start, end). `planned` are prompt tokens of tickets about to be opened; LATER if it waits."""
        if self.is_short(choice, start):
            return Local.SHORT
        if now >= choice.fallback_at:
            return Local.CHUNKED

        def usage(worker: WorkerRef) -> tuple[int, int]:
            num_tickets, num_tokens = self._tickets.usage(worker)
            soon = planned.get(worker, ())
            return num_tickets + len(soon), num_tokens + sum(soon)

        end = len(choice.sequence) - 1
        peer = self.workers.choose(choice.ranking, end, choice.failed_on, usage, now)
        return Local.CHUNKED if peer is NoPeer.NEVER else peer
