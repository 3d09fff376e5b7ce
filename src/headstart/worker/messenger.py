"""From names to sockets: a worker's messages meet the wire here. Never imports torch.

    gateway            one Dealer to the gateway's Router, open for life
    prefill worker     one Router that decode workers connect to
    decode worker      one Dealer for each prefill incarnation that Membership names, open until that incarnation is
                       known to have ended: a slow one may still owe the answer to a Cancel

Every call is made by the loop's thread. Sending never blocks: what cannot be queued is dropped and counted by the
wire, and the protocol's repeats repair it.
"""

import logging
import math

import zmq

from headstart.core.messages import Join, Membership, Message, PeerState, WorkerExited, WorkerRef, WorkerState
from headstart.wire.channels import FROM_PREFILL
from headstart.wire.errors import WireError
from headstart.wire.sockets import Dealer, Router, Wiring
from headstart.wire.watch import LinkState
from headstart.worker.wake import Waker

GATEWAY = "gateway"

log = logging.getLogger(__name__)


class Messenger:
    """Satisfies `worker.loop.Inbox`; `send` is the scheduler's `Send`. `peers` is a prefill worker's Router."""

    def __init__(
        self, worker: WorkerRef, wiring: Wiring, gateway: Dealer, peers: Router | None, waker: Waker, poller: zmq.Poller
    ) -> None:
        self._worker = worker
        self._wiring = wiring
        self._gateway = gateway
        self._peers = peers
        self._waker = waker
        self._poller = poller
        self._dialled: dict[WorkerRef, Dealer] = {}
        self._peer_states: dict[WorkerRef, PeerState] = {}  # of the dialled, as they were dialled
        self._by_name: dict[str, Dealer] = {}
        self._undialled: set[WorkerRef] = set()
        self.num_unaddressed = 0
        self.has_heard_gateway = False

    def start(self) -> None:
        """Watch the sockets that are open from the start."""
        self._poller.register(self._gateway.socket, zmq.POLLIN)
        self._poller.register(self._waker.fd, zmq.POLLIN)
        if self._peers is not None:
            self._poller.register(self._peers.socket, zmq.POLLIN)

    def join(self, message: Join) -> None:
        """Tell the gateway who we are. Repeats change nothing there, and reach a gateway that was restarted."""
        self._gateway.send(message)

    def link_state(self) -> LinkState:
        """Of the gateway's Dealer; taken to be up where that is not watched."""
        return "up" if self._gateway.link is None else self._gateway.link.state()

    def send(self, recipient: str, message: Message) -> None:
        if (dealer := self._by_name.get(recipient)) is not None:
            dealer.send(message)
        elif recipient == GATEWAY:
            self._gateway.send(message)
        elif self._peers is not None:
            self._peers.send(recipient, message)
        else:
            self.num_unaddressed += 1

    def receive(self) -> list[tuple[str, Message]]:
        self._waker.clear()
        inbox = [(GATEWAY, message) for message in self._gateway.drain()]
        self.has_heard_gateway |= bool(inbox)
        for _, message in inbox:
            self._follow(message)
        if self._peers is not None:
            inbox += self._peers.drain()
        for ref, dealer in self._dialled.items():
            inbox += [(str(ref), message) for message in dealer.drain()]
        return inbox

    def wait(self, timeout_s: float) -> None:
        """At least a millisecond, the poller's resolution: work that is overdue but cannot be done must not spin."""
        self._poller.poll(max(1, math.ceil(timeout_s * 1000)))

    def close(self) -> None:
        """Close every socket; queued messages get the wire's linger to leave."""
        for ref in list(self._dialled):
            self._hang_up(ref)
        self._gateway.close()
        if self._peers is not None:
            self._peers.close()

    # ---- peers -------------------------------------------------------------------------------------------------------

    def _follow(self, message: Message) -> None:
        """Keep one socket to each prefill incarnation that may still speak."""
        if isinstance(message, WorkerExited):
            self._hang_up(message.worker)
        elif isinstance(message, Membership) and self._peers is None:
            for peer in message.prefill:
                self._keep(peer)

    def _keep(self, peer: PeerState) -> None:
        if peer.worker in self._dialled or peer.state == WorkerState.DEAD:
            return
        for ref, former in list(self._peer_states.items()):
            if ref.name == peer.worker.name and ref.incarnation > peer.worker.incarnation:
                return
            if peer.proves_end_of(former):
                self._hang_up(ref)
        try:
            dealer = Dealer.connect(self._wiring, peer.address, str(self._worker), FROM_PREFILL)
        except WireError as error:
            if peer.worker not in self._undialled:
                self._undialled.add(peer.worker)
                log.warning("peer cannot be reached", extra={"peer": str(peer.worker), "reason": str(error)})
            return
        self._dialled[peer.worker] = self._by_name[str(peer.worker)] = dealer
        self._peer_states[peer.worker] = peer
        self._poller.register(dealer.socket, zmq.POLLIN)
        log.info("peer found", extra={"peer": str(peer.worker), "address": peer.address})

    def _hang_up(self, ref: WorkerRef) -> None:
        dealer = self._dialled.pop(ref, None)
        if dealer is not None:
            del self._by_name[str(ref)], self._peer_states[ref]
            self._poller.unregister(dealer.socket)
            dealer.close()
