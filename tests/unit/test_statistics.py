"""The statistics against arithmetic done by hand, and against synthetic sweeps whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rcd.errors import RCDError
from rcd.evaluate.points import Point, Sweep
from rcd.evaluate.statistics import (
    aup,
    aup_all,
    matched,
    matched_speed,
    mcnemar,
    one_token,
    paired,
    savings,
    smoothed,
    speedup,
    timed,
    wilson,
)


def _first(point: Point, items: int) -> Point:
    return replace(point, right=point.right[:items], tokens=point.tokens[:items], steps=point.steps[:items])


def sweep(name: str, curve: Sequence[tuple[float, float]], items: int = 100, first: int = 0) -> Sweep:
    """Exactly these (rho, accuracy in percent): every item has 60 tokens in 60 / rho steps."""
    points = [
        Point(1.0 - k / 10, np.arange(items) < round(y * items / 100), np.full(items, 60), np.full(items, 60 / rho))
        for k, (rho, y) in enumerate(curve)
    ]
    return Sweep(name, [f"item-{first + k}" for k in range(items)], ["words"] * items, points)


def test_wilson_against_known_values() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((0.7224672, 1.0), abs=1e-6)
    assert wilson(50, 100, level=0.9) == pytest.approx((0.4188743, 0.5811257), abs=1e-4)
    with pytest.raises(RCDError, match="right"):
        wilson(11, 10)


def test_aup_by_hand() -> None:
    # y_max 82, cut 80 - 5 = 75: (4, 70) is dropped.
    # W(80) = exp(-3 * 2/82) = 0.929442, W(78) = exp(-3 * 4/82) = 0.863863
    # 1 * 80 + (2 - 1) * (78 * 0.863863 + 80 * 0.929442) / 2 = 80 + (67.3813 + 74.3554) / 2 = 150.8683
    assert aup([(4, 70), (1, 80), (2, 78)], best=82) == pytest.approx(150.8683, abs=1e-3)
    # alone, y_max 80: W(80) = 1, W(78) = exp(-3 * 2/80) = 0.927743; 80 + (72.3640 + 80) / 2 = 156.1820
    assert aup([(1, 80), (2, 78), (4, 70)]) == pytest.approx(156.1820, abs=1e-3)


def test_aup_edges() -> None:
    assert aup([(2, 50)]) == 100  # one point: rho_1 * y_1, unweighted
    assert aup([(1, 80), (2, 75)]) > 80  # exactly 5 below is kept
    assert aup([(1, 80), (2, 74.9)]) == 80
    assert aup([(1, 0), (2, 0)]) == 0
    assert aup([(1, 60), (2, 60), (3, 60)]) == 180  # flat at the best: rho * y
    with pytest.raises(RCDError, match="at least one point"):
        aup([])


def test_aup_own_and_shared_by_hand() -> None:
    found = aup_all(
        {"good": [(1, 80), (2, 76), (4, 74)], "bad": [(1, 70), (2, 66), (3, 64)], "late": [(1, 74), (2, 76), (3, 70)]}
    )
    # y_max 80; W(76) = exp(-3 * 4/80) = 0.860708, W(74) = exp(-3 * 6/80) = 0.798516,
    #           W(70) = exp(-3 * 10/80) = 0.687289, W(66) = exp(-3 * 14/80) = 0.591555
    # shared cut: the highest y_1 is 80, so 75.
    # good: cut 75 in both forms; 80 + (80 + 76 * 0.860708) / 2 = 80 + (80 + 65.4138) / 2 = 152.7069
    assert found["good"]["own"] == found["good"]["shared"] == pytest.approx(152.7069, abs=1e-3)
    # bad: own cut 65 keeps 70 and 66;
    # 70 + (70 * 0.687289 + 66 * 0.591555) / 2 = 70 + (48.1102 + 39.0426) / 2 = 113.5764
    assert found["bad"]["own"] == pytest.approx(113.5764, abs=1e-3)
    assert found["bad"]["shared"] == 0  # nothing reaches 75
    # late: own cut 69 keeps all; 74 + (74 * 0.798516 + 65.4138) / 2 + (65.4138 + 48.1102) / 2 = 74 + 62.2520 + 56.7620
    assert found["late"]["own"] == pytest.approx(193.0140, abs=1e-3)
    # only (2, 76) is kept, and since a slower point was lost its y is weighted: 2 * 65.4138
    assert found["late"]["shared"] == pytest.approx(130.8276, abs=1e-3)


def test_a_better_curve_never_has_a_smaller_shared_aup() -> None:
    best = [(1.0, 80.0), (2.0, 80.0)]
    worse, better = ([(1.0, y), (2.0, 76.0)] for y in (74.0, 76.0))
    assert aup_all({"a": best, "b": worse})["b"]["shared"] < aup_all({"a": best, "b": better})["b"]["shared"]


def test_paired_and_mcnemar() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 0) == 2 / 32
    assert mcnemar(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert mcnemar(3000, 2000) < 1e-40 and mcnemar(10_000, 0) == 0.0  # neither overflows
    a, b = np.array([1, 1, 0, 0, 0, 0, 1, 0, 0, 0]), np.array([1, 0, 1, 1, 1, 0, 1, 0, 0, 0])
    found = paired(a, b)
    # Bonett and Price: (3 - 1) / 12 = 0.166667, se sqrt((4 / 12 + 2 / 12 - 0.027778) / 12) = 0.198373
    assert (found["gained"], found["lost"], found["p"]) == (3, 1, pytest.approx(2 * 5 / 16))
    assert [found[key] for key in ("difference", "low", "high")] == pytest.approx([20, -22.214, 55.547], abs=1e-3)
    with pytest.raises(RCDError, match="same items"):
        paired([True], [True, False])


@pytest.mark.parametrize(
    ("gained", "lost", "items", "expected"),
    [
        # m = 0, se = sqrt((2 / 12) / 12) = 0.117851
        (0, 0, 10, (-0.230984, 0.230984)),
        # one item that is gained: m = 1 / 3, se = sqrt((3 / 3 - 1 / 9) / 3) = 0.544331, cut at 1
        (1, 0, 1, (-0.733536, 1.0)),
        # m = -6 / 23 = -0.260870, se = sqrt((10 / 23 - 0.068053) / 23) = 0.126273
        (1, 7, 21, (-0.508359, -0.013380)),
    ],
)
def test_an_interval_of_few_or_equal_answers_by_hand(
    gained: int, lost: int, items: int, expected: tuple[float, float]
) -> None:
    d = np.array([1.0] * gained + [-1.0] * lost + [0.0] * (items - gained - lost))
    assert smoothed(d) == pytest.approx(expected, abs=1e-5)


def test_with_many_items_the_interval_is_the_plain_one() -> None:
    d = np.array([1.0] * 240 + [-1.0] * 180 + [0.0] * 1580)
    reach = 1.96 * d.std(ddof=1) / math.sqrt(2000)
    assert 100 * np.array(smoothed(d)) == pytest.approx(100 * np.array([0.03 - reach, 0.03 + reach]), abs=0.05)


@pytest.mark.parametrize(("items", "gain", "loss"), [(5, 0.1, 0.1), (12, 0.3, 0.05), (40, 0.02, 0.02), (40, 0.3, 0.1)])
def test_paired_intervals_cover_the_truth_with_few_items_too(items: int, gain: float, loss: float) -> None:
    draw, trials = np.random.default_rng(0), 2000
    d = draw.choice([1.0, -1.0, 0.0], p=[gain, loss, 1 - gain - loss], size=(trials, items))
    ends = [smoothed(row) for row in d]
    assert sum(low <= gain - loss <= high for low, high in ends) / trials > 0.94


def test_samples_of_an_item_count_by_their_share() -> None:
    found = paired([0.5, 0.25, 1.0], [0.75, 0.25, 0.5])
    assert found["difference"] == pytest.approx(-100 / 12) and (found["gained"], found["lost"]) == (1, 1)
    assert found["low"] < found["difference"] < found["high"]


def test_tokens_per_step_is_a_ratio_of_sums() -> None:
    point = Point(0.9, np.array([True, False]), np.array([10, 90]), np.array([10, 10]))
    assert point.tokens_per_step == 5.0 and point.accuracy == 50.0
    with pytest.raises(RCDError, match="at least one step"):
        Point(0.9, np.array([True]), np.array([1]), np.array([0]))


def test_matched_interpolates() -> None:
    base = sweep("base", [(1, 80), (2, 60), (4, 20)])
    other = sweep("other", [(1, 80), (3, 70), (5, 60)])
    found = matched(base, other, resamples=50)
    assert found["shared"] == [1, 4]
    assert found["range"] == pytest.approx([1, 3], abs=0.01)  # y_base >= 40 up to rho 3
    assert len(found["points"]) == 9
    at_two = matched(base, other, [1.5, 2.0, 3.0], resamples=50)["points"]
    # other: 80 - 5 (rho - 1); base: 80 - 20 (rho - 1): 15 (rho - 1) apart
    assert [row["difference"] for row in at_two] == pytest.approx([7.5, 15, 30])
    assert found["mean"]["difference"] == pytest.approx(15, abs=0.1)
    assert all(row["low"] <= row["difference"] <= row["high"] for row in at_two)
    with pytest.raises(RCDError, match="outside"):
        matched(base, other, [4.5])


def test_identical_sweeps_differ_by_nothing_and_few_items_leave_doubt() -> None:
    draw = np.random.default_rng(1)
    points = [Point(t, draw.random(80) < t, draw.integers(5, 40, 80), draw.integers(1, 9, 80)) for t in (0.5, 0.7, 1.0)]
    base = Sweep("a", [str(k) for k in range(80)], ["words"] * 80, points)
    found = matched(base, base, resamples=200)
    for row in [*found["points"], found["mean"]]:
        assert row["difference"] == 0 and -6 < row["low"] < 0 < row["high"] < 6
    three = replace(base, items=base.items[:3], tasks=base.tasks[:3], points=[_first(point, 3) for point in points])
    mean = matched(three, three)["mean"]
    assert mean["difference"] == 0 and mean["low"] < -20 and mean["high"] > 20
    one = one_token(base, base)
    assert one is not None and one["difference"] == 0 and speedup(base, base, 1.0) == 1.0


def test_no_shared_range_is_said() -> None:
    found = matched(sweep("a", [(1, 50), (2, 40)]), sweep("b", [(3, 50), (4, 40)]), resamples=10)
    assert found == {"shared": None, "range": None, "points": [], "mean": None}


def noisy(draw: np.random.Generator, items: int, gain: float) -> tuple[Sweep, Sweep]:
    """Both with rho about 1, 2, 3, 5 and the truth y = 80, 70, 60, 40; the other's is `gain` points higher."""
    names, ease, length = [str(k) for k in range(items)], draw.random(items), draw.integers(30, 90, items)
    made = []
    for lift in (0.0, gain):
        points = []
        for rho, y in ((1, 80), (2, 70), (3, 60), (5, 40)):
            # the items' ease is shared by both models, and some luck is not
            right = np.where(draw.random(items) < 0.5, ease, draw.random(items)) < (y + lift) / 100
            steps = np.maximum(1, draw.poisson(length / rho)) if rho > 1 else length
            points.append(Point(1 / rho, right, length, steps))
        made.append(Sweep(f"lift {lift}", names, ["words"] * items, points))
    return made[0], made[1]


