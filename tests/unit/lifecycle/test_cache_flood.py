"""Case O9: cheap requests with long prompts, from a tenant that wants the others' KV gone."""

from random import Random

import pytest

from headstart.core.identity import cache_namespace
from headstart.core.layout import reusable_len
from headstart.kv.cache import PrefixCache
from headstart.sim.client import Handle
from headstart.sim.cluster import SimCluster
from headstart.sim.spec import ClusterSpec
from tests.support.clusters import VOCAB, assert_right, prompt, settle, stats

VICTIM, ATTACKER = (cache_namespace(tenant_salt=salt) for salt in (b"victim", b"attacker"))
NUM_STREAMS = 4
SYSTEM_PROMPTS = [prompt(41, first) for first in range(4)]


def hit_rate(handles: list[Handle], page_size: int) -> float:
    """Part of what could have been found that was."""
    possible = sum(reusable_len(len(handle.request.prompt), page_size) for handle in handles)
    return sum(stats(handle).decode_prefix_len for handle in handles) / possible


def serve_victim(share: float | None, under_attack: bool) -> float:
    """The victim's hit rate over rounds of its prompts, while an attacker keeps its streams busy with one-token requests
    of fresh prompts."""
    spec = ClusterSpec(decode_pages=128, prefill_pages=128)
    owner_pages = None if share is None else int(spec.decode_pages * share)
    cluster = SimCluster(spec, make_cache=lambda num_pages, page_size: PrefixCache(num_pages, page_size, owner_pages))
    cluster.run_for(0.1)
    rng = Random(5)
    attacks: list[Handle] = []
    served: list[Handle] = []
    for number in range(24):
        while under_attack and sum(not attack.is_done for attack in attacks) < NUM_STREAMS:
            fresh = [rng.randrange(VOCAB) for _ in range(50)]
            attacks.append(cluster.submit(cluster.request(fresh, 1, namespace=ATTACKER)))
        asked = cluster.submit(cluster.request(SYSTEM_PROMPTS[number % 4], 4, namespace=VICTIM))
        while not asked.is_done:
            cluster.step()
        served.append(asked)
    settle(cluster)
    assert_right(*served, *attacks)
    return hit_rate(served[4:], spec.page_size)


@pytest.mark.behaviour("O9")
def test_a_flood_costs_others_at_most_ten_points_of_their_hit_rate() -> None:
    undisturbed = serve_victim(0.5, under_attack=False)
    assert undisturbed == 1.0
    assert serve_victim(0.5, under_attack=True) >= undisturbed - 0.1


@pytest.mark.behaviour("O9")
def test_without_shares_the_same_flood_takes_it_all() -> None:
    assert serve_victim(None, under_attack=False) == 1.0
    assert serve_victim(None, under_attack=True) < 0.5
