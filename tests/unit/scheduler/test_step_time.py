"""What a step may compute beside decode rows, learned from steps of a device whose costs are known."""

import random

import pytest

from headstart.scheduler.decode.step_time import (
    AIM,
    MIN_CHUNK,
    PAIRS_PER_TOKEN,
    STEPS_BETWEEN_PROBES,
    ItlControl,
    StepWork,
    tokens_of,
)
from headstart.scheduler.limits import DecodeLimits

ROW_S, BASE_S, FIXED_S, UNIT_S = 0.2e-3, 0.010, 0.002, 8e-6


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


def device_s(work: StepWork) -> float:
    decode_s = BASE_S + work.num_decode_rows * ROW_S if work.num_decode_rows else 0.0
    return decode_s + (FIXED_S + work.units * UNIT_S if work.num_prompt_tokens else 0.0)


def played(control: ItlControl, num_rows: int, start: int, num_steps: int = 300) -> list[float]:
    """Steps as the control wants them, beside a prompt at position `start`; what each took."""
    rng = random.Random(1)
    control.observe(StepWork(num_rows), device_s(StepWork(num_rows)))
    times = []
    for _ in range(num_steps):
        tokens = control.chunk_tokens(num_rows, start)
        work = StepWork.of(num_rows, [(start, tokens)] if tokens else [])
        times.append(device_s(work) * rng.uniform(0.97, 1.03))
        control.observe(work, times[-1])
    return times


@pytest.mark.parametrize("start", [0, 10_000, 50_000])
def test_steps_fill_what_the_objective_leaves(start: int) -> None:
    times = sorted(played(ItlControl(limits(itl_slo_s=0.060)), 100, start)[100:])
    assert times[len(times) // 2] == pytest.approx(AIM * 0.060, rel=0.05)
    assert times[int(0.95 * len(times))] < 0.060


@pytest.mark.parametrize("num_rows", [1, 30, 128])
def test_without_an_objective_a_step_stays_within_three_steps_of_its_rows_alone(num_rows: int) -> None:
    control = ItlControl(limits())
    played(control, 1, 0)  # what one row takes says nothing of many
    times = sorted(played(control, num_rows, 0)[100:])
    alone_s = device_s(StepWork(num_rows))
    assert times[len(times) // 2] == pytest.approx(AIM * 3 * alone_s, rel=0.05)
    assert times[0] < 1.1 * alone_s, "now and then rows are timed alone"


def test_a_small_first_chunk_does_not_keep_chunks_small() -> None:
    """A fixed cost makes few tokens look dear."""
    control = ItlControl(limits())
    for _ in range(50):
        work = StepWork.of(100, [(0, MIN_CHUNK)])
        control.observe(work, device_s(work))
    played(control, 100, 0)
    assert control.chunk_tokens(100, 0) > 20 * MIN_CHUNK


def test_a_prompt_alone_gets_whole_chunks() -> None:
    control = ItlControl(limits(itl_slo_s=0.040))
    played(control, 100, 0)
    assert control.chunk_tokens(0, 50_000) == 8192


def test_an_objective_that_cannot_be_met_leaves_prompts_a_little() -> None:
    control = ItlControl(limits(itl_slo_s=0.001))
    played(control, 100, 50_000, num_steps=STEPS_BETWEEN_PROBES - 1)
    assert control.chunk_tokens(100, 50_000) == MIN_CHUNK


def test_no_bound_means_whole_chunks() -> None:
    control = ItlControl(limits(max_step_stretch=float("inf")))
    played(control, 100, 0, num_steps=1)
    assert control.chunk_tokens(100, 0) == 8192


@pytest.mark.parametrize("start", [0, 1000, 200_000])
def test_tokens_and_units_are_each_others_inverse(start: int) -> None:
    tokens = tokens_of(3000.0, start)
    assert StepWork.of(1, [(start, round(tokens))]).units == pytest.approx(3000.0, rel=0.01)
    assert tokens_of(PAIRS_PER_TOKEN, 0) < PAIRS_PER_TOKEN


def test_fewer_rows_decode_while_they_alone_take_too_long_and_more_once_they_do_not() -> None:
    control = ItlControl(limits(itl_slo_s=0.030))
    for _ in range(64 * 30):
        rows = min(128, control.max_rows)
        control.observe(StepWork(rows), device_s(StepWork(rows)))
    assert device_s(StepWork(control.max_rows)) < 0.031
    for _ in range(64 * 200):
        control.observe(StepWork(control.max_rows), 0.010)
    assert control.max_rows == 128


@pytest.mark.parametrize("elapsed_s", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_left_out(elapsed_s: float) -> None:
    control = ItlControl(limits(itl_slo_s=0.060))
    played(control, 100, 0, num_steps=40)
    before = control.chunk_tokens(100, 10_000)
    control.observe(StepWork.of(100, [(0, 500)]), elapsed_s)
    assert control.chunk_tokens(100, 10_000) == before