def test_the_interval_covers_the_truth() -> None:
    draw, gain, trials = np.random.default_rng(0), 6.0, 200
    hits = {"point": 0, "mean": 0}
    for trial in range(trials):
        base, other = noisy(draw, 150, gain)
        found = matched(base, other, [2.5], resamples=200, seed=trial)
        for key, row in (("point", found["points"][0]), ("mean", found["mean"])):
            hits[key] += row["low"] <= gain <= row["high"]
    # 95% of 200 is 190, with a standard deviation of 3
    assert 180 <= hits["point"] <= 199 and 180 <= hits["mean"] <= 199, hits


def test_the_bootstrap_follows_its_seed() -> None:
    base, other = noisy(np.random.default_rng(3), 100, 5.0)
    assert matched(base, other, resamples=300, seed=1) == matched(base, other, resamples=300, seed=1)
    assert matched(base, other, resamples=300, seed=1) != matched(base, other, resamples=300, seed=2)


def test_one_token_is_threshold_1() -> None:
    found = one_token(sweep("a", [(1, 70), (3, 90)]), sweep("b", [(1, 75), (2, 90)]))
    assert found is not None
    assert (found["base"], found["other"], found["difference"]) == (70, 75, pytest.approx(5))
    without = sweep("c", [(1, 70), (2, 80)])
    assert one_token(sweep("a", [(1, 70), (3, 90)]), replace(without, points=without.points[1:])) is None
    assert found["p"] == pytest.approx(2 / 32)  # five gained, none lost


