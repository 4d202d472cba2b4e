"""The page of a sweep: what it says, that it needs nothing else, and that no text can become markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rcd.carry.base import Carry
from rcd.carry.none import NoCarry
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate import browse, charts, report
from rcd.evaluate.campaign import Entry, Grid, Line, Place
from rcd.evaluate.evaluation import interval
from rcd.evaluate.findings import PAPER, details, failed, findings, more_points, steps_told, verdict
from rcd.evaluate.points import Point, Sweep
from rcd.evaluate.records import Record
from rcd.evaluate.sweep import lines as compared
from rcd.evaluate.tables import page as markdown

EVIL = '</script><img src=x onerror=alert(1)> & \u2028 "it\'s"'
THRESHOLDS = (0.5, 0.9, 1.0)


def line(
    name: str,
    lift: float,
    items: int = 120,
    speed: float = 1.0,
    text: str = "Answer: 4",
    task: str = "words",
    seed: int = 0,
    carry: Carry | None = None,
) -> Line:
    draw, points, records, figures = np.random.default_rng(seed), list[Point](), list[list[Record]](), []
    for threshold in THRESHOLDS:
        right = draw.random(items) < 0.3 + 0.4 * threshold + lift
        steps = np.full(items, max(1, round(40 * threshold**3 / speed)))
        points.append(Point(threshold, right, np.full(items, 40), steps, 2.0))
        rows = [
            Record(f"{task} {k}", 0, task, f"{k} {text}", text, "4", bool(right[k]), 40, int(steps[k]), 50, 0.01, "eos")
            for k in range(items)
        ]
        records.append(rows)
        low, high = interval([float(each) for each in right], one_each=True)
        figures.append(
            {"low": low, "high": high, "tokens_per_second": 99.0, "tokens": 40.0, "cut_off": 0.0, "seconds": 2.0}
        )
    settings = {
        "model": f"toy/{name}", "model_fingerprint": "ab", "task": task, "reference": None, "carry": {"name": "none"},
        "decode": {"seed": 0},
    }  # fmt: skip
    sweep = Sweep(name, [f"{task} {k}" for k in range(items)], [task] * items, points, settings, "x")
    return Line(Entry(name, f"toy/{name}", DecodeConfig(carry=carry or NoCarry())), sweep, records, figures)


def found_of(lines: list[Line], failures: dict[Place, str] | None = None, task: str = "words") -> dict[str, Any]:
    problems: list[Any] = lines[0].sweep.items if lines else [0] * 50
    entries = [each.entry for each in lines] or [Entry("lost", "toy/lost", DecodeConfig(carry=NoCarry()))]
    grid = Grid(entries, list(THRESHOLDS), task, problems, Path("out"))
    return findings(grid, lines, failures or {}, entries[0].name, resamples=100)


class Read(HTMLParser):
    """The tags, and what is inside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words = ""
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.is_data = dict(attrs).get("id") == "data"

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.data += data if self.is_data else ""
        else:
            self.words += data


def test_the_page_says_who_wins_and_holds_every_part() -> None:
    lines = [line("SeqD", 0.0), line("RCD", 0.2)]
    found = found_of(lines) | {"command": "rcd sweep --task 'a b'", "made": {"date": "today", "device": "CPU"}}
    words = Read(report.page(found, lines)).words
    assert found["summary"][0].startswith("RCD is better than SeqD by ") and found["summary"][0] in words
    for part in (
        "Accuracy over tokens per step", "At equal tokens per step", "Steps for the same accuracy", "AUP",
        "At equal tokens per second", "Every point", "Single answers", "Settings", "rcd sweep --task 'a b'", "noisy",
    ):  # fmt: skip
        assert part in words, part
    assert "By task" not in words and "Points that failed" not in words


def test_the_page_needs_no_other_file() -> None:
    lines = [line("SeqD", 0.0), line("RCD", 0.2)]
    text = report.page(found_of(lines), lines)
    assert not re.search(r"\b(src|href|action)=|https?:|@import|url\(|<link|<iframe", text)
    assert "default-src 'none'" in text and "prefers-color-scheme:dark" in text and "width=device-width" in text


