"""The sweep on a toy model, its file, and the comparison of two."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rcd.api import Pipeline
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate import sweep as module
from rcd.evaluate.plots import curves, frontier
from rcd.evaluate.statistics import matched
from rcd.evaluate.sweep import THRESHOLDS, Point, Sweep, compare, lines, run_point, run_sweep
from rcd.models.toy import toy_tokenizer
from tests.conftest import exact

QUESTIONS = ("the cat sees one dog", "two", "a red fox runs over the old hill near the sea", "snow and rain", "why ?")
CONFIG = DecodeConfig(max_new_tokens=16)


def problem(name: str, question: str, task: str = "words") -> Any:
    return SimpleNamespace(task=task, name=name, question=question, solution="Answer: 4", answer="4")


PROBLEMS = [problem(f"p{k}", question) for k, question in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return exact("sdar", tokenizer=toy_tokenizer(128))


def fake(name: str, lift: float, seed: int = 0) -> Sweep:
    draw, items = np.random.default_rng(seed), 120
    points = [
        Point(
            t,
            draw.random(items) < 0.3 + 0.4 * t + lift,
            np.full(items, 40),
            draw.integers(int(30 * t), int(50 * t), items),
            2.0,
        )
        for t in (0.5, 0.7, 0.9, 1.0)
    ]
    return Sweep(name, [f"p{k}" for k in range(items)], ["words", "sudoku"] * (items // 2), points, {"block_length": 8})


def test_results_stand_in_the_order_of_the_problems(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "grade", lambda item, text: item.name in ("p1", "p4"))
    point = run_point(pipeline, PROBLEMS, CONFIG, batch=2)
    alone = [pipeline.generate(item.question, CONFIG).results[0] for item in PROBLEMS]
    assert point.texts == [answer.text for answer in alone]
    assert point.tokens.tolist() == [answer.tokens for answer in alone]
    assert point.steps.tolist() == [answer.counts.denoising for answer in alone]
    assert point.right.tolist() == [False, True, False, False, True]
    assert point.threshold == 0.85 and point.seconds > 0


def test_the_batch_changes_nothing_even_when_sampling(pipeline: Pipeline) -> None:
    warm = DecodeConfig(max_new_tokens=8, temperature=1.0, seed=5)
    assert run_point(pipeline, PROBLEMS, warm, batch=2).texts == run_point(pipeline, PROBLEMS, warm, batch=5).texts


def test_start_passes_are_counted(pipeline: Pipeline) -> None:
    config = DecodeConfig(max_new_tokens=16, carry=Residual(start="self"))
    point = run_point(pipeline, PROBLEMS, config)
    counts = [pipeline.generate(item.question, config).results[0].counts for item in PROBLEMS]
    assert all(each.start > 0 for each in counts)
    assert point.steps.tolist() == [each.denoising + each.start for each in counts]


def test_a_sweep(pipeline: Pipeline) -> None:
    heard: list[str] = []
    found = run_sweep(pipeline, iter(PROBLEMS), (0.5, 1.0), CONFIG, name="toy", batch=3, say=heard.append)
    assert [point.threshold for point in found.points] == [0.5, 1.0]
    assert found.items == ["p0", "p1", "p2", "p3", "p4"] and found.mix == "words"
    assert found.points[-1].threshold == 1.0 and found.points[-1].tokens_per_step <= 1.0
    assert found.settings["max_new_tokens"] == 16 and found.settings["block_length"] == 8
    assert len(heard) == 2 and heard[0].startswith("toy: threshold 0.5")
    json.dumps(found.settings)
    assert THRESHOLDS[-1] == 1.0


def test_bad_sweeps_are_refused(pipeline: Pipeline) -> None:
    with pytest.raises(RCDError, match="no problems"):
        run_sweep(pipeline, [], name="toy")
    with pytest.raises(RCDError, match="no points"):
        run_sweep(pipeline, PROBLEMS, (), name="toy")
    with pytest.raises(RCDError, match="threshold"):
        run_sweep(pipeline, PROBLEMS, (0.5, 1.5), name="toy")
    with pytest.raises(RCDError, match="batch"):
        run_point(pipeline, PROBLEMS, CONFIG, batch=0)


def test_save_and_load(tmp_path: Path, pipeline: Pipeline) -> None:
    made = run_sweep(pipeline, PROBLEMS, (0.5, 1.0), CONFIG, name="toy")
    path = made.save(tmp_path / "deep" / "sweep.jsonl")
    again = Sweep.load(path)
    assert (again.name, again.items, again.tasks, again.settings) == (made.name, made.items, made.tasks, made.settings)
    assert again.digest == made.digest != ""
    for old, new in zip(made.points, again.points, strict=True):
        assert (old.threshold, old.seconds, old.texts) == (new.threshold, new.seconds, new.texts)
        for name in ("right", "tokens", "steps"):
            assert getattr(old, name).tolist() == getattr(new, name).tolist()
            assert getattr(old, name).dtype == getattr(new, name).dtype
    assert json.loads(path.read_text().splitlines()[0])["mix"] == "words"
    assert again.save(tmp_path / "twice.jsonl").read_text() == path.read_text()


def test_a_damaged_file_is_named_by_its_line(tmp_path: Path) -> None:
    rows = fake("a", 0.0).save(tmp_path / "whole.jsonl").read_text().splitlines()
    short = json.dumps({**json.loads(rows[2]), "right": [1, 0]})
    bare = json.dumps({key: value for key, value in json.loads(rows[2]).items() if key != "steps"})
    for text, line in (
        ("", 1), ("[]", 1), ("{}", 1), ("\n".join([rows[0], rows[1][:50]]), 2), ("\n".join(rows[:3]), 4),
        ("\n".join([*rows[:2], short, *rows[3:]]), 3), ("\n".join([*rows[:2], bare, *rows[3:]]), 3),
        ("\n".join([*rows[:2], "null", *rows[3:]]), 3),
    ):  # fmt: skip
        path = tmp_path / "damaged.jsonl"
        path.write_text(text)
        with pytest.raises(RCDError, match=rf"^line {line} of .*damaged"):
            Sweep.load(path)
    with pytest.raises(RCDError, match="cannot be read"):
        Sweep.load(tmp_path / "nothing.jsonl")


def test_compare_collects_everything() -> None:
    base, other = fake("SeqD", 0.0), fake("RCD", 0.1, seed=1)
    found = compare(base, other, resamples=100)
    assert json.loads(json.dumps(found)) == found
    assert set(found["tasks"]) == {"words", "sudoku"} and found["tasks"]["words"]["items"] == 60
    for part in (found["all"], *found["tasks"].values()):
        assert set(part) == {"items", "curves", "best", "one_token", "matched", "aup", "speedup"}
        assert set(part["aup"]) == {"base", "other", "ratio"} and set(part["speedup"]) == {"0", "1"}
    words = found["tasks"]["words"]["matched"]
    assert words == matched(base.only("words"), other.only("words"), resamples=100)
    text = lines(found)
    assert text[0].startswith("RCD against SeqD") and any("AUP (shared cut)" in line for line in text)
    assert all(len(line) < 120 for line in text)
    assert any(re.search(r"speedup +SeqD's best accuracy: x \d\.\d+, 1 point less: x", line) for line in text)
    assert any("RCD's best accuracy: not reached" in line for line in lines(compare(other, base, resamples=100)))


def test_compare_without_a_common_range_or_a_right_answer() -> None:
    def flat(name: str, steps: int) -> Sweep:
        point = Point(1.0, np.zeros(4), np.full(4, 12), np.full(4, steps))
        return Sweep(name, list("abcd"), ["words"] * 4, [point])

    found = compare(flat("a", 12), flat("b", 6))
    assert found["all"]["matched"]["mean"] is None and found["all"]["aup"]["ratio"] == {"own": None, "shared": None}
    assert any("no useful range" in line for line in lines(found))


def test_compare_refuses_other_items() -> None:
    base = fake("a", 0.0)
    with pytest.raises(RCDError, match="different items"):
        compare(base, replace(base, items=[f"q{k}" for k in range(120)]))
    with pytest.raises(RCDError, match="different items"):
        compare(base, replace(base, digest="of another seed, under the same names"))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = frontier([fake("SeqD", 0.0), fake("RCD", 0.1)], tmp_path / f"frontier.{suffix}", "words")
    other = curves({"SeqD": [(0, 0), (20_000, 50)]}, tmp_path / "new" / f"curves.{suffix}", title="training")
    assert path.stat().st_size > 5000 and other.stat().st_size > 5000


def test_bad_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RCDError, match="suffix"):
        curves({"a": [(0, 0)]}, tmp_path / "a.gif")
    with pytest.raises(RCDError, match="nothing to draw"):
        frontier([], tmp_path / "a.png")
