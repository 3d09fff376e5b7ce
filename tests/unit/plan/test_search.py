"""A search over splits asks for few simulations and believes them rather than the closed form."""

from dataclasses import replace

from headstart.plan.capacity import Bound, Estimate, Split
from headstart.plan.search import best_of, choose, within_itl
from headstart.plan.simulated_split import SimulatedSplit
from headstart.plan.slo import Latencies, Miss, Targets, misses

FAST = Latencies(100.0, 200.0, 10.0, 12.0)


def an_estimate(num_prefill: int, throughput: float, bound: Bound = Bound.PREFILL, batch: int = 64) -> Estimate:
    return Estimate(Split(num_prefill, 8 - num_prefill), batch, throughput, 0.1, 0.01, 0.0, bound, throughput, 100.0)


def a_trial(split: Split, max_running: int = 64, goodput: float = 1.0, latencies: Latencies = FAST) -> SimulatedSplit:
    return SimulatedSplit(split, max_running, goodput, goodput, goodput, latencies, float(max_running), 0.5)


def test_only_the_estimated_best_and_its_neighbours_are_simulated() -> None:
    estimates = [an_estimate(n, 10 - abs(n - 4)) for n in range(1, 8)]
    asked = []

    def simulate(split: Split, max_running: int) -> SimulatedSplit:
        asked.append(split.num_prefill)
        return a_trial(split, max_running, 10 - abs(split.num_prefill - 4))

    assert choose(estimates, Targets(), 64, simulate)[0].split == Split(4, 4)
    assert asked == [3, 4, 5]


def test_simulations_lead_away_from_a_wrong_estimate() -> None:
    estimates = [an_estimate(n, 10 - abs(n - 6)) for n in range(1, 8)]
    best = choose(estimates, Targets(), 64, lambda split, cap: a_trial(split, cap, 10 - abs(split.num_prefill - 2)))[0]
    assert best.split == Split(2, 6)


def test_a_split_that_meets_the_targets_beats_a_faster_one_that_does_not() -> None:
    late = a_trial(Split(1, 7), goodput=9.0, latencies=replace(FAST, ttft_p99_ms=900.0))
    good = a_trial(Split(2, 6), goodput=5.0)
    assert best_of([late, good], Targets(ttft_p99_ms=500.0)) == [good, late]
    assert best_of([late, good], Targets()) == [late, good]


def test_running_requests_are_capped_until_steps_are_short_enough() -> None:
    caps = []

    def simulate(split: Split, max_running: int) -> SimulatedSplit:
        caps.append(max_running)
        step_ms = 5 + max_running / 2
        return a_trial(split, max_running, latencies=Latencies(1.0, 1.0, step_ms, step_ms))

    found = within_itl(simulate, Split(1, 1), 100, Targets(itl_p99_ms=30.0))
    assert found.latencies.itl_p99_ms <= 30.0
    assert caps[-1] == found.max_running >= 40
    assert len(caps) <= 3


def test_the_closed_form_gives_the_first_cap() -> None:
    estimates = [an_estimate(1, 5.0, Bound.ITL, batch=17)]
    assert choose(estimates, Targets(itl_p50_ms=20.0), 64, a_trial)[0].max_running == 17
    assert choose(estimates, Targets(), 64, a_trial)[0].max_running == 64


def test_a_miss_says_which_target_and_by_how_much() -> None:
    found = misses(FAST, Targets(ttft_p50_ms=80.0, ttft_p99_ms=500.0, itl_p99_ms=10.0))
    assert found == [Miss("TTFT p50", 100.0, 80.0), Miss("ITL p99", 12.0, 10.0)]
    assert str(found[0]) == "TTFT p50 is 100.0 ms, 20.0 ms (25 %) over 80 ms"
