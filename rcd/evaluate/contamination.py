"""Is a model's GSM8K accuracy its own? The same model on GSM8K, on new problems of its kind (GSM1K) and on its problems
changed (GSM-Plus): tab:gsm-contamination-study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError, one_of
from rcd.evaluate.statistics import wilson

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.data.tasks.base import Problem
    from rcd.evaluate.evaluation import Say

BASE = "gsm8k"
SETS = (BASE, "gsm1k", "gsm-plus")


def load_sets(
    paths: Mapping[str, str | Path] | None = None, limit: int | None = None
) -> tuple[dict[str, list[Problem]], dict[str, str]]:
    """(the sets that can be had, why the others cannot), each from the hub or from its file."""
    from rcd.evaluate import tasks

    paths = paths or {}
    for name in paths:
        one_of("set", name, SETS)
    found: dict[str, list[Problem]] = {}
    skipped: dict[str, str] = {}
    for name in SETS:
        try:
            found[name] = tasks.load(name, limit=limit, path=paths.get(name))
        except RCDError as error:
            skipped[name] = str(error).replace("--path FILE", f"--path {name}=FILE")
    return found, skipped


def study(
    pipeline: Pipeline,
    sets: Mapping[str, Sequence[Problem]],
    config: DecodeConfig,
    folder: str | Path,
    *,
    model: str,
    reference: tuple[str, Pipeline] | None = None,
    batch: int = 32,
    progress: Callable[[str], Say] | None = None,
) -> dict[str, Any]:
    """`sets`: the summary of each (`rcd.evaluate.evaluation.summary`); `drops`: gsm8k's accuracy less each other's, in
    points with a 95% interval."""
    from rcd.evaluate import tasks
    from rcd.evaluate.evaluation import evaluate

    told: dict[str, dict[str, Any]] = {}
    for name, problems in sets.items():
        own = config
        if config.max_new_tokens is None and pipeline.settings.max_new_tokens is None:
            own = replace(config, max_new_tokens=tasks.new_tokens(name))
        told[name] = evaluate(
            pipeline, problems, own, Path(folder) / name, model=model, task=name, reference=reference, batch=batch,
            say=None if progress is None else progress(f"{name} "),
        )  # fmt: skip
    return {"model": model, "sets": told, "drops": drops(told)}


def drops(told: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    if BASE not in told:
        return {}
    first = told[BASE]
    return {
        name: drop(_right(first), first["items"], _right(row), row["items"])
        for name, row in told.items()
        if name != BASE
    }


def _right(row: Mapping[str, Any]) -> int:
    return round(row["accuracy"] * row["items"])


def drop(right: int, total: int, other_right: int, other_total: int) -> dict[str, float]:
    """100 (p1 - p2) of two different sets with Newcombe's 95% interval, from Wilson's of each: the sets share no items,
    so nothing is paired."""
    p, q = right / total, other_right / other_total
    (p_low, p_high), (q_low, q_high) = wilson(right, total), wilson(other_right, other_total)
    return {
        "drop": 100 * (p - q),
        "low": 100 * (p - q - math.hypot(p - p_low, q_high - q)),
        "high": 100 * (p - q + math.hypot(p_high - p, q - q_low)),
    }


def lines(found: Mapping[str, Any], skipped: Mapping[str, str]) -> list[str]:
    """The table."""
    out = [f"{'set':<10}{'items':>7}{'accuracy':>10}  {'95% interval':<16}  drop against {BASE}, in points"]
    for name in SETS:
        if name in skipped:
            out.append(f"{name:<10}skipped: {skipped[name]}")
            continue
        row, fall = found["sets"][name], found["drops"].get(name)
        interval = f"[{100 * row['low']:.2f}, {100 * row['high']:.2f}]"
        told = "" if fall is None else f"{fall['drop']:.2f} [{fall['low']:.2f}, {fall['high']:.2f}]"
        out.append(f"{name:<10}{row['items']:>7}{100 * row['accuracy']:>10.2f}  {interval:<16}  {told}".rstrip())
    return out
