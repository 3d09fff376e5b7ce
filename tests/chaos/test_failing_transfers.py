"""One transfer in ten fails: every request has its one end, no output is wrong, the ledger is exact, and it costs little."""

import itertools
import random

from headstart.sim.spec import WorldSpec
from headstart.sim.watermarks import oracle
from headstart.sim.world import World
from headstart.transfer.loopback import Fate, Posted

NUM_REQUESTS = 1000
NUM_AT_ONCE = 24
NUM_NEW = 4
FAILURES = (Fate(fails=True), Fate(fails=True), Fate(refused=True), Fate(num_notices=0))
SPEC = WorldSpec(num_prefill=2, num_decode=2, prefill_pages=256, decode_pages=256)


def serve(share_failing: float) -> World:
    """Requests with little in common, always `NUM_AT_ONCE` of them unfinished. Returns the world at rest."""
    world, rng = World(SPEC, seed=1), random.Random(2)

    def judge(posted: Posted) -> Fate:
        return rng.choice(FAILURES) if rng.random() < share_failing else Fate()

    world.judge_writes(judge)
    world.run_for(0.1)
    for step in itertools.count():
        num_open = world.gateway.num_unfinished
        for _ in range(min(NUM_AT_ONCE - num_open, NUM_REQUESTS - len(world.handles))):
            world.submit(world.request([rng.randrange(97) for _ in range(rng.randint(20, 60))], NUM_NEW))
        if len(world.handles) == NUM_REQUESTS and not world.gateway.num_unfinished:
            break
        world.step()
        if step % 20 == 0:
            world.check()
    world.run_until(world.is_quiet, limit_s=30.0)
    world.check_idle()
    return world


def duration_s(world: World) -> float:
    return max(handle.ended_at or 0.0 for handle in world.handles)


def test_1000_requests_with_one_transfer_in_ten_failing() -> None:
    world = serve(0.1)
    assert len(world.handles) == NUM_REQUESTS
    for handle in world.handles:
        assert handle.finished is not None, handle.failed
        assert handle.tokens == oracle(handle.request.prompt, NUM_NEW, SPEC.vocab_size)
    retries = sum(world.load(f"decode-{i}")["prefill_retries"] for i in range(2))
    assert retries > 50
    undisturbed, disturbed = duration_s(serve(0.0)), duration_s(world)
    print(f"{NUM_REQUESTS} requests: {undisturbed:.2f} s, with failures {disturbed:.2f} s, {retries:.0f} retries")
    assert disturbed < 1.6 * undisturbed
