"""Running a model over a task at several thresholds, and comparing two such sweeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate.answering import answers
from rcd.evaluate.grading import grade
from rcd.evaluate.points import Point, Sweep
from rcd.evaluate.provenance import decode_settings, delta_of, dtype_name
from rcd.evaluate.statistics import aup_all, check_same_items, matched, one_token, speedup, wilson
from rcd.evaluate.wording import counted, dial

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline
    from rcd.data.tasks.base import Problem

__all__ = ["THRESHOLDS", "Point", "Sweep", "compare", "lines", "run_point", "run_sweep", "steps_of"]

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)
TOLERANCES = (0.0, 1.0)
"""Points below the base's best accuracy at which speedups are stated."""


def steps_of(result: Generation) -> int:
    """Every pass that commits or prepares a residual: denoising, start passes, and a reference's passes but for its own
    prefill and stores (it has as many as the target). A method's start pass is part of its price."""
    counts = result.counts
    prepared = max(0, counts.reference - counts.prefill - counts.store)
    return counts.denoising + counts.start + prepared


def run_point(
    pipeline: Pipeline,
    problems: Sequence[Problem],
    config: DecodeConfig,
    *,
    reference: Pipeline | None = None,
    batch: int = 256,
    exact: bool = True,
) -> Point:
    """Decode every question, grade every answer; what is returned is in the order of the problems."""
    if not problems:
        raise RCDError("there are no problems to decode; ask for at least one.")
    prompts = pipeline.encode([problem.question for problem in problems])
    config = pipeline.resolve(config, max(map(len, prompts)))  # once, so that no batch has settings of its own
    found = list(answers(pipeline, prompts, config, reference=reference, batch=batch, exact=exact))
    given = [each.generation for each in sorted(found, key=lambda each: each.number)]
    return Point(
        threshold=config.threshold,
        right=np.array([grade(problem, answer.text) for problem, answer in zip(problems, given, strict=True)]),
        tokens=np.array([answer.tokens for answer in given]),
        steps=np.array([steps_of(answer) for answer in given]),
        seconds=sum(each.share for each in found),
        texts=[answer.text for answer in given],
    )


def run_sweep(
    pipeline: Pipeline,
    problems: Iterable[Problem],
    thresholds: Sequence[float] = THRESHOLDS,
    config: DecodeConfig | None = None,
    *,
    name: str,
    reference: Pipeline | None = None,
    batch: int = 256,
    exact: bool = True,
    say: Callable[[str], None] | None = None,
) -> Sweep:
    """`run_point` at every threshold, otherwise with the same configuration; `say` hears one line a point."""
    problems, points = list(problems), []
    if not problems:
        raise RCDError("there are no problems to decode; ask for at least one.")
    longest = max(map(len, pipeline.encode([problem.question for problem in problems])))
    config = pipeline.resolve(config, longest)
    for each in [replace(config, threshold=threshold) for threshold in thresholds]:
        point = run_point(pipeline, problems, each, reference=reference, batch=batch, exact=exact)
        points.append(point)
        if say is not None:
            say(
                f"{name}: {dial(point.setting, point.threshold)}, {point.tokens_per_step:.2f} tokens per step, "
                f"{point.accuracy:.1f}% right, {point.seconds:.1f} s"
            )
    settings = {key: value for key, value in decode_settings(config).items() if key != "threshold"}
    settings |= {"carry": repr(config.carry), "batch": batch, "exact": exact, "dtype": dtype_name(pipeline)}
    settings["delta"] = delta_of(config.travelling, config.delta, pipeline.settings.vocab_size)
    digest = hashlib.sha256("\n".join(problem.question + "\n" + problem.answer for problem in problems).encode())
    items, tasks = [problem.name for problem in problems], [problem.task for problem in problems]
    return Sweep(name, items, tasks, points, settings, digest.hexdigest()[:16])


