"""Prompts computed beside decode rows in a simulated cluster: what they cost the streams that run."""

from itertools import pairwise
from typing import Any

import pytest
from worlds import assert_right, make_world, prompt, submit

from headstart.sim.client import Handle
from headstart.sim.cost import linear_cost
from headstart.sim.spec import Modelling

BASE_S, TOKEN_S = 0.010, 5e-5


def longest_gap(handle: Handle, since: float) -> float:
    return max(b - a for a, b in pairwise(handle.token_times) if b > since)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("limits", "bound_s"),
    [({}, 0.2), ({"max_step_stretch": 3.0}, 3.3 * BASE_S), ({"itl_slo_s": 0.020}, 1.1 * 0.020)],
    ids=["no bound", "three times a decode step", "an objective"],
)
def test_a_long_prompt_beside_a_stream_takes_as_much_of_each_step_as_the_bound_leaves(
    limits: dict[str, Any], bound_s: float, steps_in_flight: int
) -> None:
    decode = {"context_len": 8192, "chunked_prefill_size": 2048, **limits}
    world = make_world(
        num_prefill=0,
        decode=decode,
        decode_pages=4096,
        timing={"decode_cost": linear_cost(BASE_S, TOKEN_S), "control_delay_s": (0.0001, 0.0001)},
        modelling=Modelling(decode_steps_in_flight=(steps_in_flight,)),
    )
    stream = submit(world, prompt(20), 1500)
    world.run_for(1.0)
    teaching = submit(world, prompt(600, first=1), 2)  # the first chunks tell what chunks cost
    world.run_for(2.0)
    since = world.clock.now()
    long = submit(world, prompt(4000, first=2), 4)
    world.run_until(lambda: all(handle.is_done for handle in (stream, teaching, long)))
    assert_right(stream, teaching, long)
    gap = longest_gap(stream, since)
    assert gap < bound_s
    if not limits:
        assert gap > 5 * BASE_S  # what the bounds are for
