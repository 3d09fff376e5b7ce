"""Whatever the gateway, the clock and the prefill workers do: the ledger is exact and every choice ends once and well."""

import pytest
from decode_walk import Walk


@pytest.mark.parametrize("seed", range(40))
def test_random_lives(seed: int):
    walk = Walk(seed)
    walk.take(150)
    walk.settle()
    walk.judge()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_random_lives_at_length(seed: int):
    walk = Walk(seed)
    walk.take(600)
    walk.settle()
    walk.judge()
