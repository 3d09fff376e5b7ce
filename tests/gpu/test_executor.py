"""The executor on the card: graphs, two steps in flight, chunks beside decode rows."""

import os

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from headstart.core.errors import WorkerError
from headstart.executor.build import CardLimits, ExecutorConfig, make_executor
from headstart.model.source import WeightSource
from tests.gpu import executor_cases as cases
from tests.gpu.rig import Rig, Setup, assert_greedy, poison, prompt
from tests.unit.executor.world import write_small_model

SETUPS = {
    "bf16": Setup(),
    "bf16, no graphs": Setup(graph_rows=0),
    "bf16, page 16, not fused": Setup(page_size=16, num_pages=1600, fused=False),
    "fp8, heads of 128": Setup(kv_dtype="fp8_e4m3", head_dim=128),
}
NOISE = {"bfloat16": 0.15, "fp8_e4m3": 0.6}
"""Logits of these models spread over about +-5; bf16 activations round at 0.4 %, e4m3 keys and values at 6 %."""


@pytest.fixture(scope="module", params=SETUPS.values(), ids=SETUPS)
def rig(request, tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("model"), request.param)
    rig.executor.warm_up()
    poison(rig.pool)
    yield rig
    rig.executor.close()


@pytest.fixture(scope="module")
def noise(rig):
    return NOISE[rig.setup.kv_dtype]


def test_greedy_alone_and_together(rig, noise):
    cases.check_greedy_alone_and_together(rig, noise, long=900)


def test_a_chunk_whose_prefix_is_gathered(rig, noise):
    request = rig.admit(prompt(3, 1700))
    rig.generate([request], 4, chunk=800)
    assert_greedy(rig, request, noise)


def test_two_steps_ahead(rig, noise):
    cases.check_two_steps_ahead(rig, noise)


def test_pages_are_reused(rig, noise):
    cases.check_pages_are_reused(rig, noise)


def test_every_number_of_rows(rig, noise):
    cases.check_every_number_of_rows(rig, noise, (1, 2, 3, 5, 8, 9, 17, 32))


def test_drafts(rig):
    cases.check_drafts(rig)


def test_calls(rig):
    cases.check_order_of_calls(rig)
    cases.check_rows_that_fill_kv_only(rig)


def test_kv_of_a_chunk_and_of_decode_rows_is_the_same(rig):
    whole, pieces = rig.admit(prompt(5, 200)), rig.admit(prompt(5, 200))
    rig.run([rig.row(whole, 0, 400)])
    while pieces.num_computed < 200:
        rig.run([rig.row(pieces, 0, 150 if pieces.num_computed < 150 else 7)])
    ours, theirs = cases.kv_of(rig, whole), cases.kv_of(rig, pieces)
    bound = 0.02 if rig.setup.kv_dtype == "bfloat16" else 0.1
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(ours) <= bound


def test_a_pending_token_that_no_step_draws_ends_the_executor(rig, tmp_path):
    own = Rig(tmp_path, Setup(graph_rows=0))
    cases.check_unknown_pending(own)
    own.executor.close()


def test_out_of_memory_in_a_step_is_one_worker_error(tmp_path):
    rig = Rig(tmp_path, Setup(graph_rows=0))
    rig.run([rig.row(rig.admit(prompt(1, 40)), 0, 64)])
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    row = rig.row(rig.admit(prompt(2, 3000)), 0, 3000)
    try:
        with pytest.raises(WorkerError, match="out of GPU memory in step 2 of 3000 tokens"):
            rig.launch([row])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(WorkerError, match="out of GPU memory"):
        rig.executor.poll()
    rig.executor.close()


def test_from_settings_to_a_step(tmp_path):
    folder = write_small_model(tmp_path, "qwen3", head_dim=64)
    source = WeightSource(folder, "dummy")
    config = ExecutorConfig(source, 64, 100, "cuda", kv_dtype="fp8_e4m3", card=CardLimits(8, 8, 4096))
    executor = make_executor(config)
    executor.warm_up()
    assert executor.max_steps_in_flight == 2
    assert executor.host_pages() is None
    assert executor.region.device == "cuda:0"
    assert executor.region.page_bytes == 4 * 2 * 2 * 64 * 64
    executor.close()


def test_a_pool_that_does_not_fit_is_one_worker_error(tmp_path):
    source = WeightSource(write_small_model(tmp_path, "qwen3", head_dim=64), "dummy")
    with pytest.raises(WorkerError, match="--mem-fraction-static"):
        make_executor(ExecutorConfig(source, 64, 1 << 24, "cuda", self_test=False))


@pytest.mark.skipif("HEADSTART_GPU_SOAK" not in os.environ, reason="minutes of steps")
def test_many_requests_in_a_small_pool(rig, noise):
    rng = np.random.default_rng(0)
    for round_ in range(20):
        requests = [rig.admit(prompt(1000 * round_ + i, int(rng.integers(2, 300)))) for i in range(24)]
        rig.generate_ahead(requests, 12, chunk=64, stagger=1)
        for request in requests:
            assert_greedy(rig, request, noise)
            rig.release(request)
