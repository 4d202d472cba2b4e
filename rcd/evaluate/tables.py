"""Sweeps as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rcd.evaluate.points import Sweep
from rcd.evaluate.sweep import lines


def table(sweeps: Mapping[str, Sweep]) -> list[str]:
    """Accuracy (tokens per step) of every sweep at every threshold."""
    values = (point.threshold for sweep in sweeps.values() for point in sweep.points)
    thresholds = sorted({value for value in values if value is not None})
    out = [f"| threshold | {' | '.join(sweeps)} |", "|---" * (len(sweeps) + 1) + "|"]
    for threshold in thresholds:
        cells = []
        for sweep in sweeps.values():
            point = next((point for point in sweep.points if point.threshold == threshold), None)
            cells.append("" if point is None else f"{point.accuracy:.1f} ({point.tokens_per_step:.2f})")
        out.append(f"| {threshold:g} | {' | '.join(cells)} |")
    return out


def page(
    title: str, sweeps: Mapping[str, Sweep], comparisons: Sequence[dict[str, Any]] = (), failed: Sequence[str] = ()
) -> str:
    """A report: the table of all items and of each task, and what `compare` found."""
    out = [f"# {title}", "", *table(sweeps)]
    if failed:
        out[1:1] = ["", f"Failed or skipped: {', '.join(failed)}."]
    for task in sorted({task for sweep in sweeps.values() for task in sweep.tasks}):
        out += ["", f"{task}:", "", *table({name: sweep.only(task) for name, sweep in sweeps.items()})]
    for found in comparisons:
        out += ["", "```", *lines(found), "```"]
    return "\n".join(out) + "\n"
