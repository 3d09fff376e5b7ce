"""What the decode worker knows of each prefill worker, and which one may take a prompt now.

    (membership names it) ─► greeting ──Welcome──► welcome        a new incarnation starts over at greeting
                               │ ▲└────Refused──► refused         both processes live; it gets no calls
                               │ └── a call comes back as UNAVAILABLE: greeted again
                               └ Hello is repeated until answered

One link per worker name, for its latest incarnation. A link takes calls while it is welcome, alive and not backing off.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf

from headstart.core.messages import Hello, PeerState, Refused, Send, Welcome, WorkerRef, WorkerState

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
        self._links: dict[str, PrefillPeer] = {}
        self._unproven: list[PeerState] = []  # replaced by namesakes that prove nothing of their end
        self._listed: tuple[PeerState, ...] | None = None  # the last list, while it would change nothing
        self._due = inf  # of `advance`
        self._is_settled = False  # `_due` is right

    def membership(self, peers: tuple[PeerState, ...], now: float) -> tuple[list[WorkerRef], list[WorkerRef]]:
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
        for name, link in self._links.items():
            if name not in listed and link.state != WorkerState.DEAD:
                link.state = WorkerState.DEAD
                lost.append(link.worker)
        for peer in listed.values():
            former = self._links.get(peer.worker.name)
            if former is not None and former.worker.incarnation > peer.worker.incarnation:
                self._counters["stale_members"] += 1
                self._listed = None
                continue
            if former is None or former.worker != peer.worker:
                self._links[peer.worker.name] = PrefillPeer(peer, peer.state, now, now, now)
                if former is not None:
                    self._unproven.append(former.peer)
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

    def exited(self, worker: WorkerRef) -> None:
        self._unproven = [former for former in self._unproven if former.worker != worker]
        if (link := self._to_change(worker)) is not None:
            link.state = WorkerState.DEAD
            self._listed = None

    def lost(self, peer: str) -> WorkerRef | None:
        """The transport to `peer` is closed: dead for requests until membership says otherwise."""
        for link in self._links.values():
            if str(link.worker) == peer:
                link.state = WorkerState.DEAD
                self._listed, self._is_settled = None, False
                return link.worker
        return None

    def welcome(self, sender: str, message: Welcome) -> bool:
        link = self._answered(sender, message.worker)
        if link is None:
            return False
        link.handshake = Handshake.WELCOME
        link.capacity_tokens = message.capacity_tokens
        link.credit_tokens = message.credit_tokens
        return True

    def refused(self, sender: str, message: Refused) -> bool:
        """Both sides live on; this incarnation gets no calls."""
        link = self._answered(sender, message.worker)
        if link is None:
            return False
        link.handshake = Handshake.REFUSED
        self._counters["refused_links"] += 1
        return True

    def mismatch(self, worker: WorkerRef) -> None:
        """A call came back as incompatible: no more on this pair."""
        if (link := self._to_change(worker)) is not None:
            link.handshake = Handshake.REFUSED

    def greet_again(self, worker: WorkerRef, now: float) -> None:
        """It could not write to us: its connection may be lost. It gets no calls before it has answered a Hello."""
        link = self._to_change(worker)
        if link is not None and link.handshake is Handshake.WELCOME:
            link.handshake, link.greeted_at, link.next_hello = Handshake.GREETING, now, now

    def busy(self, worker: WorkerRef, now: float) -> None:
        if (link := self._to_change(worker)) is not None:
            link.busy_until = now + BACKOFF_S

    def advance(self, now: float) -> float:
        """Repeat Hellos; returns when to come back."""
        if self._is_settled and now < self._due:
            return self._due
        times: list[float] = []
        for link in self._links.values():
            if link.handshake is Handshake.GREETING and link.state != WorkerState.DEAD:
                if now >= link.next_hello:
                    self._send(str(link.worker), self._hello)
                    link.next_hello = now + HELLO_REPEAT_S
                times.append(link.next_hello)
                if now < link.greeted_at + GREETING_PATIENCE_S:
                    times.append(link.greeted_at + GREETING_PATIENCE_S)
            times.extend(time for time in (link.busy_until, link.state_since + SUSPECT_PATIENCE_S) if now < time)
        self._due, self._is_settled = min(times, default=inf), True
        return self._due

    def choose(
        self,
        ranking: tuple[str, ...],
        num_tokens: int,
        excluded: set[WorkerRef],
        usage: Callable[[WorkerRef], tuple[int, int]],
        now: float,
    ) -> PrefillPeer | NoPeer:
        """The best-ranked worker that can take a prompt of `num_tokens` now; those not ranked come last, least used
        first. `usage(worker)` is (calls open there, their prompt tokens)."""

        def takes(link: PrefillPeer) -> bool:
            if link.state != WorkerState.ALIVE or link.handshake is not Handshake.WELCOME or now < link.busy_until:
                return False
            num_calls, tokens = usage(link.worker)
            return num_calls == 0 or tokens + num_tokens <= link.credit_tokens

        for name in ranking:
            ranked = self._links.get(name)
            if ranked is not None and self._may_serve(ranked, num_tokens, excluded, now) and takes(ranked):
                return ranked
        usable = [link for link in self._links.values() if self._may_serve(link, num_tokens, excluded, now)]
        others = [link for link in usable if link.worker.name not in ranking]
        others.sort(key=lambda link: (usage(link.worker)[1], link.worker.name))
        best = next((link for link in others if takes(link)), None)
        return best or (NoPeer.LATER if usable else NoPeer.NEVER)

    def _may_serve(self, link: PrefillPeer, num_tokens: int, excluded: set[WorkerRef], now: float) -> bool:
        """Whether waiting for `link` makes sense."""
        if link.state == WorkerState.DEAD or link.worker in excluded:
            return False
        if link.state == WorkerState.SUSPECT and now >= link.state_since + SUSPECT_PATIENCE_S:
            return False
        if link.handshake is Handshake.GREETING:
            return now < link.greeted_at + GREETING_PATIENCE_S
        return link.handshake is Handshake.WELCOME and num_tokens <= link.capacity_tokens

    def _to_change(self, worker: WorkerRef) -> PrefillPeer | None:
        """The link to this incarnation, which the caller is about to change."""
        link = self._links.get(worker.name)
        if link is None or link.worker != worker:
            return None
        self._is_settled = False
        return link

    def _answered(self, sender: str, worker: WorkerRef) -> PrefillPeer | None:
        link = self._to_change(worker)
        if link is None or sender != str(worker):
            self._counters["stray_messages"] += 1
            return None
        return link
