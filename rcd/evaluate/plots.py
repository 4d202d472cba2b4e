"""Figures as PNG or SVG by the path's suffix. matplotlib is imported when one is drawn; no global state is touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rcd.errors import RCDError, unwritable
from rcd.evaluate.points import Sweep
from rcd.evaluate.statistics import wilson
from rcd.evaluate.wording import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours: told apart by the colour-blind too."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SIZE, DPI = (8.0, 5.0), 100
"""800 x 500 pixels."""
SUFFIXES = (".png", ".svg")
BELOW = [((0, -6), "center", "top"), ((-4, -4), "right", "top"), ((-7, 0), "right", "center")]
ABOVE = [((0, 6), "center", "bottom"), ((4, 4), "left", "bottom"), ((7, 0), "left", "center")]
"""Places of a number beside its point: offset in points, and how it is aligned there."""
MARKER, APART = 8, 2
"""Pixels: the side of the square that a marker takes, and what is left free around a number."""


def frontier(sweeps: Sequence[Sweep], path: str | Path, title: str = "") -> Path:
    """Accuracy over tokens per step, one line a sweep with its 95% Wilson band; small numbers are thresholds."""
    path, (figure, axes) = (
        _checked(path, sweeps),
        _canvas(title, "tokens per step (small numbers: threshold)", "accuracy (%)"),
    )
    for k, sweep in enumerate(sweeps):
        points = sorted(sweep.points, key=lambda point: (point.tokens_per_step, point.accuracy))
        x, y = [point.tokens_per_step for point in points], [point.accuracy for point in points]
        bands = [wilson(int(point.right.sum()), len(point.right)) for point in points]
        look = _look(k)
        axes.fill_between(
            x, [100 * low for low, _ in bands], [100 * high for _, high in bands],
            color=look["color"], alpha=0.13, linewidth=0,
        )  # fmt: skip
        axes.plot(x, y, label=sweep.name, **look)
    _mark_thresholds(figure, axes, sweeps)
    return _written(figure, axes, path)


def curves(
    series: dict[str, Sequence[tuple[float, float]]],
    path: str | Path,
    xlabel: str = "training tokens",
    ylabel: str = "accuracy (%)",
    title: str = "",
    log: bool = False,
) -> Path:
    """One line a series of (x, y), for instance accuracy over training tokens; `log`: y in powers of ten."""
    path, (figure, axes) = _checked(path, series), _canvas(title, xlabel, ylabel)
    if log:
        axes.set_yscale("log")
    if all(float(x).is_integer() for points in series.values() for x, _ in points):
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for k, (name, points) in enumerate(series.items()):
        ordered = sorted(points)
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], label=name, **_look(k))
    if max((x for points in series.values() for x, _ in points), default=0) >= 10_000:
        from matplotlib.ticker import EngFormatter

        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return _written(figure, axes, path)


Interval = tuple[float, float, float, float]
"""x, accuracy, and the low and high end of its 95% interval, all but x in percent."""


def rows(points: dict[str, Interval], path: str | Path, title: str = "", xlabel: str = "tokens per step") -> Path:
    """One marker a row of an ablation."""
    path, (figure, axes) = _checked(path, points), _canvas(title, xlabel, "accuracy (%)")
    for k, (name, point) in enumerate(points.items()):
        marker = MARKERS[(k + k // len(COLOURS)) % len(MARKERS)]  # an eighth row has a look of its own
        _intervals(axes, [point], name, {**_look(k), "marker": marker, "linewidth": 1.0, "linestyle": "none"})
    return _written(figure, axes, path)


def settings(points: Sequence[Interval], path: str | Path, name: str, title: str = "") -> Path:
    """One line: accuracy over the values of a setting."""
    path, (figure, axes) = _checked(path, points), _canvas(title, name, "accuracy (%)")
    _intervals(axes, sorted(points), "95% interval", _look(0))
    return _written(figure, axes, path)


def _intervals(axes: Axes, points: Sequence[Interval], name: str, look: dict[str, Any]) -> None:
    x, y = [point[0] for point in points], [point[1] for point in points]
    reach = [[max(0.0, at - low) for _, at, low, _ in points], [max(0.0, high - at) for _, at, _, high in points]]
    axes.errorbar(x, y, yerr=reach, label=name, capsize=2, **look)


def _checked(path: str | Path, content: Any) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise RCDError(f"a figure is written as .png or .svg, not as {path.name!r}; change the suffix.")
    if not content:
        raise RCDError("there is nothing to draw; give at least one line.")
    return path


def _canvas(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RCDError("figures need matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(xlabel, fontsize=11)
    axes.set_ylabel(ylabel, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    return figure, axes


def _look(k: int) -> dict[str, Any]:
    """Line k's colour, and a marker of its own, so that print without colour can be read."""
    colour, marker = COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.8}


def _mark_thresholds(figure: Figure, axes: Axes, sweeps: Sequence[Sweep]) -> None:
    """A small number beside each point, in its line's colour, at the first place where it touches no line, no marker
    and no other number; left out where there is none."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # places in pixels are known once the layout is
    frame = axes.get_window_extent()
    lines = [line.get_path().transformed(line.get_transform()) for line in axes.lines]
    markers = np.concatenate([np.asarray(line.vertices) for line in lines])
    taken = [Bbox.from_extents(*(at - MARKER / 2), *(at + MARKER / 2)) for at in markers]
    for k, sweep in enumerate(sweeps):
        for point in sweep.points:
            for offset, across, up in ABOVE + BELOW if k % 2 else BELOW + ABOVE:
                number = axes.annotate(
                    short(point.threshold), (point.tokens_per_step, point.accuracy), offset,
                    textcoords="offset points", ha=across, va=up, fontsize=7, color=_look(k)["color"], in_layout=False,
                )  # fmt: skip
                box = number.get_window_extent()
                free = frame.count_contains(box.corners()) == 4 and not box.count_overlaps(taken)
                if free and not any(line.intersects_bbox(box, filled=False) for line in lines):
                    taken.append(box.padded(APART))
                    break
                number.remove()


def _written(figure: Figure, axes: Axes, path: Path) -> Path:
    axes.legend(frameon=False, fontsize=10)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise unwritable("the figure", path, error, "give another path") from error
    return path
