"""Two workers of no role over the loopback network: each has a pool, a cache, and both halves of a transfer."""

import random
from collections import Counter
from functools import partial

import numpy as np

from headstart.core.arrays import EMPTY, int32_array
from headstart.core.layout import PoolRegion, pages_for
from headstart.core.messages import (
    CancelTicket,
    ChunkNotice,
    Message,
    PrefillDone,
    PrefillFailed,
    TicketClosed,
    TicketRef,
    WorkerRef,
    decode_notice,
)
from headstart.kv.cache import PageLease, PrefixCache
from headstart.scheduler.sender import Push, Sender, SenderPorts, Target, push_to
from headstart.scheduler.tickets import Ticket, TicketTable
from headstart.sim.clock import VirtualClock
from headstart.transfer.contract import Completed, Notice, PeerLost, WriteFailed
from headstart.transfer.digest import HostDigests
from headstart.transfer.loopback import LoopbackNetwork

PAGE_SIZE, PAGE_BYTES, NUM_PAGES = 4, 64, 32
NAMESPACE = b"tenant"


class Peer:
    """A worker's pool and cache, the halves over them, and the owner's few decisions."""

    def __init__(self, name: str, pair: "Pair", seed: int) -> None:
        self.worker = WorkerRef(name, 1)
        self.pool = np.random.default_rng(seed).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
        self.cache = PrefixCache(NUM_PAGES, PAGE_SIZE)
        region = PoolRegion(0, NUM_PAGES, PAGE_BYTES)
        self.transport = pair.network.transport(str(self.worker), self.pool.reshape(-1), region)
        self.counters: Counter[str] = Counter()
        send = partial(pair.send, self)
        ports = SenderPorts(self.transport, HostDigests(self.pool), send, PrefillFailed)
        self.sender = Sender(self.worker, self.cache, ports, self.counters)
        self.tickets = TicketTable(self.cache, pair.clock, send, self.counters, HostDigests(self.pool))
        self.notices: list[ChunkNotice] = []
        self.answers: list[Message] = []

    @property
    def is_clean(self) -> bool:
        counts = self.cache.counts()
        return counts.free + counts.cached == NUM_PAGES and not len(self.tickets) and not len(self.sender)

    def check(self) -> None:
        self.cache.check()
        self.sender.check()
        self.tickets.check()

    def handle(self, sender: str, message: Message) -> None:
        if isinstance(message, CancelTicket):
            self.sender.cancel(sender, message.ref)
            return
        self.answers.append(message)
        assert isinstance(message, PrefillDone | PrefillFailed | TicketClosed)
        ticket = self.tickets.get(message.ref)
        if ticket is None:
            return
        if isinstance(message, PrefillDone):
            self.tickets.done(ticket)
        else:
            self.tickets.close(ticket)

    def poll(self) -> None:
        for event in self.transport.poll():
            match event:
                case Completed() | WriteFailed():
                    self.sender.on_transfer(event)
                case Notice():
                    notice = decode_notice(event.payload)
                    assert notice is not None
                    self.notices.append(notice)
                    self.on_notice(notice)
                case PeerLost():
                    self.sender.on_peer_lost(event.peer)

    def on_notice(self, notice: ChunkNotice) -> None:
        ticket = self.tickets.expected(notice)
        if ticket is None:
            return
        if self.tickets.is_intact(ticket, notice):
            self.tickets.receive(ticket, notice)
        else:
            self.tickets.cancel(ticket)


class Loan:
    """One ticket, seen from both of its ends."""

    def __init__(self, ticket: Ticket, lease: PageLease, push: Push) -> None:
        self.ticket, self.lease, self.push = ticket, lease, push


class Pair:
    """A lender and a borrower, which may also change places. Messages of `silenced` peers are lost."""

    def __init__(self, transfer_s: float = 0.001) -> None:
        self.clock = VirtualClock()
        self.network = LoopbackNetwork(random.Random(0), self.clock, lambda num_bytes: transfer_s)
        self.sent: list[tuple[Peer, str, Message]] = []
        self.silenced: set[Peer] = set()
        self.lender, self.borrower = Peer("lender", self, 1), Peer("borrower", self, 2)
        self.peers = {str(peer.worker): peer for peer in (self.lender, self.borrower)}
        self._outbox: list[tuple[Peer, str, Message]] = []
        self._num_tickets = 0
        for one, other in ((self.lender, self.borrower), (self.borrower, self.lender)):
            one.transport.connect(str(other.worker), other.transport.descriptor())

    def send(self, sender: Peer, recipient: str, message: Message) -> None:
        self.sent.append((sender, recipient, message))
        self._outbox.append((sender, recipient, message))

    def ticket(self, num_tokens: int, start: int = 0, borrower: Peer | None = None) -> tuple[Ticket, PageLease]:
        """The borrower opens pages for [start, num_tokens)."""
        borrower = borrower or self.borrower
        lender = self.lender if borrower is self.borrower else self.borrower
        self._num_tickets += 1
        lease = borrower.cache.try_lease(borrower.cache.match(NAMESPACE, EMPTY), pages_for(num_tokens, PAGE_SIZE))
        assert lease is not None
        tokens = int32_array(range(num_tokens))
        ref = TicketRef(self._num_tickets, 0)
        ticket = Ticket(ref, lender.worker, start, tokens, lease.pages[start // PAGE_SIZE :])
        borrower.tickets.add(ticket)
        return ticket, lease

    def lend(self, num_tokens: int = 40, start: int = 0, borrower: Peer | None = None, time_s: float = 10.0) -> Loan:
        """A ticket whose lender has the pages; nothing is posted yet."""
        borrower = borrower or self.borrower
        ticket, lease = self.ticket(num_tokens, start, borrower)
        lender = self.peers[str(ticket.worker)]
        deadline = self.clock.now() + time_s
        target = Target(borrower.worker, ticket.ref, ticket.tokens, start, ticket.pages, deadline, verify=True)
        source = lender.cache.try_lease(lender.cache.match(NAMESPACE, EMPTY), pages_for(num_tokens, PAGE_SIZE))
        assert source is not None
        push = push_to(target, source, num_tokens, PrefillDone(ticket.ref, num_tokens, 0), PAGE_SIZE)
        lender.sender.open(push)
        return Loan(ticket, lease, push)

    def step(self, seconds: float = 0.0005) -> None:
        outbox, self._outbox = self._outbox, []
        for sender, recipient, message in outbox:
            if sender not in self.silenced and recipient in self.peers:
                self.peers[recipient].handle(str(sender.worker), message)
        for peer in self.peers.values():
            peer.poll()
            peer.sender.expire(self.clock.now())
            for ticket in peer.tickets.advance(self.clock.now()):
                peer.tickets.close(ticket)
            peer.check()
        self.clock.advance_to(self.clock.now() + seconds)

    def run(self, seconds: float = 0.05, step_s: float = 0.0005) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.step(step_s)

    def forget(self, loan: Loan) -> None:
        """The borrower gives its lease back, whatever has become of the ticket."""
        self.borrower.cache.release(loan.lease)

    def has_arrived(self, loan: Loan) -> bool:
        """Whether the borrower's pages hold what the lender's do."""
        first = loan.ticket.start // PAGE_SIZE
        return np.array_equal(self.borrower.pool[loan.ticket.pages], self.lender.pool[loan.push.lease.pages[first:]])

    def cancels(self) -> int:
        return sum(isinstance(message, CancelTicket) for _, _, message in self.sent)
