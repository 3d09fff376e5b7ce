"""Prompts computed beside decode rows in a simulated cluster: what they cost the streams that run."""

from itertools import pairwise
from typing import Any

import pytest

from headstart.sim.client import Handle
from headstart.sim.cost import linear_cost
from headstart.sim.spec import Modelling
from tests.support.clusters import assert_right, make_cluster, prompt, submit

BASE_S, TOKEN_S = 0.010, 5e-5


def gaps(handle: Handle, since: float, until: float) -> list[float]:
    """Between its tokens, shortest first."""
    return sorted(b - a for a, b in pairwise(handle.token_times) if since < b <= until)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("limits", "bound_s"),
    [({}, 0.2), ({"max_step_stretch": 3.0}, 3.15 * BASE_S), ({"itl_slo_s": 0.020}, 0.020)],
    ids=["no bound", "three times a decode step", "an objective"],
)
def test_a_long_prompt_beside_a_stream_takes_as_much_of_each_step_as_the_bound_leaves(
    limits: dict[str, Any], bound_s: float, steps_in_flight: int
) -> None:
    decode = {"context_len": 8192, "chunked_prefill_size": 2048, **limits}
    cluster = make_cluster(
        num_prefill=0,
        decode=decode,
        decode_pages=4096,
        timing={"decode_cost": linear_cost(BASE_S, TOKEN_S), "control_delay_s": (0.0001, 0.0001)},
        modelling=Modelling(decode_steps_in_flight=(steps_in_flight,)),
    )
    stream = submit(cluster, prompt(20), 1500)
    cluster.run_for(1.0)
    teaching = submit(cluster, prompt(3000, first=1), 2)  # the first chunks tell what chunks cost
    cluster.run_for(2.0)
    since = cluster.clock.now()
    long = submit(cluster, prompt(7000, first=2), 4)
    cluster.run_until(lambda: all(handle.is_done for handle in (stream, teaching, long)))
    assert_right(stream, teaching, long)
    assert long.first_token_at is not None
    beside = gaps(stream, since, long.first_token_at)
    assert beside[int(0.95 * len(beside))] < bound_s
    if not limits:
        assert beside[-1] > 5 * BASE_S  # what the bounds are for
