"""Routers and dealers over real sockets."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from headstart.core.messages import Accepted, Cancel, Drain, Flush, Message
from headstart.core.request import ChoiceRef
from headstart.wire.aio import RouterWatch
from headstart.wire.channels import FROM_WORKER, TO_WORKER
from headstart.wire.errors import WireError
from headstart.wire.limits import WireLimits
from headstart.wire.security import CurveKeys, Security, authenticate, check_address
from headstart.wire.sockets import Dealer, Router, Wiring
from tests.support.steady import PATIENCE_MS

ANYWHERE = "tcp://127.0.0.1:0"
ACCEPTED = Accepted(ChoiceRef("r"))


@pytest.fixture
def wiring() -> Iterator[Wiring]:
    with opened(WireLimits()) as wiring:
        yield wiring


@contextmanager
def opened(limits: WireLimits, security: Security | None = None) -> Iterator[Wiring]:
    context = zmq.Context()
    try:
        yield Wiring(context, limits, security or Security())
    finally:
        context.destroy(linger=0)


@pytest.fixture
def narrow() -> Iterator[Wiring]:
    with opened(WireLimits(max_message_bytes=1000, queue_len=5)) as wiring:
        yield wiring


def from_router(router: Router, count: int = 1) -> list[tuple[str, Message]]:
    taken: list[tuple[str, Message]] = []
    while len(taken) < count:
        assert router.socket.poll(PATIENCE_MS), f"only {len(taken)} of {count} messages came"
        taken += router.drain()
    return taken


def from_dealer(dealer: Dealer, count: int = 1) -> list[Message]:
    taken: list[Message] = []
    while len(taken) < count:
        assert dealer.socket.poll(PATIENCE_MS), f"only {len(taken)} of {count} messages came"
        taken += dealer.drain()
    return taken


def heard_by_repeating(router: Router, dealer: Dealer) -> list[tuple[str, Message]]:
    """What is under way when a connection breaks is lost, so senders repeat."""
    for _ in range(PATIENCE_MS // 20):
        dealer.send(ACCEPTED)
        if router.socket.poll(20) and (taken := router.drain()):
            return taken
    raise AssertionError("nothing came through")


def pair(wiring: Wiring, name: str = "decode-0#1") -> tuple[Router, Dealer]:
    router = Router.bind(wiring, ANYWHERE, FROM_WORKER)
    return router, Dealer.connect(wiring, router.address, name, TO_WORKER)


def test_messages_go_both_ways_and_carry_the_senders_name(wiring: Wiring) -> None:
    router, dealer = pair(wiring)
    assert dealer.send(ACCEPTED)
    ((sender, accepted),) = from_router(router)
    assert sender == "decode-0#1"
    assert isinstance(accepted, Accepted)
    assert accepted.ref == ACCEPTED.ref
    assert router.send("decode-0#1", Flush(3))
    (flush,) = from_dealer(dealer)
    assert isinstance(flush, Flush)
    assert flush.flush_id == 3


def test_ipc_works_like_tcp(wiring: Wiring, tmp_path: Path) -> None:
    router = Router.bind(wiring, f"ipc://{tmp_path}/gateway", FROM_WORKER)
    dealer = Dealer.connect(wiring, router.address, "launcher", TO_WORKER)
    dealer.send(ACCEPTED)
    assert from_router(router)[0][0] == "launcher"


def test_port_zero_is_reported_as_the_real_port(wiring: Wiring) -> None:
    router = Router.bind(wiring, ANYWHERE, FROM_WORKER)
    assert int(router.address.rpartition(":")[2]) > 0


def test_a_taken_port_is_a_wire_error(wiring: Wiring) -> None:
    router = Router.bind(wiring, ANYWHERE, FROM_WORKER)
    with pytest.raises(WireError, match="cannot bind"):
        Router.bind(wiring, router.address, FROM_WORKER)


def test_a_peer_that_never_came_is_unreachable(wiring: Wiring) -> None:
    router = Router.bind(wiring, ANYWHERE, FROM_WORKER)
    assert not router.send("decode-9#1", Drain())
    assert router.counters.dropped_unreachable == 1


def test_a_full_queue_drops_counts_and_never_blocks(narrow: Wiring) -> None:
    router = Router.bind(narrow, ANYWHERE, FROM_WORKER)
    silent = Dealer.connect(narrow, router.address, "decode-0#1", TO_WORKER)
    silent.send(ACCEPTED)
    from_router(router)
    padding = "x" * 900  # beyond what the kernel's buffers swallow
    sent = [router.send("decode-0#1", Cancel(ChoiceRef(padding))) for _ in range(20_000)]
    assert not all(sent)
    assert router.counters.dropped_full == sent.count(False)


def test_a_dealer_with_no_router_queues_up_to_its_bound(narrow: Wiring) -> None:
    dealer = Dealer.connect(narrow, "tcp://127.0.0.1:9", "decode-0#1", TO_WORKER)
    sent = [dealer.send(ACCEPTED) for _ in range(20)]
    assert sent == [True] * 5 + [False] * 15
    assert dealer.counters.dropped_full == 15


def test_a_restarted_worker_takes_its_name_over(wiring: Wiring) -> None:
    router, former = pair(wiring, "decode-0")
    former.send(ACCEPTED)
    from_router(router)
    latter = Dealer.connect(wiring, router.address, "decode-0", TO_WORKER)
    latter.send(ACCEPTED)  # while the former's connection still stands
    from_router(router)
    router.send("decode-0", Flush(1))
    assert len(from_dealer(latter)) == 1
    assert former.drain() == []


def test_a_dealer_reconnects_to_a_restarted_router(wiring: Wiring) -> None:
    router, dealer = pair(wiring)
    dealer.send(ACCEPTED)
    from_router(router)
    address = router.address
    router.close()
    restarted = rebound(wiring, address)
    assert heard_by_repeating(restarted, dealer)[0][0] == "decode-0#1"
    assert restarted.send("decode-0#1", Drain())
    from_dealer(dealer)


def rebound(wiring: Wiring, address: str) -> Router:
    """The former socket leaves the port a moment after its close returns."""
    waiting = zmq.Poller()
    for _ in range(PATIENCE_MS // 10):
        try:
            return Router.bind(wiring, address, FROM_WORKER)
        except WireError:
            waiting.poll(10)
    raise AssertionError(f"{address} stayed taken")


@pytest.mark.behaviour("M3")
def test_malformed_frames_are_counted_and_the_peer_stays(wiring: Wiring) -> None:
    router, dealer = pair(wiring)
    dealer.socket.send_multipart([b"garbage"])
    dealer.socket.send_multipart([b"one", b"too many"])
    dealer.send(ACCEPTED)
    assert len(from_router(router)) == 1
    assert (router.counters.malformed, router.counters.received) == (2, 1)
    router.socket.send_multipart([b"decode-0#1", b"\x80\x04garbage"])
    router.send("decode-0#1", Drain())
    assert len(from_dealer(dealer)) == 1
    assert dealer.counters.malformed == 1


def test_a_name_that_is_not_text_is_malformed(wiring: Wiring) -> None:
    router = Router.bind(wiring, ANYWHERE, FROM_WORKER)
    stranger = wiring.context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"\xff\xfe")
    stranger.connect(router.address)
    stranger.send(router.codec.encode(ACCEPTED))
    assert router.socket.poll(PATIENCE_MS)
    assert router.drain() == []
    assert router.counters.malformed == 1


def test_an_oversize_message_never_arrives_and_the_next_one_does(narrow: Wiring) -> None:
    router, dealer = pair(narrow)
    assert not dealer.send(Accepted(ChoiceRef("x" * 2000)))
    assert dealer.counters.dropped_oversize == 1
    dealer.socket.send(b"x" * 2000)  # a sender that does not hold to the limit loses its connection, then redials
    assert heard_by_repeating(router, dealer)
    assert router.counters.malformed == 0


def test_a_flood_is_taken_in_batches() -> None:
    with opened(WireLimits(batch_len=10)) as wiring:
        router, dealer = pair(wiring)
        for _ in range(25):
            dealer.send(ACCEPTED)
        assert router.socket.poll(PATIENCE_MS)
        from_router(router, 1)
        assert max(len(router.drain()) for _ in range(5)) <= 10


@pytest.mark.parametrize("name", ["", "x" * 256, "\0hidden"])
def test_names_that_zeromq_cannot_carry_are_refused(wiring: Wiring, name: str) -> None:
    with pytest.raises(WireError, match="not a name"):
        Dealer.connect(wiring, "tcp://127.0.0.1:9", name, TO_WORKER)


# ---- security --------------------------------------------------------------------------------------------------------

LOCAL = ["tcp://127.0.0.1:5", "tcp://127.8.9.1:5", "tcp://[::1]:5", "tcp://localhost:5", "ipc:///tmp/x", "inproc://x"]
REMOTE = ["tcp://0.0.0.0:5", "tcp://*:5", "tcp://10.0.0.7:5", "tcp://[::]:5", "tcp://gateway.example:5"]
MALFORMED = ["", "127.0.0.1:5", "http://127.0.0.1:5", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://[::1:5"]


def keys() -> CurveKeys:
    return CurveKeys(*zmq.curve_keypair())


@pytest.mark.parametrize("address", LOCAL)
def test_plain_sockets_may_stay_on_this_host(address: str) -> None:
    check_address(address, Security())


@pytest.mark.parametrize("address", REMOTE)
def test_plain_sockets_may_leave_it_only_when_told(address: str) -> None:
    with pytest.raises(WireError, match="leaves this host"):
        check_address(address, Security())
    check_address(address, Security(insecure=True))
    check_address(address, Security(keys=keys()))


@pytest.mark.parametrize("address", MALFORMED)
def test_malformed_addresses_are_wire_errors(address: str) -> None:
    with pytest.raises(WireError):
        check_address(address, Security(insecure=True))


@pytest.fixture
def gateway_keys() -> CurveKeys:
    return keys()


@pytest.fixture
def member_keys(gateway_keys: CurveKeys) -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public, secret, server=gateway_keys.public)


@pytest.fixture
def gateway(gateway_keys: CurveKeys, member_keys: CurveKeys) -> Iterator[Router]:
    """Lets one member in."""
    with opened(WireLimits(), Security(keys=gateway_keys)) as wiring:
        authenticator = authenticate(wiring.context, [member_keys.public])
        yield Router.bind(wiring, ANYWHERE, FROM_WORKER)
        authenticator.stop()


def test_a_member_is_let_in(gateway: Router, member_keys: CurveKeys) -> None:
    with opened(WireLimits(), Security(keys=member_keys)) as wiring:
        Dealer.connect(wiring, gateway.address, "decode-0#1", TO_WORKER).send(ACCEPTED)
        assert from_router(gateway)[0][0] == "decode-0#1"


@pytest.mark.parametrize("stranger", ["plain", "unknown key", "wrong gateway key"])
def test_a_stranger_is_not(gateway: Router, member_keys: CurveKeys, gateway_keys: CurveKeys, stranger: str) -> None:
    public, secret = zmq.curve_keypair()
    security = {
        "plain": Security(),
        "unknown key": Security(CurveKeys(public, secret, gateway_keys.public)),
        "wrong gateway key": Security(CurveKeys(member_keys.public, member_keys.secret, public)),
    }[stranger]
    with opened(WireLimits(), security) as wiring:
        Dealer.connect(wiring, gateway.address, "intruder", TO_WORKER).send(ACCEPTED)
        with opened(WireLimits(), Security(keys=member_keys)) as member:
            dealer = Dealer.connect(member, gateway.address, "decode-0#1", TO_WORKER)
            for _ in range(3):  # round trips: the stranger had its chance to get through
                dealer.send(ACCEPTED)
                assert [name for name, _ in from_router(gateway)] == ["decode-0#1"]
                gateway.send("decode-0#1", Drain())
                from_dealer(dealer)
        assert not gateway.send("intruder", Drain())


def test_without_an_authenticator_everyone_is_refused(gateway_keys: CurveKeys, member_keys: CurveKeys) -> None:
    with opened(WireLimits(), Security(keys=gateway_keys)) as wiring:
        router = Router.bind(wiring, ANYWHERE, FROM_WORKER)
        with opened(WireLimits(), Security(keys=member_keys)) as member:
            dealer = Dealer.connect(member, router.address, "decode-0#1", TO_WORKER)
            monitor = dealer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            dealer.send(ACCEPTED)
            assert monitor.poll(PATIENCE_MS)
            assert router.drain() == []
            dealer.socket.disable_monitor()


def test_connecting_with_curve_needs_the_gateways_key() -> None:
    with opened(WireLimits(), Security(keys=keys())) as wiring, pytest.raises(WireError, match="public key"):
        Dealer.connect(wiring, "tcp://127.0.0.1:9", "decode-0#1", TO_WORKER)


def test_secrets_stay_out_of_reprs() -> None:
    own = keys()
    assert own.secret.decode() not in repr(Security(own))


# ---- asyncio ---------------------------------------------------------------------------------------------------------


def test_a_watch_misses_nothing_under_traffic_both_ways() -> None:
    with opened(WireLimits(batch_len=3)) as wiring:
        asyncio.run(asyncio.wait_for(exchange(wiring, 200), PATIENCE_MS / 1000))


async def exchange(wiring: Wiring, count: int) -> None:
    router, dealer = pair(wiring)
    seen: list[str] = []
    complete = asyncio.Event()

    def on_message(sender: str, message: Message) -> None:
        seen.append(sender)
        watch.send(sender, Drain())  # sending may swallow the descriptor's edge
        if len(seen) == count:
            complete.set()

    watch = RouterWatch(router, asyncio.get_running_loop(), on_message)
    watch.start()
    for _ in range(count):
        dealer.send(ACCEPTED)
        await asyncio.sleep(0)
    await complete.wait()
    watch.stop()
    assert len(from_dealer(dealer, count)) == count
