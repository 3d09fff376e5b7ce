"""A prefill and a decode worker on a host of their own, whose cable is taken out under load and put back."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import TINY_FLAGS, Cluster, until
from island import Island, NotPermitted, island
from load import Load, conversations
from sharing import serve_until_each_works

from headstart.gateway.limits import DispatchLimits
from headstart.worker.ports import new_cluster_key

CUT_S = 10.0
RECOVERY_S = 10.0
RATE_S = 5.0
"""Answers are counted for so long before the cut and after the recovery."""
RATE_SHARE = 0.9
"""Of the rate before, within the recovery."""
WORKERS = ("prefill-0", "decode-0", "prefill-1", "decode-1")
MARGIN_S = 1.0


@pytest.fixture
def here_and_there(tmp_path: Path) -> Iterator[tuple[Cluster, Island]]:
    """Gateway, prefill-0 and decode-0 on this host, prefill-1 and decode-1 on another; control messages with CURVE."""
    try:
        with island() as other:
            key = tmp_path / "cluster.key"
            key.write_text(new_cluster_key())
            key.chmod(0o600)
            flags = (*TINY_FLAGS, "--dtype", "float32", "--local-prefill-tokens", "0", "--cluster-key", str(key))
            cluster = Cluster(tmp_path, *flags, command="gateway", host=other.host)
            try:
                for name in WORKERS:
                    is_there = name.endswith("1")
                    device = other.device if is_there else other.bridge
                    devices = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device, "UCX_TCP_BRIDGE_ENABLE": "y"}
                    before = other.inside if is_there else ()
                    cluster.join(name.partition("-")[0], name, *flags, before=before, **devices)
                cluster.wait_until_ready()
                cluster.wait_for_workers(2, 2)
                yield cluster, other
            finally:
                other.heal()
                cluster.stop()
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")


@dataclass(frozen=True)
class Outcome:
    """Until both workers are back; answers a second before the cut and once they are; the longest waits for a token."""

    recovery_s: float
    rate_before: float
    rate_after: float
    usual_stall_s: float
    stall_while_cut_s: float
    stall_once_healed_s: float

    def __str__(self) -> str:
        rates = f"{self.rate_before:.1f} answers a second before the cut, {self.rate_after:.1f} after it"
        cut, healed = f"cut {self.stall_while_cut_s:.2f} s", f"healed {self.stall_once_healed_s:.2f} s"
        back = f"the host is back {self.recovery_s:.1f} s after it"
        return f"{rates}; {back}\nlongest stall: before {self.usual_stall_s:.2f} s, {cut}, {healed}"


def rate(load: Load) -> float:
    """Answers a second."""
    before = load.count.answers
    time.sleep(RATE_S)
    return (load.count.answers - before) / RATE_S


def cut_and_heal(cluster: Cluster, other: Island) -> Outcome:
    """Under load; every answer is proven right, and every conversation goes round while the host is cut off."""
    talks = conversations(cluster, 4, 3)
    cluster.http.post("/flush_cache")
    with Load(cluster, talks) as load:
        load.wait_for_answers(12)
        usual_stall_s = load.take_stall()
        load.wait_for_answers(12)
        until(lambda: cluster.worker("decode-1")["load"]["num_running"], "work on the other host")
        rate_before = rate(load)
        load.take_stall()
        other.cut()
        time.sleep(CUT_S)
        load.wait_for_rounds()  # all of it on this side
        stall_while_cut_s = load.take_stall()
        other.heal()
        healed_at = time.monotonic()
        cluster.wait_for_workers(2, 2)
        recovery_s = time.monotonic() - healed_at
        load.take_stall()
        rate_after = rate(load)
        load.wait_for_rounds()
        stall_once_healed_s = load.take_stall()
    assert not load.count.errors
    assert load.count.damage == (0, 0, 0)
    outcome = Outcome(recovery_s, rate_before, rate_after, usual_stall_s, stall_while_cut_s, stall_once_healed_s)
    print(f"\n{load.count.answers} answers; {outcome}")
    return outcome


@pytest.mark.full
@pytest.mark.behaviour("E14")
def test_a_host_that_is_cut_off_under_load_costs_no_token_and_is_used_again_once_healed(
    here_and_there: tuple[Cluster, Island],
) -> None:
    cluster, other = here_and_there
    cut_and_heal(cluster, other)
    cluster.wait_until_free()
    serve_until_each_works(cluster, ["prefill-1", "decode-1"], seed=83)


@pytest.mark.soak
@pytest.mark.behaviour("E14")
def test_no_token_waits_long_and_the_rate_is_back_once_the_host_is(
    here_and_there: tuple[Cluster, Island],
) -> None:
    outcome = cut_and_heal(*here_and_there)
    limits = DispatchLimits()
    assert outcome.stall_while_cut_s < limits.dead_after_s + limits.beat_s + outcome.usual_stall_s + MARGIN_S
    assert outcome.stall_once_healed_s < outcome.usual_stall_s + MARGIN_S
    assert outcome.recovery_s < RECOVERY_S
    assert outcome.rate_after > RATE_SHARE * outcome.rate_before
