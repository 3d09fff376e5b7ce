"""Whatever the gateway, the clock and the prefill workers do: the ledger is exact and every choice ends once and well."""

import pytest

from tests.support.decode_walk import Walk


@pytest.mark.parametrize(("max_steps", "num_drafts"), [(1, 0), (2, 0), (1, 3), (2, 3)])
@pytest.mark.parametrize("seed", range(25))
def test_random_lives(seed: int, max_steps: int, num_drafts: int):
    walk = Walk(seed, max_steps, num_drafts)
    walk.take(150)
    walk.settle()
    walk.judge()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_random_lives_at_length(seed: int):
    walk = Walk(seed, 1 + seed % 2, (seed // 2) % 4)
    walk.take(600)
    walk.settle()
    walk.judge()
