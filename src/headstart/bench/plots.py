"""Pictures of a report's runs, each as PNG and SVG. matplotlib loads only when a picture is drawn."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from headstart.bench.errors import BenchError
from headstart.bench.measure import Row

MAX_CURVES = 10


def draw(runs: list[Row], folder: Path) -> list[Path]:
    """Every picture for which the runs have data. Raises BenchError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install 'headstart[dev]'") from error
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, picture in PICTURES.items():
        drawn += _draw(name, picture, runs, folder)
    return drawn


def _draw(name: str, picture: Callable[[Any, list[Row]], bool], runs: list[Row], folder: Path) -> list[Path]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    paths = []
    if picture(axes, runs):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths


def _ttft(axes: Any, runs: list[Row]) -> bool:
    axes.set_title("Time to first token")
    return _distribution(axes, runs, "ttft_ms", "time to first token (ms)", "share of requests")


def _itl(axes: Any, runs: list[Row]) -> bool:
    axes.set_title("Inter-token latency")
    return _distribution(axes, runs, "itl_ms", "inter-token latency (ms)", "share of tokens")


def _distribution(axes: Any, runs: list[Row], key: str, x_label: str, y_label: str) -> bool:
    """Cumulative, on a logarithmic time axis. Seeds of one configuration share a colour and a legend entry."""
    colours: dict[str, str] = {}
    for run in runs:
        values = run["curves"][key]
        name = _name(run)
        if len(values) < 2 or (name not in colours and len(colours) == MAX_CURVES):
            continue
        shares = [index / (len(values) - 1) for index in range(len(values))]
        label = None if name in colours else name
        (line,) = axes.plot(values, shares, label=label, color=colours.get(name), linewidth=1.2)
        colours[name] = line.get_color()
    axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1.02)
    return bool(colours)


def _throughput(axes: Any, runs: list[Row]) -> bool:
    series = _series(runs, "max_concurrency", lambda run: run["output_throughput"])
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_title("Throughput against concurrency")
    axes.set_xlabel("requests in flight at most")
    axes.set_ylabel("output throughput (tokens/s)")
    axes.set_ylim(bottom=0)
    return any(len(points) > 1 for points in series.values())


def _bytes(axes: Any, runs: list[Row]) -> bool:
    moved = [run for run in runs if run["reuse"]["bytes_moved"] is not None]
    series = _series(moved, "prefix_share", lambda run: run["reuse"]["bytes_moved"] / 1e6 / max(1, run["completed"]))
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_title("KV moved against prefix share")
    axes.set_xlabel("share of the prompt that its group has in common")
    axes.set_ylabel("KV moved per request (MB)")
    axes.set_ylim(bottom=0)
    return any(len(points) > 1 for points in series.values())


PICTURES: dict[str, Callable[[Any, list[Row]], bool]] = {
    "ttft": _ttft,
    "itl": _itl,
    "throughput": _throughput,
    "bytes_moved": _bytes,
}
"""File name -> what draws it and says whether there was anything to draw."""


def _series(runs: list[Row], key: str, value: Callable[[Row], float]) -> dict[str, list[tuple[float, float]]]:
    """Per configuration apart from `key`: points in order of `key`, each the mean over seeds."""
    values: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        if run[key] is not None:
            values.setdefault(_name(run, without=key), {}).setdefault(run[key], []).append(value(run))
    return {name: [(x, fmean(ys)) for x, ys in sorted(points.items())] for name, points in values.items()}


def _name(run: Row, without: str = "") -> str:
    parts = [run["label"], run["dataset_name"]]
    if run["max_concurrency"] is not None and without != "max_concurrency":
        parts.append(f"concurrency {run['max_concurrency']}")
    if run["prefix_share"] is not None and without != "prefix_share":
        parts.append(f"share {run['prefix_share']}")
    return ", ".join(parts)
