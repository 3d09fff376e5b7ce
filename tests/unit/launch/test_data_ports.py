"""NIXL's data ports ask for no key: where a cluster does not leave the machine, nor do they."""

import io
from pathlib import Path

import pytest

from headstart.cli import parse
from headstart.config.settings import GatewaySettings, WorkerSettings
from headstart.launch.serve import ServePlan, children
from headstart.launch.topology import Topology
from headstart.worker.spec import LogSpec, WorkerSpec, read_spec, transfer_environment


def worker_specs(control_host: str) -> list[WorkerSpec]:
    plan = ServePlan(
        "model", GatewaySettings(control_host=control_host), WorkerSettings(), Topology("cpu", 1, 1), LogSpec()
    )
    documents = [child.command(1)[1] for child in children(plan, Path("model")) if child.role != "gateway"]
    return [read_spec(WorkerSpec, io.BytesIO(document)) for document in documents]


@pytest.mark.parametrize(("control_host", "is_local"), [("127.0.0.1", True), ("0.0.0.0", False), ("10.0.0.1", False)])
def test_workers_know_whether_others_may_join_from_elsewhere(control_host: str, is_local: bool) -> None:
    assert [spec.is_local for spec in worker_specs(control_host)] == [is_local, is_local]


@pytest.mark.parametrize(
    ("join", "is_local"),
    [("127.0.0.1:8001", True), ("localhost:8001", True), ("10.0.0.1:8001", False), ("node-3:8001", False)],
)
def test_a_worker_started_by_hand_knows_it_from_the_address_it_joins(
    monkeypatch: pytest.MonkeyPatch, join: str, is_local: bool
) -> None:
    started: list[WorkerSpec] = []
    monkeypatch.setattr("headstart.worker.process.run_worker_process", started.append)
    for role in ("prefill", "decode"):
        parse([role, "--join", join]).run()
    assert [spec.is_local for spec in started] == [is_local, is_local]


def test_data_ports_of_a_cluster_on_one_machine_open_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert transfer_environment(is_local=True) == {"UCX_NET_DEVICES": "lo"}
    assert transfer_environment(is_local=False) == {}


def test_an_interface_that_the_operator_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert transfer_environment(is_local=True) == {}
