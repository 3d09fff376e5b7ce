"""Which bound a split meets first, and that estimates agree with arithmetic done by hand."""

from dataclasses import replace
from math import inf

import pytest

from headstart.bench.workload import Length, SharedPrefix
from headstart.plan.capacity import Bound, Capacity, Estimate, OfferedLoad, Split, Worker, narrowed, prompt_time
from headstart.plan.cost import CostModel, StepCoefficients
from headstart.plan.workload_stats import PromptWork, planned_requests
from headstart.sim.cost import LinkCost

STEP = StepCoefficients(fixed_s=0.01, weights_s=0.0, kv_token_s=1e-7, row_s=1e-4, request_s=0.0, pair_s=0.0)
PROMPT = StepCoefficients(0.0, 0.0, 0.0, 1e-4, 0.0, 0.0)
COSTS = CostModel("by hand", "cuda", 1000, STEP, PROMPT, LinkCost(0.0, 1e-10))
WORKER = Worker(COSTS, pool_tokens=10_000_000, chunk=4096, max_running=256)
SLOW_LINK = replace(WORKER, costs=replace(COSTS, link=LinkCost(0.0, 1e-7)), keeps_cache=False)
ASKS = tuple(planned_requests(SharedPrefix(4, 64, Length(9000), Length(1001), Length(100)).build(1).measured))
ONE_EACH = Split(1, 1)
CLIENTS = OfferedLoad(ASKS, num_clients=64)


def estimated(
    split: Split = ONE_EACH, offered: OfferedLoad = CLIENTS, worker: Worker = WORKER, itl_s: float | None = None
) -> Estimate:
    return Capacity(offered, worker, itl_s).of(split)


def test_prefill_workers_that_are_too_few_bind() -> None:
    found = estimated(offered=replace(CLIENTS, num_clients=256))
    mean_prompt_s = 1e-4 * (4 * 10_000 + 252 * 1000) / 256
    assert found.bound is Bound.PREFILL
    assert found.throughput == found.prefill_rate == pytest.approx(1 / mean_prompt_s)


def test_more_prefill_workers_move_the_bound_to_decode() -> None:
    found = estimated(Split(8, 1))
    assert found.bound is Bound.DECODE
    assert 1 <= found.batch < 64


def test_a_small_pool_binds_and_sharing_lifts_it() -> None:
    small = replace(WORKER, pool_tokens=100_000)
    alone = estimated(Split(8, 1), worker=replace(small, keeps_cache=False))
    assert (alone.bound, alone.batch) == (Bound.RESIDENCY, 100_000 // (10_001 + 100))
    shared = estimated(Split(8, 1), worker=small)
    assert shared.batch > 4 * alone.batch
    assert shared.resident_tokens <= 100_000


def test_an_itl_target_caps_the_batch() -> None:
    tight = estimated(Split(8, 1), itl_s=0.0165)
    assert tight.bound is Bound.ITL
    assert tight.itl_s <= 0.0165
    assert tight.batch < estimated(Split(8, 1)).batch


def test_a_limit_on_rows_binds() -> None:
    assert estimated(Split(8, 1), worker=replace(WORKER, max_running=5)).bound is Bound.ROWS


def test_a_slow_link_binds_where_everything_is_moved() -> None:
    assert estimated(Split(8, 1), worker=SLOW_LINK).bound is Bound.LINK


def test_a_link_carries_its_bytes_whatever_its_latency_and_an_idle_system_waits_for_both() -> None:
    everything = replace(WORKER, keeps_cache=False)
    moved_bytes = 1000 * 10_001  # prompts of that many tokens
    plain, late, heavy, free = (
        estimated(Split(2, 3), OfferedLoad(ASKS, rate=0.1), replace(everything, costs=replace(COSTS, link=link)))
        for link in (LinkCost(0.0, 1e-10), LinkCost(0.4, 1e-10), LinkCost(0.0, 1e-8), LinkCost(0.4, 0.0))
    )
    assert plain.link_rate == late.link_rate == pytest.approx(2 / (moved_bytes * 1e-10))
    assert heavy.link_rate == pytest.approx(2 / (moved_bytes * 1e-8))
    assert free.link_rate == inf
    assert late.ttft_s - plain.ttft_s == pytest.approx(2 * 0.4)
    assert heavy.ttft_s - plain.ttft_s == pytest.approx(moved_bytes * (1e-8 - 1e-10))


def test_what_a_link_cannot_carry_waits_without_end() -> None:
    found = estimated(Split(8, 8), OfferedLoad(ASKS, rate=8.5), SLOW_LINK)
    assert found.bound is Bound.LINK
    assert found.prefill_rate > 8.5
    assert found.ttft_s == inf


def test_a_light_offered_load_is_served_whole_and_waits_for_nothing() -> None:
    found = estimated(Split(2, 2), OfferedLoad(ASKS, rate=0.5))
    assert found.bound is Bound.LOAD
    assert found.throughput == 0.5
    assert found.ttft_s < 0.5


def test_a_load_that_every_bound_allows_is_what_binds_even_where_one_request_more_breaks_all() -> None:
    quick = replace(WORKER, costs=replace(COSTS, decode=replace(STEP, fixed_s=1e-4, row_s=1e-6)))
    found = estimated(Split(2, 6), OfferedLoad(ASKS, rate=0.5), quick)
    assert estimated(Split(2, 6), CLIENTS, quick).bound is Bound.PREFILL
    assert found.bound is Bound.LOAD
    assert found.throughput == 0.5
    assert found.ttft_s < inf


def test_a_load_that_is_too_heavy_never_settles() -> None:
    found = estimated(ONE_EACH, OfferedLoad(ASKS, rate=100.0))
    assert found.bound is Bound.PREFILL
    assert found.throughput < 100


def test_a_prompt_costs_its_chunks() -> None:
    costs = replace(COSTS, prefill=StepCoefficients(0.5, 0.0, 0.0, 1e-3, 0.0, 1e-6))
    worker = replace(WORKER, costs=costs, chunk=100)
    pairs = 150 * 1000 + 150 * 151 / 2
    assert prompt_time(PromptWork(150, 1000), worker) == pytest.approx(2 * 0.5 + 150e-3 + 1e-6 * pairs)


def test_neighbours_of_the_best_split_are_worth_a_simulation() -> None:
    estimates = [estimated(Split(n, 8 - n)) for n in range(1, 8)]
    best = max(estimates, key=lambda e: e.throughput).split
    splits = narrowed(estimates, ttft_target_s=None)
    assert best in splits
    assert len(splits) <= 3
