"""Prefill workers tell others the address that they reach the gateway by, so it has to be one that others can reach."""

import pytest

from headstart.cli import main
from headstart.config.errors import ConfigError
from headstart.config.settings import ClusterSettings, GatewaySettings, WorkerSettings
from headstart.launch.serve import ServePlan, check_control_host, check_control_is_guarded
from headstart.launch.topology import Topology
from headstart.worker.spec import LogSpec


def plan(control_host: str, num_prefill: int) -> ServePlan:
    return ServePlan(
        "model",
        GatewaySettings(control_host=control_host),
        WorkerSettings(),
        Topology("cpu", num_prefill, 1),
        LogSpec(),
    )


def test_serve_with_prefill_workers_wants_to_be_told_an_address_that_others_reach() -> None:
    with pytest.raises(ConfigError, match=r"--control-host 0\.0\.0\.0 .* give this machine's address"):
        check_control_host(plan("0.0.0.0", num_prefill=1))


@pytest.mark.parametrize(("control_host", "num_prefill"), [("127.0.0.1", 1), ("10.0.0.1", 1), ("0.0.0.0", 0)])
def test_other_hosts_and_clusters_without_local_prefill_workers_are_let_through(
    control_host: str, num_prefill: int
) -> None:
    check_control_host(plan(control_host, num_prefill))


@pytest.mark.parametrize("control_host", ["0.0.0.0", "10.0.0.1", "node-3"])
def test_other_machines_are_let_in_by_a_key_or_by_the_operators_word(control_host: str) -> None:
    gateway = GatewaySettings(control_host=control_host)
    with pytest.raises(ConfigError, match=r"--cluster-key .* --insecure-control"):
        check_control_is_guarded(gateway, ClusterSettings())
    for cluster in (ClusterSettings(cluster_key="a file"), ClusterSettings(insecure_control=True)):
        check_control_is_guarded(gateway, cluster)
    check_control_is_guarded(GatewaySettings(), ClusterSettings())


def test_a_gateway_that_anybody_could_join_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["headstart", "gateway", "no-such-model", "--control-host", "0.0.0.0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        "headstart: --control-host 0.0.0.0 lets other machines in: give --cluster-key"
    )
