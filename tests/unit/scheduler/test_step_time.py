"""What a step may compute beside decode rows, learned from steps of a device whose costs are known."""

import random

import pytest

from headstart.scheduler.decode.step_time import MIN_CHUNK, ItlControl, StepWork
from headstart.scheduler.limits import DecodeLimits

DECODE_S, PER_TOKEN_S, PER_PAIR_S = 0.030, 8e-6, 4e-10


def limits(itl_slo_s: float | None = None, max_step_stretch: float = 3.0) -> DecodeLimits:
    return DecodeLimits(
        max_running_requests=128,
        max_queued_requests=100,
        context_len=100_000,
        chunked_prefill_size=8192,
        local_prefill_tokens=256,
        num_reserved_decode_tokens=64,
        itl_slo_s=itl_slo_s,
        max_step_stretch=max_step_stretch,
    )


def device_s(shape: StepWork, per_row_s: float = 0.0) -> float:
    decode_s = DECODE_S + shape.num_decode_rows * per_row_s if shape.num_decode_rows else 0.0
    return decode_s + shape.num_prompt_tokens * PER_TOKEN_S + shape.num_pairs * PER_PAIR_S


def learned(control: ItlControl, num_steps: int = 200) -> ItlControl:
    rng = random.Random(1)
    for _ in range(num_steps):
        chunks = [(rng.randrange(60_000), rng.randrange(100, 4000))] if rng.random() < 0.5 else []
        shape = StepWork.of(100, chunks)
        control.observe(shape, device_s(shape) * rng.uniform(0.97, 1.03))
    return control


@pytest.mark.parametrize("start", [0, 10_000, 50_000])
def test_a_chunk_fills_what_the_objective_leaves(start: int) -> None:
    control = learned(ItlControl(limits(itl_slo_s=0.060)))
    tokens = control.chunk_tokens(100, start)
    assert device_s(StepWork.of(100, [(start, tokens)])) == pytest.approx(0.060, rel=0.1)


def test_without_an_objective_a_step_stays_within_three_decode_steps() -> None:
    control = learned(ItlControl(limits()))
    tokens = control.chunk_tokens(100, 50_000)
    assert device_s(StepWork.of(100, [(50_000, tokens)])) == pytest.approx(3 * DECODE_S, rel=0.1)


def test_a_prompt_alone_gets_whole_chunks() -> None:
    control = learned(ItlControl(limits(itl_slo_s=0.040)))
    assert control.chunk_tokens(0, 50_000) == 8192


def test_an_objective_that_cannot_be_met_leaves_prompts_a_little() -> None:
    control = learned(ItlControl(limits(itl_slo_s=0.001)))
    assert control.chunk_tokens(100, 50_000) == MIN_CHUNK


def test_the_first_chunk_is_small_and_tells_what_chunks_cost() -> None:
    control = ItlControl(limits())
    assert control.chunk_tokens(8, 0) == 8192  # no decode step has ended: nothing to compare with
    control.observe(StepWork(8), DECODE_S)
    assert control.chunk_tokens(8, 0) == MIN_CHUNK
    shape = StepWork.of(8, [(0, MIN_CHUNK)])
    control.observe(shape, device_s(shape))
    assert control.chunk_tokens(8, 0) > MIN_CHUNK


def test_no_bound_means_whole_chunks() -> None:
    control = learned(ItlControl(limits(max_step_stretch=float("inf"))))
    assert control.chunk_tokens(100, 0) == 8192


def test_fewer_rows_decode_while_steps_of_rows_alone_are_too_long_and_more_once_they_are_short() -> None:
    control, rows = ItlControl(limits(itl_slo_s=0.050)), 128
    for _ in range(64 * 30):
        rows = min(128, control.max_rows)
        control.observe(StepWork(rows), device_s(StepWork(rows), per_row_s=0.5e-3))
    assert device_s(StepWork(control.max_rows), per_row_s=0.5e-3) < 0.050
    for _ in range(64 * 200):
        control.observe(StepWork(control.max_rows), 0.020)
    assert control.max_rows == 128


@pytest.mark.parametrize("elapsed_s", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_left_out(elapsed_s: float) -> None:
    control = learned(ItlControl(limits(itl_slo_s=0.060)))
    before = control.chunk_tokens(100, 10_000)
    control.observe(StepWork.of(100, [(0, 500)]), elapsed_s)
    assert control.chunk_tokens(100, 10_000) == before
