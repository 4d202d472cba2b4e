"""What the lines of a campaign say: every figure as one JSON object, and the verdict in plain sentences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rcd.carry.base import describe
from rcd.evaluate.campaign import Grid, Line, Place
from rcd.evaluate.statistics import matched_speed, savings, timed
from rcd.evaluate.sweep import compare
from rcd.evaluate.wording import FEW, counted, dial, short, signed, too_few

PAPER = "the paper reports 4 to 5 times fewer"
NEAR = 5.0
"""Points: an interval around zero that reaches further could hide a difference that matters."""


def findings(
    grid: Grid, lines: Sequence[Line], failures: dict[Place, str], base: str, *, resamples: int = 2000
) -> dict[str, Any]:
    """Everything that is known, as JSON; `base` is what the others are compared with, the best of them first."""
    ground = next((line for line in lines if line.entry.name == base), None)
    others = [line for line in lines if line is not ground]
    comparisons = [comparison(ground, line, resamples) for line in others] if ground is not None else []
    comparisons.sort(key=_lead, reverse=True)
    found: dict[str, Any] = {
        "task": Path(grid.task).name, "items": len(grid.problems), "thresholds": grid.thresholds, "base": base,
        "entries": [_entry(line) for line in lines], "comparisons": comparisons,
        "failures": [
            {"name": grid.entries[place.entry].name, "threshold": place.value, "error": error}
            for place, error in failures.items()
        ],
    }  # fmt: skip
    return {"summary": summary(found), **found}


def _lead(each: dict[str, Any]) -> float:
    mean = each["all"]["matched"]["mean"]
    return -math.inf if mean is None else float(mean["difference"])


def comparison(base: Line, other: Line, resamples: int = 2000) -> dict[str, Any]:
    """`compare`, with intervals of what is saved, and with accuracies at equal tokens per second."""
    slow, fast = (timed(line.sweep, line.seconds) for line in (base, other))
    return {
        **compare(base.sweep, other.sweep, resamples=resamples),
        "as_in_the_paper": [describe(line.entry.carry)["name"] for line in (base, other)] == ["none", "residual"]
        and base.entry.config.commit == other.entry.config.commit,
        "savings": savings(base.sweep, other.sweep, resamples=resamples),
        "throughput": matched_speed(slow, fast, resamples=resamples),
    }


def _entry(line: Line) -> dict[str, Any]:
    points = []
    for point, records, figures in zip(line.sweep.points, line.records, line.figures, strict=True):
        points.append(
            {
                "setting": point.setting, "threshold": point.threshold, "accuracy": point.accuracy,
                "low": 100 * figures["low"], "high": 100 * figures["high"], "tokens_per_step": point.tokens_per_step,
                "tokens_per_second": figures["tokens_per_second"], "tokens": figures["tokens"],
                "steps": float(np.mean([record.steps for record in records])), "cut_off": figures["cut_off"],
                "seconds": figures["seconds"],
            }
        )  # fmt: skip
    return {"name": line.entry.name, **line.sweep.settings, "best": line.sweep.best, "points": points}


def summary(found: dict[str, Any]) -> list[str]:
    """Who wins, by how much and how sure that is; the first sentence is the verdict of the first comparison."""
    out = [verdict(each, found) for each in found["comparisons"]]
    if not out:
        out = [_alone(entry, found["items"], found["task"]) for entry in found["entries"]]
    if len(found["comparisons"]) > 1:
        out.append("Every interval is for its own comparison; with several, one may miss by chance.")
    if found["entries"] and found["base"] not in [entry["name"] for entry in found["entries"]]:
        out.append(f"{found['base']} has failed, so the others are compared with nothing.")
    out += too_few(found["items"]) or _small_tasks(found["comparisons"])
    if found["failures"]:
        total = len({(entry["name"], point["threshold"]) for entry in found["entries"] for point in entry["points"]})
        bad = len(found["failures"])
        out.append(f"{bad} of {counted(bad + total, 'point')} failed.")
    return out


def _small_tasks(comparisons: Sequence[dict[str, Any]]) -> list[str]:
    """Of a mix, the tasks that have too few items."""
    sizes = {task: part["items"] for each in comparisons for task, part in each["tasks"].items()}
    return [note for task, items in sizes.items() for note in too_few(items, task)]


def more_points(entries: Iterable[dict[str, Any]]) -> str:
    """What gives lines that are a single point a range of tokens per step."""
    for entry in entries:
        setting, value = entry["points"][0]["setting"], entry["points"][0]["threshold"]
        if len(entry["points"]) > 1 or setting == "threshold":
            continue
        if setting == "num_inference_steps":
            values = "4/8" if value is None else f"{max(1, value // 2):g}/{2 * value:g}"
        else:
            values = f"{value / 2:g}/{5 * value:g}" if value else "0.1/1"
        rule = entry["decode"]["commit"]
        return f"{entry['name']} is a single point; several make a line, such as --commit {rule},{setting}={values}."
    return "More thresholds may help."


def verdict(each: dict[str, Any], found: dict[str, Any]) -> str:
    """Of one comparison of those, at equal tokens per step."""
    other, base, matched, items = each["other"], each["base"], each["all"]["matched"], found["items"]
    on = f"on {counted(items, 'item')} of {found['task']}"
    mean = matched["mean"]
    if mean is None:
        return (
            f"{other} and {base} cannot be compared at equal tokens per step {on}: they have no useful range in "
            f"common. {more_points([one for one in found['entries'] if one['name'] in (other, base)])}"
        )
    low, high = matched["range"]
    over = f"at equal tokens per step (mean over {low:.2f} to {high:.2f}, {on})"
    interval = f"95% interval {signed(mean['low'])} to {signed(mean['high'])}"
    by = f"{abs(mean['difference']):.1f} points"
    if mean["low"] > 0 or mean["high"] < 0:
        better = "better" if mean["difference"] > 0 else "worse"
        return f"{other} is {better} than {base} by {by} {over}; {interval}."
    wide = items < FEW or max(-mean["low"], mean["high"]) > NEAR
    opening = "Undecided" if wide else "Neither wins"
    return f"{opening}: {other} differs from {base} by {signed(mean['difference'])} points {over}; {interval}."


def details(each: dict[str, Any]) -> list[str]:
    """Of one comparison, behind its verdict: both ends of the useful range, and steps for the same accuracy."""
    rows, out = each["all"]["matched"]["points"], []
    if len(rows) > 1 and rows[0]["tokens_per_step"] < rows[-1]["tokens_per_step"]:
        told = [
            f"{signed(row['difference'])} points [{signed(row['low'])}, {signed(row['high'])}] at "
            f"{row['tokens_per_step']:.2f}"
            for row in (rows[0], rows[-1])
        ]
        out.append(f"From the slow end of that range to the fast one: {told[0]} tokens per step, {told[1]}.")
    return [*out, steps_told(each)]


def steps_told(each: dict[str, Any]) -> str:
    """The steps that both need for the base's best accuracy."""
    row, other, base = each["savings"]["steps"]["best"], each["other"], each["base"]
    best = f"{base}'s best accuracy ({row['accuracy']:.1f}%)"
    if row["accuracy"] <= 0:
        return f"{base} has no right answer at any threshold, so there is no accuracy to match."
    if row["other"] is None:
        return f"{other} never reaches {best}{_paper(each, ' steps for it')}."
    times, ends = row["ratio"], [row["low"], row["high"]]
    if 0.995 < times < 1.005:
        told = "equally many"
    elif times > 1:
        told = f"{times:.2f} times fewer"
    else:
        told, times, ends = f"{1 / times:.2f} times more", 1 / times, [1 / end if end else 0.0 for end in ends[::-1]]
    return f"For {best} {other} needs {told} steps ({_ends(*ends)}){_paper(each)}."