def test_speedup() -> None:
    base = sweep("base", [(1, 78), (2, 80), (3, 70)])
    other = sweep("other", [(1, 82), (2, 84), (4, 76), (5, 60)])
    # other falls from 84 to 76 between 2 and 4: 80 at 3; the base has its best at 2
    assert speedup(base, other) == pytest.approx(3 / 2)
    # one point less: 79 at 3.25; the base has 79 at 2.1
    assert speedup(base, other, 1.0) == pytest.approx(3.25 / 2.1)
    assert speedup(other, base) is None
    assert speedup(base, sweep("flat", [(1, 80), (6, 80)])) == pytest.approx(3)
    assert speedup(base, base) == speedup(base, base, 1.0) == 1.0


def test_different_items_are_refused() -> None:
    base, other = sweep("a", [(1, 80)]), sweep("b", [(1, 80)], first=1)
    for compare in (matched, one_token, speedup):
        with pytest.raises(RCDError, match="different items"):
            compare(base, other)


def test_points_over_other_items_are_refused() -> None:
    point = Point(0.9, np.array([True]), np.array([1]), np.array([1]))
    with pytest.raises(RCDError, match="same items"):
        Sweep("a", ["x", "y"], ["words"] * 2, [point])
    with pytest.raises(RCDError, match="no points"):
        Sweep("a", ["x"], ["words"], [])


