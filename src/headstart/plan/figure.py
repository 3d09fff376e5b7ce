"""The P:D curve: what each split of a fixed number of workers delivers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from headstart.bench.errors import writing
from headstart.bench.lazy_matplotlib import check_drawable, open_pyplot
from headstart.plan.capacity import Split

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's, told apart by colour-blind readers."""
MARKERS = ("o", "s", "^", "D", "v", "P")
TITLE_WIDTH = 64
"""Characters of a title's line."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Requests per second by split."""

    name: str
    points: tuple[tuple[Split, float], ...]
    is_estimate: bool = False
    """Of a closed form, not of a simulation: dashed, without markers."""
    style: int = 0
    """Which colour and marker. Curves of one deployment share theirs."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    curves: tuple[Curve, ...]
    y_label: str = "goodput (requests/s)"


def draw(panels: Sequence[Panel], path: Path) -> list[Path]:
    """Write `path` with the endings .png and .svg, the same bytes for the same curves. Raises BenchError without
    matplotlib, or where they cannot be written."""
    check_drawable("--figure")
    pyplot = open_pyplot()
    size = (6.2 * len(panels), 4.4)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel, panel_axes in zip(panels, axes[0], strict=True):
        _draw_panel(panel_axes, panel)
    paths = [path.with_suffix(ending) for ending in (".png", ".svg")]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for drawn in paths:
            figure.savefig(drawn, dpi=130, metadata={"Date": None} if drawn.suffix == ".svg" else {"Software": None})
    pyplot.close(figure)
    return paths


def _draw_panel(axes: Any, panel: Panel) -> None:
    splits = sorted({split for curve in panel.curves for split, _ in curve.points}, key=_share)
    for curve in panel.curves:
        colour, marker = COLOURS[curve.style], MARKERS[curve.style]
        points = sorted(curve.points, key=lambda point: _share(point[0]))
        xs, ys = [splits.index(split) for split, _ in points], [rate for _, rate in points]
        if curve.is_estimate:
            axes.plot(xs, ys, color=colour, linestyle="--", linewidth=1.2, label=curve.name)
        else:
            axes.plot(xs, ys, color=colour, marker=marker, markersize=6, linewidth=1.8, label=curve.name)
    axes.set_xticks(range(len(splits)), [f"{split.num_prefill}:{split.num_decode}" for split in splits])
    axes.set_xlabel("prefill workers : decode workers")
    axes.set_ylabel(panel.y_label)
    highest = max((rate for curve in panel.curves for _, rate in curve.points), default=0.0)
    axes.set_ylim(0, 1.1 * highest or 1.0)
    axes.set_title(fill(panel.title, TITLE_WIDTH), fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _share(split: Split) -> float:
    return split.num_prefill / split.num_decode
