"""What may be said of two sweeps: AUP, paired differences at matched tokens per step, speedup.

Letters: N items, P points, R resamples;
rho is tokens per step, y an accuracy in percent, and every difference is other - base in percentage points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from rcd.errors import RCDError, number, whole
from rcd.evaluate.points import Array, Sweep

Curve = Sequence[tuple[float, float]]
"""(rho, y) of every point."""

DROP = 5.0
"""AUP: points this far below y_1 do not count."""
STEEPNESS = 3.0
"""AUP: how fast a point's weight falls with its distance from the best accuracy."""
GRID = 401
"""Places at which two curves are compared for the mean of their difference."""
EPSILON = 1e-9


def wilson(right: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share p = right / total: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    whole("total", total, least=1)
    whole("right", right, least=0, most=total)
    number("level", level, least=0.01, most=0.9999)
    z, p = NormalDist().inv_cdf(0.5 + level / 2), right / total
    middle = p + z * z / (2 * total)
    reach = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def aup(points: Curve, best: float | None = None, floor: float | None = None) -> float:
    """Accuracy under parallelism: rho_1 y_1 + sum over i > 1 of (rho_i - rho_{i-1}) (y_i W_i + y_{i-1} W_{i-1}) / 2,
    with W = min(exp(-3 (1 - y / y_max)), 1), over the points with y >= floor, sorted by rho.

    `best` is y_max over all methods compared (None: the method's own); `floor` is y_1 - 5 (None: of its own y_1).
    Nothing kept gives 0. Where a floor takes away the slowest point, what is left of the curve does not get the full
    credit of a first point: its y is weighted, too.
    """
    if not points:
        raise RCDError("AUP needs at least one point (tokens per step, accuracy in percent).")
    ordered = sorted(points)
    y_max = max(y for _, y in ordered) if best is None else best
    cut = ordered[0][1] - DROP if floor is None else floor
    kept = [(rho, y) for rho, y in ordered if y >= cut - EPSILON]
    if not kept or y_max <= 0:
        return 0.0
    weighted = [(rho, y * min(math.exp(-STEEPNESS * (1 - y / y_max)), 1.0)) for rho, y in kept]
    first = kept if kept[0] == ordered[0] else weighted
    area = first[0][0] * first[0][1]
    for (rho_0, y_0), (rho_1, y_1) in pairwise(weighted):
        area += (rho_1 - rho_0) * (y_0 + y_1) / 2
    return area


def aup_all(curves: dict[str, Curve]) -> dict[str, dict[str, float]]:
    """AUP of every method with y_max over all of them. `own` drops what lies 5 points below the method's own y_1;
    `shared` what lies 5 points below the highest y_1 of all, so that a method that is bad at one token a step keeps no
    point that a good one loses."""
    if not curves or not all(curves.values()):
        raise RCDError("AUP needs at least one point of every method.")
    best = max(y for curve in curves.values() for _, y in curve)
    floor = max(min(curve)[1] for curve in curves.values()) - DROP
    return {name: {"own": aup(curve, best), "shared": aup(curve, best, floor)} for name, curve in curves.items()}


def paired(a_right: Sequence[float] | Array, b_right: Sequence[float] | Array) -> dict[str, Any]:
    """b - a over the same items, each the share of its samples that is right: the mean difference in points, its 95%
    interval (`smoothed`), and the exact McNemar p-value min(1, 2 P(X <= min(gained, lost))), X ~ Binomial(gained +
    lost, 1/2)."""
    a, b = np.asarray(a_right, dtype=float), np.asarray(b_right, dtype=float)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise RCDError(f"a paired comparison needs the same items on both sides, not {a.size} and {b.size}.")
    d = b - a
    gained, lost = int((d > 0).sum()), int((d < 0).sum())
    low, high = smoothed(d)
    return {
        "difference": 100.0 * float(d.mean()), "low": 100.0 * low, "high": 100.0 * high,
        "p": mcnemar(gained, lost), "gained": gained, "lost": lost,
    }  # fmt: skip


MADE_UP = np.array([1.0, -1.0])
"""Two items that intervals of differences are computed with beside the real ones: one that only the other model gets
right, and one that only the base does. So equal answers to a handful of items are no certainty."""


def smoothed(d: Array) -> tuple[float, float]:
    """Bonett and Price's 95% interval of a mean difference, where d is in [-1, 1]: m ± 1.96 s / sqrt(N + 2), with m and
    s (over N + 2) of d and the two made-up items. For right and wrong, m = (gained - lost) / (N + 2) and
    s² = (gained + lost + 2) / (N + 2) - m²."""
    wide = np.concatenate([np.asarray(d, dtype=float), MADE_UP])
    mean, reach = float(wide.mean()), NormalDist().inv_cdf(0.975) * float(wide.std()) / math.sqrt(len(wide))
    return max(mean - reach, -1.0), min(mean + reach, 1.0)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value in whole numbers: 2 sum_{k <= min} C(n, k) / 2^n, n = gained + lost."""
    n, term, total = gained + lost, 1, 0
    for k in range(min(gained, lost) + 1):
        total += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * total / 2**n)


def one_token(base: Sweep, other: Sweep) -> dict[str, Any] | None:
    """`paired` at threshold 1, where every step commits one token; None where a sweep does not have it."""
    check_same_items(base, other)
    a, b = (next((point for point in sweep.points if point.slowest), None) for sweep in (base, other))
    if a is None or b is None:
        return None
    return {
        "base": a.accuracy, "other": b.accuracy, "thresholds": [a.threshold, b.threshold],
        "tokens_per_step": [a.tokens_per_step, b.tokens_per_step], **paired(a.right, b.right),
    }  # fmt: skip


def matched(
    base: Sweep, other: Sweep, at: Sequence[float] | None = None, resamples: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """y_other(rho) - y_base(rho) at matched tokens per step, each y interpolated linearly in its sweep.

    `shared` is [max of the lowest rho, min of the highest]; `range` the useful part of it, from its beginning to where
    y_base(rho) first falls below y_base's best / 2 (None when there is none); `points` the differences at `at` (None:
    at 9 places evenly over `range`, at one where it is a point); `mean` the mean difference over `range`. The 95%
    intervals are percentiles of a bootstrap over the items and the two made-up ones (as slow as the mean item), in
    which both accuracies and both tokens per step are computed anew."""
    check_same_items(base, other)
    whole("resamples", resamples, least=1)
    a, b = _Curve.of(base), _Curve.of(other)
    low, high = max(a.rho.min(), b.rho.min()), min(a.rho.max(), b.rho.max())
    outside = [rho for rho in at or () if not low <= rho <= high]
    if outside and low > high:
        raise RCDError("the two sweeps have no tokens per step in common; sweep more thresholds.")
    if outside:
        raise RCDError(
            f"{outside[0]:g} tokens per step lies outside what both sweeps cover ({low:.3g} to {high:.3g}); "
            "ask within it, or sweep more thresholds."
        )
    grid = np.linspace(low, high, GRID) if low <= high else np.empty(0)
    useful = grid[np.logical_and.accumulate(a.at(grid) >= base.best / 2)]
    result: dict[str, Any] = {"shared": [float(low), float(high)] if len(grid) else None, "range": None}
    if len(useful):
        result["range"] = [float(useful[0]), float(useful[-1])]
    if at is None:
        at = list(dict.fromkeys(np.linspace(useful[0], useful[-1], 9).tolist())) if len(useful) else []
    places = np.concatenate([np.asarray(at, dtype=float), useful])
    if not len(places):
        return {**result, "points": [], "mean": None}

    y_a, y_b, k = a.at(places), b.at(places), len(at)
    drawn = np.array([y - x for x, y in _resampled(base, other, places, resamples, seed)])
    lows, highs = np.percentile(drawn, [2.5, 97.5], axis=0)
    result["points"] = [
        {
            "tokens_per_step": float(places[i]), "base": float(y_a[i]), "other": float(y_b[i]),
            "difference": float(y_b[i] - y_a[i]), "low": float(lows[i]), "high": float(highs[i]),
        }
        for i in range(k)
    ]  # fmt: skip
    result["mean"] = None
    if len(useful):
        ends = np.percentile(drawn[:, k:].mean(axis=1), [2.5, 97.5])
        result["mean"] = {"difference": float((y_b - y_a)[k:].mean()), "low": float(ends[0]), "high": float(ends[1])}
    return result


def speedup(base: Sweep, other: Sweep, tolerance: float = 0.0) -> float | None:
    """rho_other / rho_base: the largest rho at which each still has y >= (the base's best y) - tolerance, y
    interpolated. None when the other never has it. The tolerance holds for both, so a sweep's speedup over itself
    is 1."""
    check_same_items(base, other)
    number("tolerance", tolerance, least=0, most=100)
    target = base.best - tolerance
    ours, theirs = _reach(other.curve, target), _reach(base.curve, target)
    assert theirs is not None
    return None if ours is None else ours / theirs


SAVED = {"best": 0.0, "best - 1": 1.0}
"""Accuracies that both methods are asked for: the base's best, and this many points below it."""


def savings(base: Sweep, other: Sweep, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """What the other saves, with 95% intervals from a bootstrap over items.

    `steps`: for the base's best accuracy, for one point less, and for its accuracy at one token a step (if threshold 1
    was swept), the largest rho at which each side still has it, and rho_other / rho_base: so many times fewer steps.
    The other has no rho, and the ratio is 0, where it never has that accuracy. `aup`: both forms of both, and the
    ratio (None where the base's is 0)."""
    check_same_items(base, other)
    whole("resamples", resamples, least=1)
    slowest = any(point.slowest for point in base.points)
    found = _savings(base.curve, other.curve, slowest)
    drawn = [_savings(a, b, slowest) for a, b in _resampled_curves(base, other, resamples, seed)]
    for kind, rows in found.items():
        for name, row in rows.items():
            ratios = [each[kind][name]["ratio"] for each in drawn if each[kind][name]["ratio"] is not None]
            known = row["ratio"] is not None and ratios
            row["low"], row["high"] = map(float, np.percentile(ratios, [2.5, 97.5])) if known else (None, None)
    return found


def _savings(base: Curve, other: Curve, slowest: bool) -> dict[str, dict[str, dict[str, Any]]]:
    best = max(y for _, y in base)
    targets = {name: best - tolerance for name, tolerance in SAVED.items()}
    if slowest:
        targets["one token"] = min(base)[1]
    steps, areas = dict[str, dict[str, Any]](), aup_all({"base": base, "other": other})
    for name, target in targets.items():
        theirs, ours = _reach(base, target), _reach(other, target)
        assert theirs is not None
        steps[name] = {"accuracy": target, "base": theirs, "other": ours, "ratio": (ours or 0.0) / theirs}
    shares = {form: (areas["base"][form], areas["other"][form]) for form in ("own", "shared")}
    return {
        "steps": steps,
        "aup": {form: {"base": a, "other": b, "ratio": b / a if a else None} for form, (a, b) in shares.items()},
    }


def timed(sweep: Sweep, seconds: Sequence[Sequence[float] | Array]) -> Sweep:
    """The same with microseconds for steps (`seconds`: of each item of each point), so that `matched` compares at equal
    tokens per microsecond."""
    points = [
        replace(point, steps=np.maximum(np.rint(1e6 * np.asarray(own)), 1))
        for point, own in zip(sweep.points, seconds, strict=True)
    ]
    return replace(sweep, points=points)


def matched_speed(base: Sweep, other: Sweep, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """`matched` of two `timed` sweeps, in tokens per second."""
    found = matched(base, other, resamples=resamples, seed=seed)
    rows = [{"tokens_per_second": 1e6 * row.pop("tokens_per_step"), **row} for row in found["points"]]
    ranges = {key: found[key] and [1e6 * end for end in found[key]] for key in ("shared", "range")}
    return {**ranges, "points": rows, "mean": found["mean"]}


def _reach(curve: Curve, target: float) -> float | None:
    """The largest rho at which the interpolated y is still >= target."""
    last = max((i for i, (_, y) in enumerate(curve) if y >= target - EPSILON), default=None)
    if last is None or last == len(curve) - 1:
        return None if last is None else curve[last][0]
    (rho_0, y_0), (rho_1, y_1) = curve[last], curve[last + 1]
    return rho_0 + (rho_1 - rho_0) * max(0.0, y_0 - target) / (y_0 - y_1)


def check_same_items(base: Sweep, other: Sweep) -> None:
    """Paired statistics need the same items in the same order."""
    if (base.items, base.tasks, base.digest) != (other.items, other.tasks, other.digest):
        raise RCDError(
            f"the sweeps {base.name!r} and {other.name!r} are over different items; sweep both over the same problems."
        )


@dataclass(frozen=True, eq=False)
class _Curve:
    """rho [P] and y [P], sorted by rho."""

    rho: Array
    y: Array

    @classmethod
    def of(cls, sweep: Sweep) -> _Curve:
        rho, y = zip(*sweep.curve, strict=True)
        return cls(np.array(rho), np.array(y))

    def at(self, places: Array) -> Array:
        return np.interp(places, self.rho, self.y)


def _resampled(base: Sweep, other: Sweep, places: Array, resamples: int, seed: int) -> Iterator[tuple[Array, Array]]:
    """(y_base, y_other) at the places for each resample of the items and the made-up ones."""
    for (rho_a, y_a), (rho_b, y_b) in _drawn(_table(base, MADE_UP < 0), _table(other, MADE_UP > 0), resamples, seed):
        yield np.interp(places, rho_a, y_a), np.interp(places, rho_b, y_b)


def _resampled_curves(base: Sweep, other: Sweep, resamples: int, seed: int) -> Iterator[tuple[Curve, Curve]]:
    for a, b in _drawn(_table(base), _table(other), resamples, seed):
        yield list(zip(*map(np.ndarray.tolist, a), strict=True)), list(zip(*map(np.ndarray.tolist, b), strict=True))


Drawn = tuple[Array, Array]
"""rho [P] and y [P] of one resample, sorted by rho."""


@dataclass(frozen=True, eq=False)
class _Table:
    """right, tokens and steps, [N, P] each."""

    right: Array
    tokens: Array
    steps: Array


def _table(sweep: Sweep, more: Array | None = None) -> _Table:
    """Of every item at every point; `more` further items are right or not at all points, and of the mean length."""
    right, tokens, steps = (
        np.stack([getattr(point, name) for point in sweep.points], axis=1).astype(float)
        for name in ("right", "tokens", "steps")
    )
    if more is None:
        return _Table(right, tokens, steps)
    rows = np.repeat(np.asarray(more, dtype=float)[:, None], right.shape[1], axis=1)
    lengthened = (np.vstack([each, *[each.mean(axis=0)] * len(rows)]) for each in (tokens, steps))
    return _Table(np.vstack([right, rows]), *lengthened)


def _drawn(base: _Table, other: _Table, resamples: int, seed: int, chunk: int = 250) -> Iterator[tuple[Drawn, Drawn]]:
    """Both curves for each resample; both models see the same drawn items."""
    rng, items = np.random.default_rng(seed), len(base.right)
    for first in range(0, resamples, chunk):
        rows = min(chunk, resamples - first)
        drawn = rng.integers(items, size=(rows, items)) + items * np.arange(rows)[:, None]
        weights_RN = np.bincount(drawn.ravel(), minlength=rows * items).reshape(rows, items).astype(float)
        (rho_a, y_a), (rho_b, y_b) = _weighted(base, weights_RN), _weighted(other, weights_RN)
        for r in range(rows):
            yield (rho_a[r], y_a[r]), (rho_b[r], y_b[r])


def _weighted(table: _Table, weights_RN: Array) -> tuple[Array, Array]:
    """rho = (w @ tokens) / (w @ steps) and y = 100 (w @ right) / sum(w), [R, P] each, sorted by rho."""
    rho = (weights_RN @ table.tokens) / (weights_RN @ table.steps)
    y = 100.0 * (weights_RN @ table.right) / weights_RN.sum(axis=1, keepdims=True)
    order = np.lexsort((y, rho))
    return np.take_along_axis(rho, order, 1), np.take_along_axis(y, order, 1)
