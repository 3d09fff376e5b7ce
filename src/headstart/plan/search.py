"""Which split to choose: closed forms say where to look, simulations decide.

Every split of the workers is estimated. The best and its neighbours are simulated, then further neighbours as long as the
best of those simulated lies at the edge. Where steps turn out longer than the targets allow, the split is simulated again
with fewer requests running at once.
"""

from collections.abc import Callable, Sequence

from headstart.plan.capacity import Bound, Estimate, Split, narrowed
from headstart.plan.simulated_split import SimulatedSplit
from headstart.plan.slo import Targets, misses

MAX_CAPS = 4
"""Simulations of one split with ever fewer running requests."""


SimulateSplit = Callable[[Split, int], SimulatedSplit]
"""A split with at most so many requests running on each decode worker."""


def choose(
    estimates: Sequence[Estimate], targets: Targets, max_running: int, simulate: SimulateSplit
) -> list[SimulatedSplit]:
    """Simulated splits, the best first: most goodput among those that meet every target, else the least miss."""
    by_prefill = sorted(estimates, key=lambda estimate: estimate.split.num_prefill)
    splits = [estimate.split for estimate in by_prefill]
    trials: dict[Split, SimulatedSplit] = {}
    ttft_ms = targets.ttft_ms
    wanted = narrowed(by_prefill, None if ttft_ms is None else ttft_ms / 1e3)
    while wanted:
        for split in wanted:
            estimate = by_prefill[splits.index(split)]
            trials[split] = within_itl(simulate, split, first_cap(estimate, targets, max_running), targets)
        place = splits.index(best_of(list(trials.values()), targets)[0].split)
        around = splits[max(0, place - 1) : place + 2]
        wanted = [split for split in around if split not in trials]
    return best_of(list(trials.values()), targets)


def first_cap(estimate: Estimate, targets: Targets, max_running: int) -> int:
    """Requests to let run: as many as the ITL target admits by the closed form."""
    tightest = targets.tightest_itl_ms
    return max_running if tightest is None or estimate.bound is not Bound.ITL else min(max_running, estimate.batch)


def within_itl(simulate: SimulateSplit, split: Split, max_running: int, targets: Targets) -> SimulatedSplit:
    """The split with as many running requests as the ITL targets admit, found in a few simulations."""
    trial = simulate(split, max_running)
    for _ in range(MAX_CAPS - 1):
        over = [miss for miss in misses(trial.latencies, targets) if miss.target.startswith("ITL")]
        cap = min(trial.max_running, round(trial.running))
        if not over or cap <= 1:
            break
        worst = max(miss.excess for miss in over)
        trial = simulate(split, max(1, min(cap - 1, int(cap / (1 + worst)))))
    return trial


def best_of(trials: Sequence[SimulatedSplit], targets: Targets) -> list[SimulatedSplit]:
    """Best first. Ties go to fewer prefill workers."""

    def rank(trial: SimulatedSplit) -> tuple[float, float, int]:
        over = max((miss.excess for miss in misses(trial.latencies, targets)), default=0.0)
        return over, -trial.goodput, trial.split.num_prefill

    return sorted(trials, key=rank)
