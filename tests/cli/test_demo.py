"""`rcd demo` as a newcomer meets it, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rcd.cli.main import app
from rcd.errors import RCDError
from rcd.models import bundled


def demo(*args: str, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["demo", "--problems", "4", "--seed", "3", *args])
    assert result.exception is None, result.output
    return result.output


def refused(*args: str) -> str:
    result = CliRunner().invoke(app, ["demo", *args])
    assert isinstance(result.exception, RCDError)
    return str(result.exception)


@pytest.mark.parametrize("models", ["sdar", "llada"])
def test_json_is_one_object_with_both_sides(models: str) -> None:
    first, second = (json.loads(demo("--json", "--set", models)) for _ in range(2))
    for side in ("seqd", "rcd"):
        assert set(first[side]) == {"accuracy", "tokens_per_step", "problems", "seconds"}
        assert first[side]["problems"] == 4 and 0 <= first[side]["accuracy"] <= 1
        for figure in ("accuracy", "tokens_per_step"):  # the same seed, the same problems and answers
            assert first[side][figure] == second[side][figure]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_it_fits_the_terminal_and_writes_its_picture(columns: int, tmp_path: Path) -> None:
    output = demo("--picture", str(tmp_path / "it.png"), columns=columns)
    assert "SeqD" in output and "RCD" in output and "tokens/step" in output and "--seed 3" in output
    assert max(map(len, output.splitlines())) <= columns
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_piped_output_is_plain_text(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rcd", "demo", "--problems", "2", "--picture", str(tmp_path / "it.svg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
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
