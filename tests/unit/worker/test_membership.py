"""A worker that cannot join says so, and why."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import create_server

import pytest

from headstart.config.settings import ClusterSettings
from headstart.wire.channels import FROM_WORKER, TO_WORKER
from headstart.wire.sockets import Dealer, Router
from headstart.wire.watch import LinkState
from headstart.worker.gateway_process import REFUSED_REPORT_S, RefusedConnections
from headstart.worker.membership import REPEAT_S, MembershipLog
from headstart.worker.ports import OpenWiring, new_cluster_key, open_wiring

PATIENCE = 3000  # polls of 20 ms


def member(directory: Path, name: str, key: str) -> OpenWiring:
    if not key:
        return open_wiring(ClusterSettings())
    (directory / name).touch(mode=0o600)
    (directory / name).write_text(key)
    return open_wiring(ClusterSettings(cluster_key=str(directory / name)))


def link_to(address: str, opened: OpenWiring, wanted: LinkState) -> LinkState:
    dealer = Dealer.connect(opened.wiring, address, "decode-0#1", TO_WORKER, watches=True)
    assert dealer.link is not None
    for _ in range(PATIENCE):
        if (state := dealer.link.state()) == wanted:
            break
        dealer.socket.poll(20)
    dealer.close()
    return state


def is_refused(router: Router, opened: OpenWiring) -> bool:
    assert router.refusals is not None
    dealer = Dealer.connect(opened.wiring, router.address, "decode-0#1", TO_WORKER)
    refused = any(router.refusals.is_waiting(20) for _ in range(PATIENCE))
    dealer.close()
    return refused


KEY, OTHER_KEY = new_cluster_key(), new_cluster_key()


@pytest.mark.parametrize(
    ("gateway", "worker", "state"),
    [
        ("", "", "up"),
        (KEY, KEY, "up"),
        (KEY, OTHER_KEY, "unanswered"),
        (KEY, "", "unanswered"),
        ("", KEY, "unanswered"),
    ],
    ids=["no keys", "one key", "another key", "only the gateway has one", "only the worker has one"],
)
def test_a_worker_knows_whether_the_gateway_shakes_hands(
    tmp_path: Path, gateway: str, worker: str, state: LinkState
) -> None:
    server, client = member(tmp_path, "gateway", gateway), member(tmp_path, "worker", worker)
    router = Router.bind(server.wiring, "tcp://127.0.0.1:0", FROM_WORKER, watches=True)
    try:
        assert link_to(router.address, client, state) == state
        if state == "unanswered":
            assert is_refused(router, client)
    finally:
        router.close()
        client.close()
        server.close()


@pytest.fixture
def plain() -> Iterator[OpenWiring]:
    opened = open_wiring(ClusterSettings())
    yield opened
    opened.close()


def test_where_nobody_listens_it_is_unreached_and_where_nobody_speaks_unanswered(plain: OpenWiring) -> None:
    with closing(create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        assert link_to(f"tcp://127.0.0.1:{port}", plain, "unanswered") == "unanswered"
    assert link_to(f"tcp://127.0.0.1:{port}", plain, "unreached") == "unreached"


def said_at(caplog: pytest.LogCaptureFixture, link: LinkState, is_taken_in: bool) -> list[tuple[float, str]]:
    """What a worker says in a minute, and when."""
    log, said = MembershipLog("10.0.0.1:8001", 0.0), []
    for tenth in range(600):
        caplog.clear()
        log.observe(tenth / 10, link, is_taken_in)
        said += [(tenth / 10, record.getMessage()) for record in caplog.records]
    return said


@pytest.mark.parametrize(
    ("link", "reason"),
    [("unreached", "nobody listens"), ("unanswered", "--cluster-key"), ("up", "take this worker in")],
)
def test_it_says_within_five_seconds_what_keeps_it_out_and_again_from_time_to_time(
    caplog: pytest.LogCaptureFixture, link: LinkState, reason: str
) -> None:
    caplog.set_level("INFO")
    first, second = said_at(caplog, link, is_taken_in=False)
    assert first[0] <= 5
    assert second[0] - first[0] >= REPEAT_S - 0.1
    assert first[1].startswith("no answer from the gateway at 10.0.0.1:8001: ")
    assert reason in first[1]


def test_it_is_ready_when_it_has_joined_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert said_at(caplog, "up", is_taken_in=True) == [(0.0, "ready")]


def test_a_gateway_that_goes_and_returns_is_missed_and_greeted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = MembershipLog("10.0.0.1:8001", 0.0)
    for now, link in (
        (0.0, "up"),
        (1.0, "unreached"),
        (2.0, "up"),
        (3.0, "unreached"),
        (8.0, "unreached"),
        (9.0, "up"),
    ):
        log.observe(now, link, is_taken_in=True)  # type: ignore[arg-type]
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == ["ready", "joined again", "no answer from the gateway at 10.0.0.1", "joined again"]


def test_a_gateway_says_at_once_that_strangers_knock_and_then_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = member(tmp_path, "gateway", KEY), member(tmp_path, "worker", OTHER_KEY)
    router, time = Router.bind(server.wiring, "tcp://127.0.0.1:0", FROM_WORKER, watches=True), [0.0]
    refused = RefusedConnections(router, lambda: time[0])
    try:
        for now in (0.0, 1.0, REFUSED_REPORT_S + 1):
            time[0] = now
            assert is_refused(router, client)
            refused.check()
        assert [record.getMessage() for record in caplog.records] == ["connections refused"] * 2
    finally:
        router.close()
        client.close()
        server.close()