def _ends(low: float, high: float) -> str:
    """A 95% interval of times, of which an end is 0 where the accuracy is not reached."""
    if low and high:
        return f"95% interval {low:.2f} to {high:.2f}"
    known = f"95% interval {'up to' if high else 'from'} {high or low:.2f}; " if low or high else ""
    return f"{known}in some resamples it is never reached"


def _paper(each: dict[str, Any], more: str = "") -> str:
    """What the paper has, where this is its comparison."""
    return f"; {PAPER}{more}" if each["as_in_the_paper"] else ""


def _alone(entry: dict[str, Any], items: int, task: str) -> str:
    point = max(entry["points"], key=lambda point: (point["accuracy"], point["tokens_per_step"]))
    return (
        f"{entry['name']} has its best accuracy, {point['accuracy']:.1f}% (95% interval {point['low']:.1f} to "
        f"{point['high']:.1f}), at {dial(point['setting'], point['threshold'])} with "
        f"{point['tokens_per_step']:.2f} tokens per step, on {counted(items, 'item')} of {task}."
    )


def failed(failures: Iterable[dict[str, Any]]) -> list[str]:
    """One line for every entry and cause."""
    grouped: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    for each in failures:
        grouped[each["name"], each["error"]].append(each["threshold"])
    return [
        f"{name} at {', '.join(sorted(short(value) or 'one setting' for value in thresholds))}: {error}"
        for (name, error), thresholds in grouped.items()
    ]
