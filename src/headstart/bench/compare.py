"""Two reports side by side, as ratios. Only equal workloads are compared; what may mislead is said first.

Runs are grouped by workload, options, concurrency and rate; a group's value is the mean over its seeds. A report may hold
several deployments (labels): each side is then also taken at its best one, which is the comparison that counts.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headstart.bench.measure import ReportRow
from headstart.bench.report import FACTS

NUM_SEEDS = 3
METRICS = (
    ("output_throughput", "output tok/s"),
    ("request_throughput", "requests/s"),
    ("mean_ttft_ms", "TTFT mean ms"),
    ("p99_ttft_ms", "TTFT p99 ms"),
    ("mean_tpot_ms", "TPOT mean ms"),
    ("mean_itl_ms", "ITL mean ms"),
    ("p99_itl_ms", "ITL p99 ms"),
    ("bytes_moved_mb", "KV moved MB"),
    ("cached_share", "cached share"),
)


@dataclass(frozen=True, slots=True)
class Value:
    """Mean over seeds, and half the range."""

    mean: float
    swing: float


@dataclass(frozen=True, slots=True)
class Line:
    metric: str
    a: Value
    b: Value

    @property
    def ratio(self) -> float | None:
        """B over A. None where A is 0."""
        return self.b.mean / self.a.mean if self.a.mean else None


@dataclass(frozen=True, slots=True)
class Comparison:
    title: str
    lines: tuple[Line, ...]


def compare(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[str], list[Comparison]]:
    """Warnings, and a comparison per load that both reports hold."""
    warnings = [
        f"{fact} differs: {a['machine'].get(fact)} and {b['machine'].get(fact)}"
        for fact in FACTS
        if a["machine"].get(fact) != b["machine"].get(fact)
    ]
    mine, theirs = _grouped(a["runs"], _load_key), _grouped(b["runs"], _load_key)
    for name, lonely in (("first", mine.keys() - theirs.keys()), ("second", theirs.keys() - mine.keys())):
        warnings += [f"only the {name} report has {title(*_one(key))}" for key in sorted(lonely)]
    comparisons = []
    for key in mine:
        if key in theirs:
            warnings += _seed_warnings(title(*_one(key)), mine[key], theirs[key])
            best_a, best_b = _best(mine[key]), _best(theirs[key])
            comparisons.append(_comparison(title(*_one(key)), best_a, best_b))
    comparisons += list(_at_best(a["runs"], b["runs"]))
    return warnings, comparisons


def title(workload: str, load: str) -> str:
    return f"{workload}, {load}"


def render(warnings: Iterable[str], comparisons: Iterable[Comparison]) -> str:
    lines = [f"warning: {warning}" for warning in warnings]
    for comparison in comparisons:
        lines += ["", comparison.title, f"  {'':<14} {'A':>18} {'B':>18} {'B / A':>8}"]
        for line in comparison.lines:
            ratio = "-" if line.ratio is None else f"{line.ratio:.3f}"
            lines.append(f"  {line.metric:<14} {_show(line.a):>18} {_show(line.b):>18} {ratio:>8}")
    return "\n".join(lines)


def _show(value: Value) -> str:
    return f"{value.mean:.2f} ± {value.swing:.2f}"


def _load_key(run: ReportRow) -> str:
    """Everything that makes two runs the same work, as text. Labels and seeds do not."""
    load = {key: run.get(key) for key in ("max_concurrency", "request_rate", "open_loop", "prefix_share")}
    return json.dumps([run["dataset_name"], run["options"], load], sort_keys=True)


def _work_key(run: ReportRow) -> str:
    return json.dumps([run["dataset_name"], run["options"], {"prefix_share": run.get("prefix_share")}], sort_keys=True)


def _one(key: str) -> tuple[str, str]:
    name, _, load = json.loads(key)
    parts = []
    if "max_concurrency" in load:
        parts.append(f"concurrency {load['max_concurrency'] or 'unlimited'}")
        if load["request_rate"] != "inf":
            parts.append(f"{load['request_rate']} sessions/s")
        if load["open_loop"]:
            parts.append("open loop")
    else:
        parts.append("each side at its best")
    if load["prefix_share"] is not None:
        parts.append(f"prefix share {load['prefix_share']}")
    return name, ", ".join(parts)


def _grouped(runs: Iterable[ReportRow], key: Any) -> dict[str, list[ReportRow]]:
    groups: dict[str, list[ReportRow]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _best(runs: list[ReportRow]) -> list[ReportRow]:
    """The runs of the label (and concurrency) with the highest mean output throughput."""
    groups: dict[tuple[Any, Any], list[ReportRow]] = {}
    for run in runs:
        groups.setdefault((run["label"], run.get("max_concurrency")), []).append(run)
    return max(groups.values(), key=lambda group: fmean(run["output_throughput"] for run in group))


def _at_best(a: list[ReportRow], b: list[ReportRow]) -> Iterable[Comparison]:
    """Where a side has several deployments or concurrencies of one workload: best against best."""
    mine, theirs = _grouped(a, _work_key), _grouped(b, _work_key)
    for key in mine:
        if key not in theirs:
            continue
        configurations = {(run["label"], run.get("max_concurrency")) for run in (*mine[key], *theirs[key])}
        labels = {label for label, _ in configurations}
        if len(configurations) > len(labels) or len(labels) > 2:
            best_a, best_b = _best(mine[key]), _best(theirs[key])
            sides = " against ".join(f"{s[0]['label']} at {s[0]['max_concurrency']}" for s in (best_a, best_b))
            yield _comparison(f"{title(*_one(key))}: {sides}", best_a, best_b)


def _comparison(name: str, a: list[ReportRow], b: list[ReportRow]) -> Comparison:
    lines = []
    for metric, label in METRICS:
        value_a, value_b = _value(a, metric), _value(b, metric)
        if value_a is not None and value_b is not None:
            lines.append(Line(label, value_a, value_b))
    return Comparison(name, tuple(lines))


def _value(runs: list[ReportRow], metric: str) -> Value | None:
    values = [_metric(run, metric) for run in runs]
    known = [value for value in values if value is not None]
    return Value(fmean(known), (max(known) - min(known)) / 2) if known else None


def _metric(run: ReportRow, metric: str) -> float | None:
    if metric == "bytes_moved_mb":
        moved = run["reuse"]["bytes_moved"]
        return None if moved is None else moved / 1e6
    value: float | None = run["reuse"].get(metric) if metric.endswith("_share") else run[metric]
    return value


def _seed_warnings(name: str, a: list[ReportRow], b: list[ReportRow]) -> Iterable[str]:
    seeds_a, seeds_b = {run["seed"] for run in a}, {run["seed"] for run in b}
    if seeds_a != seeds_b:
        yield f"{name}: seeds differ, {sorted(seeds_a)} and {sorted(seeds_b)}"
    elif len(seeds_a) < NUM_SEEDS:
        yield f"{name}: {len(seeds_a)} seed{'s' * (len(seeds_a) > 1)}; {NUM_SEEDS} tell a difference from chance"
    for seed in sorted(seeds_a & seeds_b):
        outputs = {run["total_output_tokens"] for run in (*a, *b) if run["seed"] == seed}
        if len(outputs) > 1:
            yield f"{name}, seed {seed}: output lengths differ ({', '.join(map(str, sorted(outputs)))} tokens)"
