"""Pictures of a report's runs, each as PNG and SVG."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from headstart.bench.errors import writing
from headstart.bench.lazy_matplotlib import check_drawable, open_pyplot
from headstart.bench.measure import ReportRow

MAX_CURVES = 20


def draw(runs: list[ReportRow], folder: Path) -> list[Path]:
    """Every picture for which the runs have data. Raises BenchError without matplotlib, or where `folder` cannot be
    written."""
    check_drawable("--plots")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return [path for name, picture in PICTURES.items() for path in _draw(name, picture, runs, folder)]


def _draw(
    name: str, picture: Callable[[Any, list[ReportRow]], bool], runs: list[ReportRow], folder: Path
) -> list[Path]:
    pyplot = open_pyplot()
    figure, axes = pyplot.subplots(figsize=(8.5, 4.5), layout="constrained")
    axes.set_prop_cycle(color=[pyplot.colormaps["tab20"](index) for index in range(20)])
    paths = []
    if picture(axes, runs):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    pyplot.close(figure)
    return paths


def _ttft(axes: Any, runs: list[ReportRow]) -> bool:
    axes.set_ylabel("share of requests")
    return _distribution(axes, runs, "ttft_ms", "Time to first token")


def _itl(axes: Any, runs: list[ReportRow]) -> bool:
    axes.set_ylabel("share of tokens")
    return _distribution(axes, runs, "itl_ms", "Inter-token latency")


def _distribution(axes: Any, runs: list[ReportRow], key: str, title: str) -> bool:
    """Cumulative, on a logarithmic time axis. Seeds of one configuration share a colour and a legend entry."""
    from matplotlib.ticker import LogLocator

    names = _names(runs)
    shown = list(dict.fromkeys(names))[:MAX_CURVES]
    colours: dict[str, str] = {}
    for name, run in zip(names, runs, strict=True):
        values = run["curves"][key]
        if len(values) < 2 or name not in shown:
            continue
        shares = [index / (len(values) - 1) for index in range(len(values))]
        label = None if name in colours else name
        (line,) = axes.plot(values, shares, label=label, color=colours.get(name), linewidth=1.2)
        colours[name] = line.get_color()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(f"{title.lower()} (ms)")
    axes.set_ylim(0, 1.02)
    left_out = len(set(names)) - len(shown)
    axes.set_title(f"{title} (first {MAX_CURVES} of {len(set(names))} loads)" if left_out else title)
    return bool(colours)


def _throughput(axes: Any, runs: list[ReportRow]) -> bool:
    series = _series(runs, "max_concurrency", lambda run: run["output_throughput"])
    _lines(axes, series)
    axes.set_title("Throughput against concurrency")
    axes.set_xlabel("requests in flight at most")
    axes.set_ylabel("output throughput (tokens/s)")
    axes.set_ylim(bottom=0)
    return any(len(points) > 1 for points in series.values())


def _bytes(axes: Any, runs: list[ReportRow]) -> bool:
    moved = [run for run in runs if run["reuse"]["bytes_moved"] is not None]
    series = _series(moved, "prefix_share", lambda run: run["reuse"]["bytes_moved"] / 1e6 / max(1, run["completed"]))
    _lines(axes, series)
    axes.set_title("KV moved against prefix share")
    axes.set_xlabel("share of the prompt that its group has in common")
    axes.set_ylabel("KV moved per request (MB)")
    axes.set_ylim(bottom=0)
    return any(len(points) > 1 for points in series.values())


PICTURES: dict[str, Callable[[Any, list[ReportRow]], bool]] = {
    "ttft": _ttft,
    "itl": _itl,
    "throughput": _throughput,
    "bytes_moved": _bytes,
}
"""File name -> what draws it and says whether there was anything to draw."""


def _series(
    runs: list[ReportRow], key: str, value: Callable[[ReportRow], float]
) -> dict[str, list[tuple[float, float]]]:
    """Per configuration apart from `key`: points in order of `key`, each the mean over seeds."""
    values: dict[str, dict[float, list[float]]] = {}
    for name, run in zip(_names(runs, without=key), runs, strict=True):
        if run[key] is not None:
            values.setdefault(name, {}).setdefault(run[key], []).append(value(run))
    return {name: [(x, fmean(ys)) for x, ys in sorted(points.items())] for name, points in values.items()}


def _lines(axes: Any, series: dict[str, list[tuple[float, float]]]) -> None:
    """Later lines are thinner, so that one that lies on another does not hide it."""
    for number, (name, points) in enumerate(series.items()):
        width = 1 + 4 * (len(series) - number) / len(series)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=width + 2, linewidth=width, label=name)
    axes.set_xticks(sorted({x for points in series.values() for x, _ in points}))


def _names(runs: list[ReportRow], without: str = "") -> list[str]:
    """What tells the runs apart: parts that all have in common are left out."""
    parts = [
        (
            run["label"],
            run["dataset_name"],
            f"concurrency {run['max_concurrency'] or 'unlimited'}" if without != "max_concurrency" else "",
            f"share {run['prefix_share']}" if run["prefix_share"] is not None and without != "prefix_share" else "",
        )
        for run in runs
    ]
    telling = [index for index in range(4) if len({part[index] for part in parts}) > 1]
    return [", ".join(part[index] for index in telling or [0] if part[index]) for part in parts]