def test_only_one_task() -> None:
    points = [Point(0.9, np.array([1, 0, 1]), np.array([4, 5, 6]), np.array([1, 2, 3]), 1.0, ["a", "b", "c"])]
    part = Sweep("a", ["x", "y", "z"], ["words", "sudoku", "words"], points).only("words")
    assert part.items == ["x", "z"] and part.points[0].tokens.tolist() == [4, 6] and part.points[0].texts == ["a", "c"]
    assert part.mix == "words" and math.isclose(part.points[0].accuracy, 100)
    with pytest.raises(RCDError, match="no items of 'sums'"):
        part.only("sums")


def test_savings_by_hand() -> None:
    base = sweep("base", [(1, 80), (2, 80), (4, 60)])
    other = sweep("other", [(1, 90), (4, 80), (6, 60)])
    found = savings(base, other, resamples=50)
    best, less, slow = (found["steps"][name] for name in ("best", "best - 1", "one token"))
    assert (best["accuracy"], best["base"], best["other"], best["ratio"]) == (80, 2, 4, 2)
    assert less["base"] == pytest.approx(2.1) and less["other"] == pytest.approx(4.1)  # a twentieth of the way down
    assert slow == best, "here the slowest point is the best"
    assert best["low"] <= best["ratio"] <= best["high"]
    areas = aup_all({"base": base.curve, "other": other.curve})
    for form, row in found["aup"].items():
        assert (row["base"], row["other"]) == (areas["base"][form], areas["other"][form])
        assert row["ratio"] == (row["other"] / row["base"] if row["base"] else None)

    never = savings(other, base, resamples=50)["steps"]["best"]
    assert never["other"] is None and never["ratio"] == 0
    alone = savings(base, base, resamples=50)
    assert all(row["low"] == row["ratio"] == row["high"] == 1 for row in alone["steps"].values())
    nothing = sweep("nothing", [(1, 0), (2, 0)])
    assert savings(nothing, base, resamples=5)["aup"]["own"]["ratio"] is None
    assert "one token" not in savings(replace(base, points=base.points[1:]), other, resamples=5)["steps"]


def test_equal_tokens_per_second_are_matched_as_tokens_per_step_are() -> None:
    base, other = sweep("base", [(1, 90), (4, 50)]), sweep("other", [(1, 95), (4, 70)])
    slow, fast = ([point.steps / 100 for point in each.points] for each in (base, other))  # a step takes 10 ms
    found = matched_speed(timed(base, slow), timed(other, fast), resamples=50)
    by_steps = matched(base, other, resamples=50)
    assert found["range"] == pytest.approx([100 * end for end in by_steps["range"]])
    assert [row["tokens_per_second"] for row in found["points"]] == pytest.approx(
        [100 * row["tokens_per_step"] for row in by_steps["points"]]
    )
    assert found["mean"]["difference"] == pytest.approx(by_steps["mean"]["difference"])
    twice = matched_speed(timed(base, slow), timed(base, [2 * each for each in slow]), resamples=50)
    assert twice["mean"]["difference"] < 0, "the same answers, slower, are worse at equal speed"
