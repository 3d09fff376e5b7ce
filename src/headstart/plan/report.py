"""What `headstart plan` found, as text, as JSON and as a curve."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from headstart.bench.errors import writing
from headstart.plan.capacity import Bound, Estimate
from headstart.plan.deployment import Deployment
from headstart.plan.figure import Curve, Panel
from headstart.plan.options import PlanOptions
from headstart.plan.simulated_split import SimulatedSplit
from headstart.plan.slo import Targets, misses

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Advice:
    """About one load. `trials`: the simulated splits, the recommended one first."""

    load: str
    cards: int
    estimates: tuple[Estimate, ...]
    trials: tuple[SimulatedSplit, ...]
    max_running: int
    """The deployment's own limit on running requests."""

    @property
    def best(self) -> SimulatedSplit:
        return self.trials[0]

    @property
    def chosen(self) -> Estimate:
        """The recommended split in closed form: it tells the bound."""
        return next(found for found in self.estimates if found.split == self.best.split)

    def binding(self, targets: Targets) -> str:
        """What keeps the recommended split from more."""
        bound = Bound.ITL if self.best.max_running < self.max_running else self.chosen.bound
        late = [miss for miss in misses(self.best.latencies, targets) if miss.target.startswith("TTFT")]
        return f"the TTFT target: requests wait because of {bound.value}" if late else bound.value


def heading(options: PlanOptions, deployment: Deployment) -> Iterator[str]:
    yield f"each worker: {deployment.costs.name}"
    yield from (f"  {note}" for note in deployment.costs.notes)
    asked = [f"{name} {value:g} ms" for name, value in _targets(options.targets).items() if value is not None]
    yield f"targets: {', '.join(asked) if asked else 'none'}"


def told(advice: Advice, options: PlanOptions, deployment: Deployment) -> Iterator[str]:
    yield ""
    yield advice.load
    yield from _table(advice)
    best = advice.best
    missed = misses(best.latencies, options.targets)
    yield ""
    if missed:
        yield f"No split of {advice.cards} cards meets the targets. The closest is {best.split}:"
        yield from (f"  {miss}" for miss in missed)
    else:
        used = (best.split.num_prefill + best.split.num_decode) * options.cost.tp
        cards = f"{used} cards" if used == advice.cards else f"{used} of {advice.cards} cards"
        yield f"Use {best.split.num_prefill} prefill and {best.split.num_decode} decode workers, {cards}:"
    yield f"  {best.goodput:.2f} requests/s within the targets, of {best.throughput:.2f}; {best.output_throughput:.0f} output tokens/s"
    yield f"  --max-running-requests {best.max_running} on decode workers, of which {best.running:.1f} run on average"
    pool = deployment.spec.decode_pages * deployment.spec.page_size
    gigabytes = pool * deployment.costs.kv_token_bytes / 1e9
    yield f"  decode pool: {pool} tokens ({gigabytes:.1f} GB) a worker, {100 * best.pool_share:.0f} % in use on average"
    yield f"  binding: {advice.binding(options.targets)}"
    yield (
        f"  in closed form the prefill workers could carry {advice.chosen.prefill_rate:.2f} requests/s, the link "
        f"{_spoken_rate(advice.chosen.link_rate)}; {advice.chosen.batch} running requests pin {advice.chosen.resident_tokens:.0f} tokens"
    )


def _spoken_rate(rate: float) -> str:
    return f"{rate:.4g}" if isfinite(rate) else "any number"


def panel(advice: Advice) -> Panel:
    simulated = tuple((trial.split, trial.goodput) for trial in advice.trials)
    estimated = tuple((found.split, found.throughput) for found in advice.estimates)
    return Panel(
        advice.load,
        (
            Curve("goodput, simulated", simulated),
            Curve("throughput, closed form", estimated, is_estimate=True, style=1),
        ),
    )


def save(path: Path, advices: list[Advice], options: PlanOptions, deployment: Deployment) -> None:
    """Raises BenchError where the file cannot be written."""
    body = {
        "schema": SCHEMA,
        "costs": deployment.costs.name,
        "notes": list(deployment.costs.notes),
        "targets_ms": _targets(options.targets),
        "loads": [_plain(advice, options) for advice in advices],
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n")


def _table(advice: Advice) -> Iterator[str]:
    trials = {trial.split: trial for trial in advice.trials}
    yield f"{'':<7}| {'closed form':<38} | simulated"
    yield (
        f"{'split':<7}| {'req/s':>7} {'TTFT s':>8} {'ITL ms':>7} {'running':>7}     | "
        f"{'req/s':>7} {'good':>7} {'TTFT p50':>9} {'p99 s':>8} {'ITL p50':>8} {'p99 ms':>7} {'running':>7} {'pool':>6}"
    )
    for found in advice.estimates:
        line = f"{found.split!s:<7}| {found.throughput:>7.2f} {found.ttft_s:>8.2f} {1e3 * found.itl_s:>7.1f} {found.batch:>7}     |"
        trial = trials.get(found.split)
        yield line if trial is None else line + _simulated(trial)


def _simulated(trial: SimulatedSplit) -> str:
    late = trial.latencies
    return (
        f" {trial.throughput:>7.2f} {trial.goodput:>7.2f} {late.ttft_p50_ms / 1e3:>9.2f} {late.ttft_p99_ms / 1e3:>8.2f} "
        f"{late.itl_p50_ms:>8.1f} {late.itl_p99_ms:>7.1f} {trial.running:>7.1f} {trial.pool_share:>6.3f}"
    )


def _targets(targets: Targets) -> dict[str, float | None]:
    return {
        "TTFT p50": targets.ttft_p50_ms,
        "TTFT p99": targets.ttft_p99_ms,
        "ITL p50": targets.itl_p50_ms,
        "ITL p99": targets.itl_p99_ms,
    }


def _plain(advice: Advice, options: PlanOptions) -> dict[str, Any]:
    return {
        "load": advice.load,
        "cards": advice.cards,
        "estimates": [_finite({**asdict(found), "bound": found.bound.name}) for found in advice.estimates],
        "trials": [asdict(trial) for trial in advice.trials],
        "misses": [str(miss) for miss in misses(advice.best.latencies, options.targets)],
        "binding": advice.binding(options.targets),
    }


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a queue that never settles has no time to first token, a link whose bytes take no time no
    rate."""
    return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in fields.items()}
