"""KV that is damaged on its way is found by its checksum before the first token. The canaries: with checksums off, the
fingerprints find it in what the requests would have been answered from."""

import random
import re
from dataclasses import replace
from itertools import islice

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headstart.core.errors import InvariantError
from headstart.observe.metrics import WorkerCollector, WorkerSample
from headstart.sim.client import Handle
from headstart.sim.cluster import SimCluster
from headstart.sim.kv_fingerprints import oracle
from headstart.sim.spec import ClusterSpec
from headstart.transfer.loopback import Fault, Posted, inject_nth
from tests.chaos.plan import draw_plan
from tests.chaos.run import ChaosRun

READ_DAMAGE = "holds no KV|holds another sequence's KV|changed while a step read it"
LATE_PAGE = f"{READ_DAMAGE}|under a peer's write and not kept"


def run(cluster: SimCluster) -> None:
    while not cluster.is_quiet():
        cluster.step()
        cluster.check()
    cluster.check_idle()


def assert_right(cluster: SimCluster, handle: Handle) -> None:
    request = handle.request
    assert handle.finished is not None, handle.failed
    assert handle.tokens == oracle(request.prompt, request.stop.max_new_tokens, cluster.spec.vocab_size)


def mismatches(cluster: SimCluster) -> float:
    return sum(cluster.load(name).get("digest_mismatches", 0) for name in cluster.workers)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.behaviour("A6")
def test_one_bit_of_one_page_flips_and_the_range_is_fetched_again_before_the_first_token(index: int) -> None:
    cluster = SimCluster(ClusterSpec(num_prefill=2))
    cluster.run_for(0.1)
    cluster.inject_write_faults(inject_nth({index: Fault(flips=True)}))
    handle = cluster.submit(cluster.request(range(45), 8))
    cluster.run_until(lambda: mismatches(cluster) > 0)
    assert handle.tokens == []
    run(cluster)
    assert_right(cluster, handle)
    assert mismatches(cluster) == 1
    assert cluster.load("decode-0")["prefill_retries"] == 1
    assert cluster.load("decode-0").get("local_prefill_tokens", 0) == 0


@pytest.mark.behaviour("A6")
def test_the_mismatch_is_a_metric() -> None:
    cluster = SimCluster()
    cluster.run_for(0.1)
    cluster.inject_write_faults(inject_nth({0: Fault(flips=True)}))
    cluster.submit(cluster.request(range(45), 8))
    run(cluster)
    registry = CollectorRegistry()
    load = cluster.workers["decode-0"].organs.scheduler.load()
    registry.register(WorkerCollector(lambda: [WorkerSample("decode-0", "decode", "alive", load)]))
    scraped = generate_latest(registry).decode()
    assert 'headstart_worker_events_total{event="digest_mismatches",role="decode",worker="decode-0"} 1.0' in scraped


def test_a_way_that_always_damages_costs_two_tries_and_then_the_prompt_is_computed_where_it_is_needed() -> None:
    cluster = SimCluster()
    cluster.run_for(0.1)
    cluster.inject_write_faults(lambda posted: Fault(flips=True))
    handle = cluster.submit(cluster.request(range(45), 8))
    run(cluster)
    assert_right(cluster, handle)
    assert cluster.load("decode-0")["prefill_calls"] == 2
    assert cluster.load("decode-0")["local_prefill_tokens"] == 44


@pytest.mark.behaviour("A5")
def test_fifty_requests_five_at_a_time_over_a_way_that_damages_and_lands_late() -> None:
    cluster, rng = SimCluster(ClusterSpec(num_prefill=2, prefill_pages=256, decode_pages=256)), random.Random(5)
    cluster.run_for(0.1)
    damaged = 0

    def inject(posted: Posted) -> Fault:
        nonlocal damaged
        fault = Fault(flips=rng.random() < 0.1, late_page_s=rng.choice((0.02, 0.3)) if rng.random() < 0.1 else None)
        damaged += fault != Fault()
        return fault

    cluster.inject_write_faults(inject)
    while len(cluster.handles) < 50:
        if cluster.gateway.num_unfinished < 5:
            length = rng.choice((6, 20, 120))
            cluster.submit(cluster.request([rng.randrange(97) for _ in range(length)], 4, deadline_s=300.0))
        cluster.step()
        cluster.check()
    run(cluster)
    for handle in cluster.handles:
        assert_right(cluster, handle)
    assert damaged > 20
    assert mismatches(cluster) > damaged / 2, "others were cut before their notice came"


@pytest.mark.parametrize("fault", [Fault(flips=True), Fault(late_page_s=0.05)], ids=["flipped", "late"])
def test_without_checksums_the_fingerprints_catch_the_same_damage(fault: Fault) -> None:
    cluster = SimCluster(ClusterSpec(verify_transfers=False))
    cluster.run_for(0.1)
    cluster.inject_write_faults(inject_nth({0: fault}))
    cluster.submit(cluster.request(range(45), 8))
    with pytest.raises((AssertionError, InvariantError), match=LATE_PAGE):
        run(cluster)


def failure_without_checksums(seed: int) -> Exception | None:
    plan = draw_plan(seed)
    try:
        ChaosRun(replace(plan, spec=replace(plan.spec, verify_transfers=False)), seed).run()
    except (AssertionError, InvariantError) as error:
        return error
    return None


def test_chaos_without_checksums_is_caught_by_the_fingerprints() -> None:
    """Of some seeds no request reads the damage: it had left, or the bit was behind the prompt's end."""
    damaging = (seed for seed in range(60) if draw_plan(seed).weather.flipped > 0.05)
    failures = list(islice(filter(None, map(failure_without_checksums, damaging)), 3))
    assert len(failures) == 3
    for failure in failures:
        assert re.search(LATE_PAGE, str(failure)), failure
