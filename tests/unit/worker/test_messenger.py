"""Names reach the right sockets, over real ZeroMQ: a decode worker finds prefill workers through Membership."""

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from headstart.core.messages import (
    CancelTicket,
    Flush,
    Flushed,
    Leave,
    Membership,
    Message,
    PeerState,
    TicketClosed,
    TicketRef,
    WorkerExited,
    WorkerRef,
)
from headstart.wire.channels import FROM_WORKER, TO_PREFILL, TO_WORKER
from headstart.wire.sockets import Dealer, Router, Wiring
from headstart.worker.messenger import GATEWAY, Messenger
from headstart.worker.wake import Waker
from tests.support.steady import PATIENCE_S

DECODE = WorkerRef("decode-0", 1)
PREFILL = WorkerRef("prefill-0", 7)


class Cluster:
    """A gateway's Router, one decode and one prefill messenger in one process."""

    def __init__(self) -> None:
        self.wiring = Wiring(zmq.Context())
        self.gateway = Router.bind(self.wiring, "tcp://127.0.0.1:0", FROM_WORKER)
        self.port = self.gateway.address.rpartition(":")[2]
        self.wakers: list[Waker] = []
        self.peer_router = Router.bind(self.wiring, "tcp://127.0.0.1:0", TO_PREFILL)
        self.peer_address = f"tcp://127.0.0.1:{self.peer_router.address.rpartition(':')[2]}"
        self.decode = self._messenger(DECODE, None)
        self.prefill = self._messenger(PREFILL, self.peer_router)

    def _messenger(self, ref: WorkerRef, peers: Router | None) -> Messenger:
        waker = Waker.open()
        self.wakers.append(waker)
        dealer = Dealer.connect(self.wiring, f"tcp://127.0.0.1:{self.port}", str(ref), TO_WORKER)
        messenger = Messenger(ref, self.wiring, dealer, peers, waker, zmq.Poller())
        messenger.start()
        messenger.send(GATEWAY, Leave(ref))
        return messenger

    def until(
        self, take: Callable[[], list[tuple[str, Message]]], wait: Messenger | None = None
    ) -> tuple[str, Message]:
        """The first message `take` yields."""
        deadline = time.monotonic() + PATIENCE_S
        while not (taken := take()):
            assert time.monotonic() < deadline, "no message came"
            if wait is None:
                self.gateway.socket.poll(10)
            else:
                wait.wait(0.01)
        return taken[0]

    def introduce(self, state: str = "alive") -> None:
        """Both workers are known to the gateway; the decode worker hears of the prefill worker."""
        heard: list[tuple[str, Message]] = []

        def of_both() -> list[tuple[str, Message]]:
            heard.extend(self.gateway.drain())
            return heard if {sender for sender, _ in heard} == {str(PREFILL), str(DECODE)} else []

        self.until(of_both)
        self.gateway.send(str(DECODE), Membership((PeerState(PREFILL, self.peer_address, state, "here"),)))
        assert self.until(self.decode.receive, self.decode)[0] == GATEWAY

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.gateway.close()
        for waker in self.wakers:
            waker.close()
        self.wiring.context.term()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    world = Cluster()
    yield world
    world.close()


def test_messages_of_the_gateway_come_under_its_name(cluster: Cluster) -> None:
    cluster.introduce()
    cluster.gateway.send(str(DECODE), Flush(5))
    sender, message = cluster.until(cluster.decode.receive, cluster.decode)
    assert (sender, type(message)) == (GATEWAY, Flush)
    cluster.decode.send(GATEWAY, Flushed(5, True, 3))
    sender, message = cluster.until(cluster.gateway.drain)
    assert (sender, type(message)) == (str(DECODE), Flushed)


def test_membership_opens_a_line_to_a_prefill_worker_that_answers_by_name(cluster: Cluster) -> None:
    cluster.introduce()
    ref = TicketRef(1, 0)
    cluster.decode.send(str(PREFILL), CancelTicket(ref))
    sender, message = cluster.until(cluster.prefill.receive, cluster.prefill)
    assert (sender, message.ref) == (str(DECODE), ref)
    cluster.prefill.send(str(DECODE), TicketClosed(ref))
    sender, message = cluster.until(cluster.decode.receive, cluster.decode)
    assert (sender, message.ref) == (str(PREFILL), ref)


def test_a_suspect_peer_is_reachable_and_a_dead_one_is_not_dialled(cluster: Cluster) -> None:
    cluster.introduce(state="dead")
    cluster.decode.send(str(PREFILL), CancelTicket(TicketRef(1, 0)))
    assert cluster.decode.num_unaddressed == 1


def test_an_exit_closes_the_line_and_sending_to_nobody_is_harmless(cluster: Cluster) -> None:
    cluster.introduce()
    cluster.gateway.send(str(DECODE), WorkerExited(PREFILL, -9))
    cluster.until(cluster.decode.receive, cluster.decode)
    cluster.decode.send(str(PREFILL), CancelTicket(TicketRef(1, 0)))
    assert cluster.decode.num_unaddressed == 1


def test_a_namesake_under_another_lock_leaves_the_line_to_the_former_open(cluster: Cluster) -> None:
    cluster.introduce()
    later = WorkerRef(PREFILL.name, PREFILL.incarnation + 1)
    cluster.gateway.send(str(DECODE), Membership((PeerState(later, "tcp://127.0.0.1:1", "alive", "elsewhere"),)))
    cluster.until(cluster.decode.receive, cluster.decode)
    cluster.decode.send(str(PREFILL), CancelTicket(TicketRef(1, 0)))
    assert cluster.until(cluster.prefill.receive, cluster.prefill)[1].ref == TicketRef(1, 0)


def test_a_later_incarnation_takes_the_place_of_the_former(cluster: Cluster) -> None:
    cluster.introduce()
    later = WorkerRef(PREFILL.name, PREFILL.incarnation + 1)
    cluster.gateway.send(str(DECODE), Membership((PeerState(later, cluster.peer_address, "alive", "here"),)))
    cluster.until(cluster.decode.receive, cluster.decode)
    cluster.decode.send(str(PREFILL), CancelTicket(TicketRef(1, 0)))
    assert cluster.decode.num_unaddressed == 1
    cluster.decode.send(str(later), CancelTicket(TicketRef(2, 0)))
    assert cluster.until(cluster.prefill.receive, cluster.prefill)[1].ref == TicketRef(2, 0)


def test_a_wake_from_another_thread_ends_the_wait(cluster: Cluster) -> None:
    cluster.introduce()
    cluster.wakers[0].wake()
    cluster.decode.wait(30.0)
    assert cluster.decode.receive() == []
