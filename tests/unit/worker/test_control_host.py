"""Prefill workers tell others the address that they reach the gateway by, so it has to be one that others can reach."""

import pytest

from headstart.config.errors import ConfigError
from headstart.config.settings import GatewaySettings, WorkerSettings
from headstart.worker.serve import ServePlan, check_control_host
from headstart.worker.spec import LogSpec


def plan(control_host: str, num_prefill: int) -> ServePlan:
    return ServePlan("model", GatewaySettings(control_host=control_host), WorkerSettings(), num_prefill, 1, LogSpec())


def test_serve_with_prefill_workers_wants_to_be_told_an_address_that_others_reach() -> None:
    with pytest.raises(ConfigError, match=r"--control-host 0\.0\.0\.0 .* give this machine's address"):
        check_control_host(plan("0.0.0.0", num_prefill=1))


@pytest.mark.parametrize(("control_host", "num_prefill"), [("127.0.0.1", 1), ("10.0.0.1", 1), ("0.0.0.0", 0)])
def test_other_hosts_and_clusters_without_local_prefill_workers_are_let_through(
    control_host: str, num_prefill: int
) -> None:
    check_control_host(plan(control_host, num_prefill))