def compare(base: Sweep, other: Sweep, *, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Everything that is said of two sweeps over the same items, as one JSON object: `all`, and each of `tasks`."""
    check_same_items(base, other)
    check_same_numbers(base, other)
    overall = _part(base, other, resamples, seed)
    tasks = sorted(set(base.tasks))
    parts = {task: _part(base.only(task), other.only(task), resamples, seed) for task in tasks if len(tasks) > 1}
    return {"base": base.name, "other": other.name, "all": overall, "tasks": parts or {tasks[0]: overall}}


def check_same_numbers(base: Sweep, other: Sweep) -> None:
    """Where both say in which dtype they were answered and how delta was computed, it is the same."""
    for key, flag in (("dtype", "--dtype"), ("delta", "--set delta=...")):
        one, two = base.settings.get(key), other.settings.get(key)
        if None not in (one, two) and one != two:
            raise RCDError(
                f"the {key} of the sweep {base.name!r} is {one} and that of {other.name!r} {two}; sweep both with the "
                f"same {flag}."
            )


def _part(base: Sweep, other: Sweep, resamples: int, seed: int) -> dict[str, Any]:
    areas = aup_all({"base": base.curve, "other": other.curve})
    ratio = {form: _ratio(areas["other"][form], areas["base"][form]) for form in ("own", "shared")}
    return {
        "items": len(base.items),
        "curves": {"base": _curve(base), "other": _curve(other)},
        "best": {"base": base.best, "other": other.best},
        "one_token": one_token(base, other),
        "matched": matched(base, other, resamples=resamples, seed=seed),
        "aup": {**areas, "ratio": ratio},
        "speedup": {f"{tolerance:g}": speedup(base, other, tolerance) for tolerance in TOLERANCES},
    }


def _curve(sweep: Sweep) -> list[dict[str, float | None]]:
    """Every point in numbers, with the Wilson interval of its accuracy, by tokens per step."""
    rows = []
    for point in sorted(sweep.points, key=lambda point: point.tokens_per_step):
        low, high = wilson(int(point.right.sum()), len(point.right))
        rows.append(
            {
                "threshold": point.threshold, "tokens_per_step": point.tokens_per_step, "accuracy": point.accuracy,
                "low": 100 * low, "high": 100 * high, "seconds": point.seconds,
            }
        )  # fmt: skip
    return rows


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def lines(comparison: dict[str, Any]) -> list[str]:
    """A comparison as a short text table."""
    text = [f"{comparison['other']} against {comparison['base']} (differences in percentage points, 95% intervals)"]
    parts = {"all": comparison["all"], **(comparison["tasks"] if len(comparison["tasks"]) > 1 else {})}
    for name, part in parts.items():
        one, pairs, areas, fast = part["one_token"], part["matched"], part["aup"], part["speedup"]
        text += ["", f"{name}: {counted(part['items'], 'item')}"]
        if one is not None:
            text.append(
                f"  one token a step     {one['base']:5.1f} -> {one['other']:5.1f}  {_interval(one)}  p {one['p']:.3g}"
            )
        for row in pairs["points"]:
            at = f"{row['tokens_per_step']:.2f} tokens a step"
            text.append(f"  {at:<20} {row['base']:5.1f} -> {row['other']:5.1f}  {_interval(row)}")
        if pairs["mean"] is None:
            text.append("  matched              the sweeps share no useful range of tokens per step")
        else:
            low, high = pairs["range"]
            text.append(f"  mean over {low:.2f}-{high:.2f}                   {_interval(pairs['mean'])}")
        for form in ("own", "shared") if has_area(part) else ():
            base, other, ratio = areas["base"][form], areas["other"][form], areas["ratio"][form]
            times = "" if ratio is None else f"  x {ratio:.2f}"
            text.append(f"  {f'AUP ({form} cut)':<20} {base:5.1f} -> {other:5.1f}{times}")
        speedups = _speedups(fast, comparison["base"], part["best"]["base"])
        if speedups:
            text.append(f"  speedup              {', '.join(speedups)} (asked of both)")
    return text


def has_area(part: dict[str, Any]) -> bool:
    """Whether both sides of a comparison have more than a point, so that there is an area under them."""
    return all(len(part["curves"][side]) > 1 for side in ("base", "other"))


def _interval(row: dict[str, Any]) -> str:
    return f"{row['difference']:+6.2f} [{row['low']:+.2f}, {row['high']:+.2f}]"


def _speedups(fast: dict[str, float | None], base: str, best: float) -> list[str]:
    """By how much fewer steps, at every accuracy that is asked of both; an accuracy of nothing is not asked."""
    told = []
    for tolerance, value in fast.items():
        what = f"{tolerance} point less" if float(tolerance) else f"{base}'s best accuracy"
        if float(tolerance) < best:
            told.append(f"{what}: {'not reached' if value is None else f'x {value:.2f}'}")
    return told
