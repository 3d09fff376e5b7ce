"""What a cluster on one machine opens to others, and what its own keys open to whom."""

import os
import socket
from ipaddress import IPv4Address
from pathlib import Path

import httpx
import pytest
from cluster import TINY_FLAGS, Cluster
from listening import listeners_of


@pytest.mark.behaviour("O5")
def test_a_cluster_started_with_defaults_listens_on_loopback_addresses_only(remote: Cluster) -> None:
    answer = remote.complete(list(range(100, 150)), 4)
    assert answer["usage"]["headstart"]["bytes_moved"] > 0, "the data ports are open by now"
    found = listeners_of(remote.process.pid)
    ports = {listener.port for listener in found}
    assert {remote.port, remote.control_port} <= ports
    assert len({listener.pid for listener in found}) >= 3, "gateway, prefill and decode worker all listen"
    assert [listener for listener in found if not listener.is_loopback] == []


def test_a_socket_that_listens_everywhere_would_be_seen() -> None:
    with socket.socket() as open_to_all, socket.socket() as local:
        for listener, host in ((open_to_all, "0.0.0.0"), (local, "127.0.0.1")):
            listener.bind((host, 0))
            listener.listen()
        found = {listener.port: listener for listener in listeners_of(os.getpid())}
        seen = found[open_to_all.getsockname()[1]]
        assert seen.address == IPv4Address("0.0.0.0")
        assert not seen.is_loopback
        assert found[local.getsockname()[1]].is_loopback


def secret(path: Path, *keys: str) -> str:
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return str(path)


@pytest.mark.full
def test_keys_of_files_open_what_they_should_in_real_processes(tmp_path: Path) -> None:
    """One decode worker alone is enough; the launcher itself asks for the cluster's state until all are ready."""
    clients, admin = secret(tmp_path / "clients", "alpha", "beta"), secret(tmp_path / "admin", "operator")
    flags = ("--prefill", "0", "--api-key-file", clients, "--tenant-cache-share", "0.5", "--tenant-max-requests", "2")
    cluster = Cluster(tmp_path, *TINY_FLAGS, *flags, "--admin-key-file", admin)
    try:
        cluster.wait_until_ready()
        url = f"http://127.0.0.1:{cluster.port}"
        wanted = {"prompt": [5] * 40, "max_tokens": 2}

        def status(method: str, path: str, key: str, **kwargs: object) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return httpx.request(method, url + path, headers=headers, timeout=60, **kwargs).status_code  # type: ignore[arg-type]

        for key, may_ask, may_operate in (("", 401, 401), ("alpha", 200, 403), ("operator", 200, 200)):
            assert status("POST", "/v1/completions", key, json=wanted) == may_ask
            assert [status("GET", path, key) for path in ("/cluster", "/metrics")] == [may_operate] * 2
            assert status("POST", "/flush_cache", key) == may_operate
        assert status("POST", "/v1/completions", "beta", json=wanted | {"n": 3}) == 400
        for text in (cluster.log, *(Path(f"/proc/{pid}/cmdline").read_text() for pid in children(cluster))):
            assert "operator" not in text
            assert "alpha" not in text
    finally:
        cluster.stop()


def children(cluster: Cluster) -> list[int]:
    return [cluster.process.pid, cluster.pid("decode-0")]
