"""Case M1: what the warm-up left in the pool is never taken for anybody's KV, not even by a prompt of its own tokens."""

from pathlib import Path

import pytest

from headstart.executor.build import ExecutorConfig
from headstart.model.source import WeightSource
from tests.support.executors import World, assert_greedy, assert_same_kv, reference_model, write_small_model


@pytest.mark.behaviour("32", "M1")
def test_the_warm_up_prompt_asked_for_right_after_is_answered_like_any_other(tmp_path: Path) -> None:
    source = WeightSource(write_small_model(tmp_path / "model", "llama"), "dummy", seed=3)
    world = World(ExecutorConfig(source, 16, dtype="float32", num_pages=8))
    world._pages = list(range(7, -1, -1))  # the pages that the warm-up wrote come first
    world.executor.warm_up(40)
    same, longer = world.admit([0] * 40), world.admit([0] * 70)
    world.generate([same], 6, chunk=16)
    world._pages = list(range(7, -1, -1))
    world.generate([longer], 6, chunk=64)
    reference = reference_model(source)
    assert_greedy(same, reference)
    assert_greedy(longer, reference)
    assert_same_kv(world, longer, reference)
    world.executor.close()
