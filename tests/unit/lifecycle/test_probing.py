"""Case O8: whoever asks for a prompt learns nothing of whether another tenant asked for it before."""

import pytest

from headstart.gateway.api.auth import Tenant
from headstart.sim.client import Handle
from tests.support.clusters import make_cluster, prompt, settle, stats

ASKED, OTHER = prompt(41, first=1), prompt(41, first=2)
SPY, VICTIM = Tenant(b"spy"), Tenant(b"victim")


def probe(said_by_victim: list[int], spy: Tenant, *, at_once: bool) -> tuple[Handle, list[float]]:
    """The spy asks for `ASKED` after the victim, or while the victim's request runs: its answer, and the times of its
    tokens since it asked. A cluster of one seed draws the same delays whatever is asked."""
    cluster = make_cluster(seed=3)
    first = cluster.submit(cluster.request(said_by_victim, 12, namespace=VICTIM.namespace("")))
    cluster.run_until(lambda: first.is_done or (at_once and bool(first.tokens)))
    began = cluster.clock.now()
    asked = cluster.submit(cluster.request(ASKED, 6, namespace=spy.namespace("")))
    settle(cluster)
    return asked, [time_s - began for time_s in asked.token_times]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.behaviour("O8")
def test_a_probe_of_anothers_prompt_is_answered_as_if_nobody_had_sent_it(at_once: bool) -> None:
    held, held_times = probe(ASKED, SPY, at_once=at_once)
    fresh, fresh_times = probe(OTHER, SPY, at_once=at_once)
    assert stats(held).cached_tokens == stats(fresh).cached_tokens == 0
    assert (stats(held).miss_reason, stats(held).bytes_moved) == (stats(fresh).miss_reason, stats(fresh).bytes_moved)
    assert held_times == fresh_times


@pytest.mark.behaviour("O8")
def test_the_tenant_itself_does_hit_and_sooner() -> None:
    """Without this, the test above would pass with every cache off."""
    held, held_times = probe(ASKED, VICTIM, at_once=False)
    fresh, fresh_times = probe(OTHER, VICTIM, at_once=False)
    assert stats(held).cached_tokens == 40
    assert stats(fresh).cached_tokens == 0
    assert held_times[0] < fresh_times[0]
