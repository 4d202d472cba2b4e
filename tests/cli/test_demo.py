"""`rcd demo` as a newcomer meets it, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import rcd
from rcd.cli import demo as cli
from rcd.cli.live import SHADES, Canvas, counted, shade
from rcd.cli.main import app
from rcd.data.tasks.base import problem
from rcd.errors import RCDError
from rcd.evaluate import plots
from rcd.evaluate.points import Point, Sweep
from rcd.evaluate.statistics import wilson
from rcd.models import bundled
from tests.processes import finish


def demo(*args: str, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["demo", "--problems", "4", "--seed", "3", *args])
    assert result.exception is None, result.output
    return result.output


def refused(*args: str) -> str:
    result = CliRunner().invoke(app, ["demo", *args])
    assert isinstance(result.exception, RCDError)
    return str(result.exception)


def sweep(name: str, faster: float, count: int = 40) -> Sweep:
    """Right answers become fewer as steps do, with the thresholds of the demo."""
    shares = {0.8: (7.0, 0.3), 0.9: (6.0, 0.6), 0.95: (5.0, 0.8), 0.99: (4.0, 0.9)}
    points = [
        Point(at, np.arange(count) < share * count, np.full(count, 42 * 10), np.full(count, 420 / (faster * speed)))
        for at, (speed, share) in shares.items()
    ]
    return Sweep(name, [f"sudoku test {k}" for k in range(count)], ["sudoku"] * count, points)


def report(columns: int, count: int = 40) -> str:
    console = Console(file=io.StringIO(), width=columns)
    cli._report(console, {"seqd": sweep("SeqD", 1.0, count), "rcd": sweep("RCD", 1.1, count)}, 0.9)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("models", cli.SETS)
def test_json_is_one_object_with_both_sides(models: str) -> None:
    first, second = (json.loads(demo("--json", "--set", models)) for _ in range(2))
    for side in ("seqd", "rcd"):
        assert set(first[side]) == {"accuracy", "low", "high", "tokens_per_step", "problems", "seconds"}
        assert first[side]["problems"] == 4
        low, high = wilson(round(4 * first[side]["accuracy"]), 4)
        assert (first[side]["low"], first[side]["high"]) == (round(low, 4), round(high, 4))
        for figure in ("accuracy", "tokens_per_step"):  # the same seed, the same problems and answers
            assert first[side][figure] == second[side][figure]
    found = first["difference"]
    assert found["points"] == pytest.approx(100 * (first["rcd"]["accuracy"] - first["seqd"]["accuracy"]), abs=0.01)
    assert -100 <= found["low"] <= found["points"] <= found["high"] <= 100


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_it_fits_the_terminal_and_writes_its_picture(columns: int, tmp_path: Path) -> None:
    output = demo("--picture", str(tmp_path / "it.png"), columns=columns)
    assert "SeqD" in output and "RCD" in output and "tokens/step" in output and "--seed 3" in output
    assert "not even mirrored" in " ".join(output.split()) and "templates" not in output
    text = [line for line in output.splitlines() if not line.startswith("rcd generate ")]  # whole, to be pasted
    assert len(output.splitlines()) == len(text) + 2 and max(map(len, text)) <= columns
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_both_are_compared_at_equal_tokens_per_step(columns: int) -> None:
    first, second, verdict = report(columns).split("\n\n")
    assert first.startswith("At threshold 0.9\n") and " 60.0% " in first and " 45-74% " in first
    rows = [line.split() for line in second.splitlines()[2:]]
    places = [float(row[0]) for row in rows]
    assert len(rows) == 4 and places == sorted(places) and places[0] > 4.4 and places[-1] < 7.0
    for _, base, other, difference, low, _, high in rows:
        assert float(difference) == pytest.approx(float(other[:-1]) - float(base[:-1]), abs=0.11)
        assert float(low) <= float(difference) <= float(high)
    assert "points more than SeqD" in verdict.replace("\n", " ")
    assert max(map(len, report(columns).splitlines())) <= columns


@pytest.mark.parametrize(("count", "words"), [(1, "1 problem can"), (8, "8 problems can")])
def test_few_problems_get_no_verdict(count: int, words: str) -> None:
    _, second, verdict = report(80, count).split("\n\n")
    assert "difference" in second and " to " not in second
    assert verdict.startswith(words)


def test_numbers_in_the_picture_touch_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(plots, "_written", lambda figure, axes, path: kept.append(axes))
    plots.frontier([sweep("SeqD", 1.0), sweep("close", 1.003), sweep("RCD", 1.05)], tmp_path / "it.png")
    boxes = [text.get_window_extent() for text in kept[0].texts]
    assert len(boxes) >= 8
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    for line in kept[0].lines:
        path = line.get_path().transformed(line.get_transform())
        assert not any(path.intersects_bbox(box, filled=False) for box in boxes)


def test_the_strongest_residual_has_the_darkest_shade() -> None:
    capped = rcd.Residual(alpha_scale=4, alpha_most=0.25)
    assert [shade(alpha, capped.strongest)[0] for alpha in (0.0, 0.01, 0.1, 0.15, 0.25)] == list(SHADES)
    assert rcd.Residual().strongest == 1.0
    assert rcd.Residual(alpha="fixed", alpha_value=0.3).strongest == rcd.Residual(alpha_scale=0.3).strongest == 0.3
    assert shade(0.0, rcd.Residual(alpha_most=0).strongest)[0] == SHADES[0]
    model = rcd.load("bundled:llada-rcd", device="cpu")
    canvas, seen = Canvas(model, model.resolve().travelling.strongest), ""
    for event in model.stream(problem("sudoku", "test", 0).question):
        if isinstance(event, rcd.Step):
            canvas.see(event)
        seen += canvas.text().plain
    assert SHADES[-1] in seen


@pytest.mark.parametrize("models", cli.SETS)
def test_the_last_lines_are_commands_that_work_as_they_stand(models: str) -> None:
    shown = problem(cli.SETS[models][0], "test", 0, seed=5)
    answers = []
    for command in cli._own_problems(models, shown, 5):
        name, *verb = shlex.split(command)
        assert name == "rcd" and "\n" not in command
        result = CliRunner().invoke(app, [*verb, "--device", "cpu"])
        assert result.exit_code == 0 and "note" not in result.stderr
        answers.append(result.stdout)
    assert answers[0].count("/") == 5 and "Answer: " in answers[1]


def test_a_sudoku_is_shown_as_a_grid() -> None:
    title, *rows = cli._question(problem("sudoku", "test", 0)).splitlines()
    assert len(title) < 60 and [len(row.split()) for row in rows] == [6] * 6
    words = problem("words", "test", 0)
    assert cli._question(words) == words.question


def test_one_is_not_many() -> None:
    assert [counted(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_piped_output_is_plain_text(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rcd", "demo", "--problems", "2", "--picture", str(tmp_path / "it.svg")]
    done = finish(command)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "Traceback" not in done.stderr
    assert (tmp_path / "it.svg").is_file()


def test_problems_are_new_by_default() -> None:
    runner = CliRunner()
    seeds = {json.loads(runner.invoke(app, ["demo", "--json", "--problems", "1"]).output)["seed"] for _ in range(3)}
    assert len(seeds) > 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--problems", "0"], "problems must be"),
        (["--problems", "1000000"], "problems must be"),
        (["--set", "lada"], "did you mean 'llada'"),
        (["--threshold", "2"], r"threshold must be in [0, 1]"),
        (["--seed", "-1"], "seed must be"),
        (["--picture", "it.doc"], ".png or .svg"),
        (["--picture", "/no/such/folder/it.png"], "a folder that exists"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], words: str) -> None:
    text = refused(*args)
    assert words in text and "\n" not in text


def test_an_unwritable_picture_is_noticed_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundled, "ASSETS", tmp_path / "none")  # loading would be the first work
    (tmp_path / "folder.png").mkdir()
    for name in ("folder.png", "long" * 100 + ".png"):
        text = refused("--picture", str(tmp_path / name))
        assert "cannot be written" in text and "--picture" in text and "\n" not in text
    good = tmp_path / "it.png"
    assert "not in this installation" in refused("--picture", str(good))
    assert not good.exists()
    good.write_text("as it was")
    refused("--picture", str(good))
    assert good.read_text() == "as it was"
    if os.geteuid() != 0:  # root may write everywhere
        tmp_path.chmod(0o500)
        assert "cannot be written" in refused("--picture", str(tmp_path / "new.png"))
        tmp_path.chmod(0o700)


def test_a_default_picture_that_cannot_be_written_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rcd-demo.png").mkdir()
    result = CliRunner().invoke(app, ["demo", "--problems", "1"])
    assert result.exit_code == 0
    assert "rcd: note: no picture" in result.stderr and "is drawn in" not in result.stdout


def test_without_the_assets_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundled, "ASSETS", tmp_path)
    assert "not in this installation" in refused()
    (tmp_path / "manifest.json").write_text((Path(bundled.__file__).parents[1] / "assets/manifest.json").read_text())
    assert "is missing" in refused()


def test_a_changed_asset_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(bundled.ASSETS, tmp_path / "assets")
    monkeypatch.setattr(bundled, "ASSETS", tmp_path / "assets")
    weights = tmp_path / "assets" / "llada-rcd" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "checksum differs" in refused()
    with pytest.raises(RCDError, match="unknown bundled model 'lada-rcd'"):
        bundled.folder_of("lada-rcd")


def test_the_page_prints_no_results() -> None:
    assert "leave --json" in refused("--web", "--json")