def test_no_text_becomes_markup() -> None:
    lines = [replace(each, entry=replace(each.entry, name=each.sweep.name)) for each in
             (line(f"a<b>{k}</b>", 0.1 * k, text=EVIL) for k in range(2))]  # fmt: skip
    failures = {Place(1, 0.7): f"broken {EVIL}"}
    found = found_of(lines, failures, task="<i>task") | {"command": EVIL, "made": {"machine": EVIL}}
    text = report.page(found, lines)
    read = Read(text)
    assert not {"img", "i"} & set(read.tags) and read.tags.count("script") == 2
    assert read.tags.count("b") == 2, "the verdict and the failures, none of a name"
    data = json.loads(read.data)
    assert data["texts"] == [EVIL] and data["items"][3]["prompt"] == f"3 {EVIL}" and data["entries"][0] == "a<b>0</b>"
    assert "textContent" in text and "innerHTML" not in text


def test_several_tasks_and_a_failed_base() -> None:
    first, second = line("SeqD", 0.0), line("RCD", 0.2)
    mixed = [
        replace(each, sweep=replace(each.sweep, tasks=["words", "sudoku"] * (len(each.sweep.items) // 2)))
        for each in (first, second)
    ]
    assert "By task" in Read(report.page(found_of(mixed), mixed)).words
    uneven = [replace(each, sweep=replace(each.sweep, tasks=["words"] * 115 + ["sudoku"] * 5)) for each in mixed]
    assert found_of(uneven)["summary"][-1] == "5 items of sudoku are too few for these intervals."
    found = found_of([second], {Place(0, 0.5): "out of memory"})
    found |= {"base": "SeqD", "failures": [{"name": "SeqD", "threshold": t, "error": "no room."} for t in THRESHOLDS]}
    words = Read(report.page(found, [second])).words
    assert "SeqD at 0.5, 0.9, 1: no room." in words and "RCD has its best accuracy" in words
    nothing = found_of([], {Place(0, t): "no room." for t in THRESHOLDS})
    assert nothing["summary"] == ["3 of 3 points failed."]
    assert "lost at 0.5, 0.9, 1: no room." in Read(report.page(nothing, [])).words


def test_verdicts() -> None:
    base, better = line("SeqD", 0.0), line("RCD", 0.2)
    told = found_of([base, better])["summary"]
    assert re.fullmatch(
        r"RCD is better than SeqD by \d+\.\d points at equal tokens per step \(mean over 1\.00 to 8\.00, on 120 items "
        r"of words\); 95% interval \+\d+\.\d to \+\d+\.\d\.",
        told[0],
    )
    assert found_of([better, base])["summary"][0].startswith("SeqD is worse than RCD by ")
    same = found_of([base, replace(base, entry=better.entry, sweep=replace(base.sweep, name="RCD"))])["summary"]
    assert re.match(r"Neither wins: RCD differs from SeqD by \+0\.0 points .*interval -\d\.\d to \+\d\.\d", same[0])
    level = found_of([base, line("RCD", 0.0, seed=1)])["summary"][0]
    assert level.startswith("Undecided: RCD differs from SeqD by ") and "95% interval -" in level
    apart = found_of([base, line("RCD", 0.0, speed=20)])["summary"][0]
    assert "cannot be compared at equal tokens per step" in apart and "More thresholds" in apart
    assert found_of([base])["summary"][0].startswith("SeqD has its best accuracy, ")
    few = found_of([line("SeqD", 0.0, items=5), line("RCD", 0.2, items=5)])["summary"]
    assert few[0].startswith("Undecided: RCD differs from SeqD by ")
    assert few[-1] == "5 items are too few for these intervals."
    three = found_of([base, better, line("third", 0.1)])["summary"]
    assert len(three) == 3 and three[-1].startswith("Every interval is for its own comparison")


@pytest.mark.parametrize(("items", "lift"), [(1, 0.0), (1, 1.0), (3, -1.0), (3, 1.0)])
def test_few_items_all_right_or_all_wrong(items: int, lift: float) -> None:
    lines = [line("SeqD", 0.0, items=items), line("RCD", lift, items=items, seed=1)]
    for each in (lines, lines[::-1]):
        found = found_of(each)
        json.dumps(found, allow_nan=False)
        assert "nan" not in Read(report.page(found, each)).words


def test_the_steps_for_the_same_accuracy_in_words() -> None:
    (each,) = found_of([line("SeqD", 0.0), line("RCD", 0.2, carry=Residual())])["comparisons"]
    assert details(each)[0].startswith("From the slow end of that range to the fast one: +")

    def told(**row: Any) -> str:
        each["savings"]["steps"]["best"] = {"accuracy": 92.3, "base": 2.0, **row}
        return steps_told(each)

    paper = "the paper reports 4 to 5 times fewer."
    assert told(other=4.0, ratio=2.0, low=0.0, high=3.0) == (
        "For SeqD's best accuracy (92.3%) RCD needs 2.00 times fewer steps (95% interval up to 3.00; in some "
        f"resamples it is never reached); {paper}"
    )
    assert "needs 2.00 times more steps (95% interval 1.25 to 4.00)" in told(other=1.0, ratio=0.5, low=0.25, high=0.8)
    assert "needs equally many steps (95% interval 0.90 to 1.10)" in told(other=2.0, ratio=1.0, low=0.9, high=1.1)
    slow = "needs 2.00 times more steps (95% interval from 1.25; in some resamples it is never reached)"
    assert slow in told(other=1.0, ratio=0.5, low=0.0, high=0.8)
    assert told(other=None, ratio=0.0, low=0.0, high=1.0).startswith("RCD never reaches SeqD's best accuracy (92.3%); ")


def test_without_a_right_answer_there_is_nothing_to_match() -> None:
    lines = [line("SeqD", -1.0), line("RCD", 0.2, carry=Residual())]
    found = found_of(lines)
    (each,) = found["comparisons"]
    assert steps_told(each) == "SeqD has no right answer at any threshold, so there is no accuracy to match."
    assert not any("speedup" in text for text in compared(each))
    words = Read(report.page(found, lines)).words
    assert "no accuracy to match" in words and "Steps for the same accuracy" not in words


def test_the_papers_number_stands_only_beside_the_papers_comparison() -> None:
    """The paper compares a model without a residual with one that has it."""
    plain, other, ours = line("SeqD", 0.0), line("plain", 0.1), line("RCD", 0.2, carry=Residual())
    for pair, said in (((plain, ours), True), ((plain, other), False), ((ours, plain), False)):
        found = found_of(list(pair))
        words = Read(report.page(found, pair)).words
        assert (PAPER in steps_told(found["comparisons"][0])) is said and (PAPER in words) is said
        assert ("paper reports" in words) is said


def test_single_answers_are_kept_once_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = line("SeqD", 0.0, text="a"), line("RCD", 0.2, text="b")
    short = replace(second, sweep=replace(second.sweep, points=second.sweep.points[1:]), records=second.records[1:])
    data, shown = browse.items([first, short], {"items": 120})
    assert shown == 120 and data["texts"] == ["a", "b"] and data["answers"][1][0] is None, "a point that failed"
    differing = [
        sum(a[1] != b[1] for a, b in zip(one, two, strict=True)) if two else 0
        for one, two in zip(*data["answers"], strict=True)
    ]
    assert differing[data["first"]] == max(differing)
    monkeypatch.setattr(browse, "ITEMS", 7)
    assert browse.items([first], {"items": 120})[1] == 7
    monkeypatch.setattr(browse, "LETTERS", 100)
    assert 1 <= browse.items([first], {"items": 120})[1] < 7
    monkeypatch.setattr(browse, "LONG", 30)
    data, _ = browse.items([line("SeqD", 0.0, text="x" * 40 + "end")], {"items": 120})
    assert data["texts"] == [f"{'x' * 10}\n[... 13 letters ...]\n{'x' * 17}end"]
    assert browse._shown("sudoku", "Fill: 1 2 / 3 _") == "1 2\n3 _"


def test_failures_are_told_by_cause() -> None:
    rows = [{"name": "a", "threshold": t, "error": "no room."} for t in (1.0, 0.5)]
    rows.append({"name": "a", "threshold": 0.7, "error": "broken."})
    assert failed(rows) == ["a at 0.5, 1: no room.", "a at 0.7: broken."]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_charts_of_odd_points(share: float) -> None:
    at = {"setting": "threshold", "threshold": 1.0}
    point = {**at, "tokens_per_step": 1.0, "accuracy": 100 * share, "low": 100 * share, "high": 100 * share}
    drawn = charts.frontier([{"name": "a", "points": [point]}], 300, 200, "broad")
    assert "nan" not in drawn and "inf" not in drawn and "threshold 1: " in drawn


def test_ticks_are_round_and_hold_the_range() -> None:
    for low, high in ((0, 9.3), (12.1, 93), (0, 1.02), (99.2, 99.9), (50, 50)):
        ticks = charts._ticks(low, high, 5)
        assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 12
    assert charts._ticks(60, 100, 5, most=100.0)[-1] == 100


def test_the_page_is_written_whole_or_refused(tmp_path: Path) -> None:
    lines = [line("SeqD", 0.0)]
    found = found_of(lines)
    path = report.write(tmp_path / "report.html", found, lines)
    assert path.read_text(encoding="utf-8") == report.page(found, lines) and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(RCDError, match="cannot be written"):
        report.write(tmp_path / "nowhere" / "report.html", found, lines)


def test_the_same_as_markdown() -> None:
    lines = [line("SeqD", 0.0), line("RCD", 0.2)]
    found = found_of(lines)
    text = markdown("A title", {each.sweep.name: each.sweep for each in lines}, found["comparisons"], ["lost"])
    assert text.startswith(
        "# A title\n\nFailed or skipped: lost.\n\n| threshold | SeqD | RCD |\n|---|---|---|\n| 0.5 | "
    )
    assert "RCD against SeqD (differences in percentage points" in text
    assert verdict(found["comparisons"][0], found) == found["summary"][0]


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("entropy_bound", 0.1, "entropy_bound,entropy_bound=0.05/0.5."),
        ("entropy_bound", 0.0, "entropy_bound,entropy_bound=0.1/1."),
        ("num_inference_steps", None, "entropy_bound,num_inference_steps=4/8."),
        ("num_inference_steps", 4, "entropy_bound,num_inference_steps=2/8."),
        ("threshold", 0.9, "More thresholds may help."),
    ],
)
def test_a_single_point_is_told_what_makes_it_a_line(setting: str, value: float | None, advice: str) -> None:
    several = {"name": "a", "points": [{"setting": setting, "threshold": t} for t in (0.5, 1.0)]}
    single = {"name": "b", "points": [{"setting": setting, "threshold": value}], "decode": {"commit": "entropy_bound"}}
    told = more_points([several, single])
    assert told.endswith(advice) and ("b is a single point" in told) == (setting != "threshold")


def test_a_single_point_has_no_area_and_another_rule_is_not_the_papers_comparison() -> None:
    base, other = line("SeqD", 0.0), line("RCD", 0.2)
    single = replace(other, sweep=replace(other.sweep, points=other.sweep.points[:1]), records=other.records[:1],
                     figures=other.figures[:1])  # fmt: skip
    for lines, area in (([base, other], True), ([base, single], False)):
        found = found_of(lines)
        assert len(found["comparisons"][0]["all"]["matched"]["points"]) == (9 if area else 1)
        assert ("AUP" in Read(report.page(found, lines)).words.split("Every point")[0]) == area
    base, other = line("SeqD", 0.0, carry=NoCarry()), line("RCD", 0.2, carry=Residual())
    config = replace(other.entry.config, commit="klass")
    apart = replace(other, entry=replace(other.entry, config=config))
    told = [found_of([base, each])["comparisons"][0]["as_in_the_paper"] for each in (other, apart)]
    assert told == [True, False]
