"""Coefficients found again from what a simulated cluster's clients saw."""

from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from headstart.bench.load_generator import Pace
from headstart.bench.measure import RunSpec
from headstart.bench.workload import Length, MultiTurn, NoReuse, SharedPrefix, TokenSource
from headstart.config.errors import ConfigError
from headstart.plan.calibrate import Calibration, fit, non_negative_fit
from headstart.plan.cost import Contention, CostModel, FrontCoefficients, StepCoefficients
from headstart.plan.deployment import Deployment, Hardware, cluster_spec
from headstart.plan.options import ClusterOptions, DeploymentOptions, LimitOptions
from headstart.plan.simulate_command import simulated_row
from headstart.sim.cost import LinkCost

PAGE_SIZE, CHUNK = 16, 256
OPTIONS = DeploymentOptions(
    cluster=ClusterOptions(page_size=PAGE_SIZE),
    limits=LimitOptions(chunked_prefill_size=CHUNK, local_prefill_tokens=PAGE_SIZE),
)
NO_CONTENTION = Contention()
SOURCE = TokenSource(1000, 30_000)
ALONE = NoReuse(10, Length(900, 0.05), Length(12))
TOGETHER = SharedPrefix(2, 6, Length(512), Length(24), Length(40))
CROWD = NoReuse(9, Length(600, 0.3), Length(32, 0.4))
TALK = MultiTurn(4, 3, Length(300, 0.2), Length(40, 0.2), Length(24))


def cost_model(contention: Contention = NO_CONTENTION) -> CostModel:
    return CostModel(
        name="made up",
        device="cpu",
        kv_token_bytes=23_040,
        decode=StepCoefficients(
            fixed_s=0.024, weights_s=0.0, kv_token_s=1.5e-6, row_s=1.2e-3, request_s=0.0, pair_s=5e-7
        ),
        prefill=StepCoefficients(fixed_s=0.02, weights_s=0.0, kv_token_s=0.0, row_s=1.1e-3, request_s=0.0, pair_s=2e-7),
        link=LinkCost(0.003, 0.0),
        front=FrontCoefficients(before_s=0.004, message_s=0.0003),
        contention=contention,
    )


def deployment(costs: CostModel) -> Deployment:
    hardware = Hardware(costs, pool_tokens=32_768, context_len=8192)
    return Deployment(costs, cluster_spec(hardware, OPTIONS))


def measured(costs: CostModel, shape: Any, concurrency: int, seed: int = 1) -> dict[str, Any]:
    run_spec = RunSpec(shape.build(seed), {}, Pace(concurrency), seed)
    return dict(simulated_row(run_spec, deployment(costs), "made up", SOURCE, keeps_requests=True))


@cache
def calibrated(contention: Contention) -> Calibration:
    costs = cost_model(contention)
    runs = [
        measured(costs, ALONE, 1),
        measured(costs, TOGETHER, 4),
        measured(costs, TOGETHER, 12),
        measured(costs, TALK, 2),
        measured(costs, CROWD, 3),
    ]
    return fit(runs, "runs of a simulation", CHUNK)


@pytest.mark.parametrize("contention", [NO_CONTENTION, Contention(0.4, 0.3)])
def test_a_fit_predicts_loads_that_it_has_not_seen(contention: Contention) -> None:
    truth = cost_model(contention)
    found = calibrated(contention)
    assert found.decode_error < 0.1
    for shape, concurrency in ((MultiTurn(6, 3, Length(256), Length(100), Length(32)), 3), (TOGETHER, 8)):
        true, predicted = (measured(costs, shape, concurrency, seed=7) for costs in (truth, found.costs))
        assert predicted["mean_tpot_ms"] == pytest.approx(true["mean_tpot_ms"], rel=0.03)
        assert predicted["mean_ttft_ms"] == pytest.approx(true["mean_ttft_ms"], rel=0.05)


def test_what_only_one_thing_tells_is_found_as_it_was() -> None:
    truth, found = cost_model(), calibrated(NO_CONTENTION).costs
    assert found.front.before_s == pytest.approx(truth.front.before_s, rel=0.05)
    assert found.prefill.row_s == pytest.approx(truth.prefill.row_s, rel=0.05)
    assert found.kv_token_bytes == truth.kv_token_bytes
    assert found.contention.decode_slowed < 0.05


def test_a_report_without_single_requests_is_refused() -> None:
    run = measured(cost_model(), ALONE, 1)
    del run["requests"]
    with pytest.raises(ConfigError, match="--details"):
        fit([run], "a report")


def test_no_coefficient_is_negative_and_no_better_fit_is_missed() -> None:
    rng = Random(5)
    columns = np.array([[1, rng.random(), rng.random()] for _ in range(50)])
    values = columns @ np.array([0.5, 2.0, 0.0]) - 0.3 * columns[:, 2]
    found = non_negative_fit(columns, values)
    assert (found >= 0).all()
    best = np.sum((values - columns @ found) ** 2)
    for _ in range(500):
        other = np.maximum(0, found + np.array([rng.gauss(0, 0.05) for _ in range(3)]))
        assert np.sum((values - columns @ other) ** 2) >= best - 1e-9


def test_of_columns_that_are_alike_the_first_one_carries_all_whatever_the_order_of_rows() -> None:
    rng = np.random.default_rng(3)
    lengths, rows = rng.integers(300, 3000, 400), rng.integers(1, 9, 400)
    columns = np.stack([np.ones(400), rows, rows, lengths, lengths], axis=1).astype(np.float64)
    values = 0.05 + 0.004 * rows + 2e-5 * lengths + rng.normal(0, 0.01, 400)
    for _ in range(20):
        order = rng.permutation(400)
        found = non_negative_fit(columns[order], values[order])
        assert found[2] == found[4] == 0
        assert found[3] == pytest.approx(2e-5, rel=0.1)
