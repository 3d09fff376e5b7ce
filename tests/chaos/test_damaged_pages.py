"""KV that is damaged on its way is found by its checksum before the first token. The canaries: with checksums off, the
watermarks find it in what the requests would have been answered from."""

import random
import re
from dataclasses import replace
from itertools import islice

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from chaos.plan import draw_plan
from chaos.run import ChaosRun
from headstart.core.errors import InvariantError
from headstart.observe.metrics import WorkerCollector, WorkerSample
from headstart.sim.client import Handle
from headstart.sim.spec import WorldSpec
from headstart.sim.watermarks import oracle
from headstart.sim.world import World
from headstart.transfer.loopback import Fate, Posted, judge_nth

READ_DAMAGE = "holds no KV|holds another sequence's KV|changed while a step read it"
LATE_PAGE = f"{READ_DAMAGE}|under a peer's write and not kept"


def run(world: World) -> None:
    while not world.is_quiet():
        world.step()
        world.check()
    world.check_idle()


def assert_right(world: World, handle: Handle) -> None:
    request = handle.request
    assert handle.finished is not None, handle.failed
    assert handle.tokens == oracle(request.prompt, request.stop.max_new_tokens, world.spec.vocab_size)


def mismatches(world: World) -> float:
    return sum(world.load(name).get("digest_mismatches", 0) for name in world.workers)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_case_A6_one_bit_of_one_page_flips_and_the_range_is_fetched_again_before_the_first_token(index: int) -> None:
    world = World(WorldSpec(num_prefill=2))
    world.run_for(0.1)
    world.judge_writes(judge_nth({index: Fate(flips=True)}))
    handle = world.submit(world.request(range(45), 8))
    world.run_until(lambda: mismatches(world) > 0)
    assert handle.tokens == []
    run(world)
    assert_right(world, handle)
    assert mismatches(world) == 1
    assert world.load("decode-0")["prefill_retries"] == 1
    assert world.load("decode-0").get("local_prefill_tokens", 0) == 0


def test_case_A6_the_mismatch_is_a_metric() -> None:
    world = World()
    world.run_for(0.1)
    world.judge_writes(judge_nth({0: Fate(flips=True)}))
    world.submit(world.request(range(45), 8))
    run(world)
    registry = CollectorRegistry()
    load = world.workers["decode-0"].organs.scheduler.load()
    registry.register(WorkerCollector(lambda: [WorkerSample("decode-0", "decode", "alive", load)]))
    scraped = generate_latest(registry).decode()
    assert 'headstart_worker_events_total{event="digest_mismatches",role="decode",worker="decode-0"} 1.0' in scraped


def test_a_way_that_always_damages_costs_two_tries_and_then_the_prompt_is_computed_where_it_is_needed() -> None:
    world = World()
    world.run_for(0.1)
    world.judge_writes(lambda posted: Fate(flips=True))
    handle = world.submit(world.request(range(45), 8))
    run(world)
    assert_right(world, handle)
    assert world.load("decode-0")["prefill_calls"] == 2
    assert world.load("decode-0")["local_prefill_tokens"] == 44


def test_case_A5_fifty_requests_five_at_a_time_over_a_way_that_damages_and_lands_late() -> None:
    world, rng = World(WorldSpec(num_prefill=2, prefill_pages=256, decode_pages=256)), random.Random(5)
    world.run_for(0.1)
    damaged = 0

    def judge(posted: Posted) -> Fate:
        nonlocal damaged
        fate = Fate(flips=rng.random() < 0.1, late_page_s=rng.choice((0.02, 0.3)) if rng.random() < 0.1 else None)
        damaged += fate != Fate()
        return fate

    world.judge_writes(judge)
    while len(world.handles) < 50:
        if world.gateway.num_unfinished < 5:
            length = rng.choice((6, 20, 120))
            world.submit(world.request([rng.randrange(97) for _ in range(length)], 4, deadline_s=300.0))
        world.step()
        world.check()
    run(world)
    for handle in world.handles:
        assert_right(world, handle)
    assert damaged > 20
    assert mismatches(world) > damaged / 2, "others were cut before their notice came"


@pytest.mark.parametrize("fate", [Fate(flips=True), Fate(late_page_s=0.05)], ids=["flipped", "late"])
def test_without_checksums_the_watermarks_catch_the_same_damage(fate: Fate) -> None:
    world = World(WorldSpec(verify_transfers=False))
    world.run_for(0.1)
    world.judge_writes(judge_nth({0: fate}))
    world.submit(world.request(range(45), 8))
    with pytest.raises((AssertionError, InvariantError), match=LATE_PAGE):
        run(world)


def failure_without_checksums(seed: int) -> Exception | None:
    plan = draw_plan(seed)
    try:
        ChaosRun(replace(plan, spec=replace(plan.spec, verify_transfers=False)), seed).run()
    except (AssertionError, InvariantError) as error:
        return error
    return None


def test_chaos_without_checksums_is_caught_by_the_watermarks() -> None:
    """Of some seeds no request reads the damage: it had left, or the bit was behind the prompt's end."""
    damaging = (seed for seed in range(60) if draw_plan(seed).weather.flipped > 0.05)
    failures = list(islice(filter(None, map(failure_without_checksums, damaging)), 3))
    assert len(failures) == 3
    for failure in failures:
        assert re.search(LATE_PAGE, str(failure)), failure
