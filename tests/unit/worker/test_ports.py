"""A cluster's key lets members in, keeps others out, and a malformed one is refused by name."""

from pathlib import Path

import pytest

from headstart.config.errors import ConfigError
from headstart.config.settings import ClusterSettings
from headstart.core.messages import Drain, Leave, WorkerRef
from headstart.wire.channels import FROM_WORKER, TO_WORKER
from headstart.wire.sockets import Dealer, Router
from headstart.worker.ports import OpenWiring, control_url, new_cluster_key, open_wiring, peer_url
from tests.support.steady import PATIENCE_MS


def member(directory: Path, name: str, key: str) -> OpenWiring:
    path = directory / name
    path.write_text(key)
    return open_wiring(ClusterSettings(cluster_key=str(path)))


def reaches(server: OpenWiring, client: OpenWiring, within_ms: int) -> bool:
    """Whether a message of `client` arrives at a Router of `server`; closes both."""
    router = Router.bind(server.wiring, "tcp://127.0.0.1:0", FROM_WORKER)
    port = router.address.rpartition(":")[2]
    dealer = Dealer.connect(client.wiring, f"tcp://127.0.0.1:{port}", "decode-0#1", TO_WORKER)
    dealer.send(Leave(WorkerRef("decode-0", 1)))
    router.socket.poll(within_ms)
    arrived = bool(router.drain())
    dealer.close()
    router.close()
    client.close()
    server.close()
    return arrived


def test_whoever_has_the_clusters_key_is_let_in(tmp_path: Path) -> None:
    key = new_cluster_key()
    assert reaches(member(tmp_path, "a", key), member(tmp_path, "b", key), PATIENCE_MS)


def test_another_clusters_key_is_not(tmp_path: Path) -> None:
    assert not reaches(member(tmp_path, "a", new_cluster_key()), member(tmp_path, "b", new_cluster_key()), 1000)


def test_a_process_without_a_key_is_not(tmp_path: Path) -> None:
    assert not reaches(member(tmp_path, "a", new_cluster_key()), open_wiring(ClusterSettings()), 1000)


@pytest.mark.parametrize(
    "content",
    ["", "only-one", "two words that are no keys", new_cluster_key().split()[0] * 2],
    ids=["nothing", "one word", "words", "keys run together"],  # the same in every process: keys are random
)
def test_a_malformed_key_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match="--cluster-key"):
        member(tmp_path, "bad", content)


def test_a_key_pair_whose_halves_do_not_belong_together_is_refused(tmp_path: Path) -> None:
    public, _ = new_cluster_key().split()
    _, secret = new_cluster_key().split()
    with pytest.raises(ConfigError, match="belong together"):
        member(tmp_path, "mixed", f"{public}\n{secret}\n")


def test_a_worker_that_joins_on_this_machine_listens_on_loopback_only() -> None:
    assert control_url("localhost:8001") == "tcp://127.0.0.1:8001"
    assert peer_url("127.0.0.1:8001") == "tcp://127.0.0.1"


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--join"):
        control_url("127.0.0.1:port")


@pytest.mark.behaviour("O3", "O7")
def test_a_stranger_under_a_members_name_changes_no_route(tmp_path: Path) -> None:
    """What a member says in public, its name and incarnation, lets nobody speak for it."""
    key, name = new_cluster_key(), WorkerRef("prefill-0", 1)
    server, worker = member(tmp_path, "a", key), member(tmp_path, "b", key)
    strangers = [member(tmp_path, "c", new_cluster_key()), open_wiring(ClusterSettings())]
    router = Router.bind(server.wiring, "tcp://127.0.0.1:0", FROM_WORKER)
    lines = [Dealer.connect(wiring.wiring, router.address, str(name), TO_WORKER) for wiring in (worker, *strangers)]
    lines[0].send(Leave(name))
    router.socket.poll(PATIENCE_MS)
    assert [sender for sender, _ in router.drain()] == [str(name)]
    for line in lines[1:]:
        line.send(Leave(name))
    assert not router.socket.poll(500)
    assert router.send(str(name), Drain())
    assert lines[0].socket.poll(PATIENCE_MS)
    assert not any(line.pending for line in lines[1:])
    for socket in (*lines, router):
        socket.close()
    for wiring in (worker, *strangers, server):
        wiring.close()
