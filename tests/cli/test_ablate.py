"""`rcd ablate`, `rcd calibrate` and `rcd recall` as a user meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rcd
from rcd.cli.main import app, main
from rcd.models.toy import toy, toy_tokenizer

SUDOKU = ["--task", "sudoku", "--limit", "2", "--device", "cpu"]


def call(*args: str) -> Any:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result


def png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("ablate") / "out"
    flags = ["--model", "bundled:sdar-rcd", "--grid", "0.5", "--output", str(output), "--json"]
    return output, json.loads(call("ablate", *flags, *SUDOKU).stdout)


def test_all_makes_every_table_with_its_figure(done: tuple[Path, dict[str, Any]]) -> None:
    output, found = done
    assert list(found) == ["alpha", "start", "t_res", "norms"]
    assert [len(found[what]["rows"]) for what in ("alpha", "start", "t_res")] == [8, 3, 2]
    assert all(png(output / f"{what}.png") for what in found)
    for what in ("alpha", "start", "t_res"):
        for row in found[what]["rows"]:
            assert (output / what / row["row"] / "records.jsonl").is_file()
            assert row["low"] <= row["accuracy"] <= row["high"] and row["tokens_per_step"] > 0
            assert (row["difference"] is None) == (row["row"] == found[what]["default"])
    mean = found["norms"]["mean"]
    assert mean["hidden"] > mean["token"] > mean["delta"] > 0  # the paper's argument against Loopholing
    assert json.loads((output / "norms" / "norms.json").read_text())["mean"] == mean


def test_a_table_is_read_in_the_terminal_and_goes_on(done: tuple[Path, dict[str, Any]]) -> None:
    output, found = done
    flags = ["--what", "alpha", "--model", "bundled:sdar-rcd", "--output", str(output)]
    result = call("ablate", *flags, *SUDOKU)
    assert "right" not in result.stderr  # nothing was answered again
    text = result.stdout.splitlines()
    assert text[0].startswith("alpha of bundled:sdar-rcd: 2 items of sudoku, threshold 0.85")
    assert text[2].startswith("entropy*") and len(text) == 13 and max(map(len, text[1:])) < 100
    assert text[-2] == "2 items are too few for these intervals." and "[+0.0, +0.0]" not in result.stdout
    share = 100 * found["alpha"]["rows"][0]["accuracy"]
    assert f"{share:.1f}%" in text[2]


def test_two_models_without_residual_training(tmp_path: Path) -> None:
    flags = ["--what", "alpha-reference", "--rows", "entropy,none", "--model", "bundled:sdar-seqd"]
    reference = ["--reference", "bundled:sdar-reference"]
    found = json.loads(call("ablate", *flags, *reference, "--output", str(tmp_path), "--json", *SUDOKU).stdout)
    first, last = found["alpha-reference"]["rows"]
    assert first["tokens_per_target_step"] == 2 * first["tokens_per_step"]
    assert last["tokens_per_target_step"] == last["tokens_per_step"] and last["carry"] == {"name": "none"}


def test_a_failed_row_ends_with_code_1(tmp_path: Path) -> None:
    (tmp_path / "start" / "self").mkdir(parents=True)
    (tmp_path / "start" / "self" / "run.json").write_text("{}")
    flags = ["--what", "start", "--model", "bundled:sdar-rcd", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["ablate", *flags, *SUDOKU])
    assert result.exit_code == 1 and "failed: " in result.stdout and "dirichlet" in result.stdout
    assert "no row of a reference without --reference" in result.stderr


def test_calibrate_says_what_to_do(tmp_path: Path) -> None:
    flags = ["--model", "bundled:sdar-rcd", *SUDOKU]
    text = call("calibrate", *flags).stdout
    assert text.startswith("T_res 1: bundled:sdar-rcd was trained on residuals of its own predictions")
    found = json.loads(call("calibrate", *flags, "--reference", "bundled:sdar-reference", "--json").stdout)
    assert 0.25 <= found["t_res"] <= 4 and found["trained_on"] == "its own predictions"
    assert found["after"]["distance"] <= found["before"]["distance"]
    text = call("calibrate", *flags, "--reference", "bundled:sdar-reference").stdout
    assert (
        f"T_res {found['t_res']:g}, 95% interval {found['low']:g} to {found['high']:g} (bootstrap over 2 items)" in text
    )
    assert text.count("2 items are too few for these intervals.") == 1
    assert f"--t-res {found['t_res']:g}" in text and f"--carry trained,t_res={found['t_res']:g}" in text
    assert "that is what it knows" in text


def test_recall_writes_its_figures(tmp_path: Path) -> None:
    flags = ["--model", "bundled:llada-seqd", "--k", "5,1", "--threshold", "0.9", "--output", str(tmp_path / "out")]
    result = call("recall", *flags, *SUDOKU)
    assert result.stdout.startswith("recall@k of bundled:llada-seqd: 2 items of sudoku, threshold 0.9")
    assert png(tmp_path / "out" / "recall.png") and png(tmp_path / "out" / "recall-all.png")
    found = json.loads(call("recall", *flags, *SUDOKU, "--json").stdout)
    assert found == json.loads((tmp_path / "out" / "recall.json").read_text()) and found["ks"] == [1, 5]
    assert found["steps"][0]["masks"] == 84  # two grids of 36 digits, 5 bars and an end


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("other") / "model"
    rcd.Pipeline(toy("sdar", tokenizer=toy_tokenizer(128))).save(path)
    return str(path)


BAD = {
    "what": (["ablate", "--what", "beta"], "choose from: all, alpha"),
    "row": (["ablate", "--what", "alpha", "--rows", "entrpy"], "did you mean 'entropy'"),
    "rows of all": (["ablate", "--rows", "zero"], "--rows picks rows of one table"),
    "start": (["ablate", "--what", "start", "--rows", "reference"], "name one or more with --reference"),
    "source": (["ablate", "--what", "alpha-reference"], "name it with --reference"),
    "grid": (["ablate", "--what", "t_res", "--grid", "1,warm"], "--grid takes numbers with commas"),
    "grid 0": (["ablate", "--what", "t_res", "--grid", "0"], "--grid must be"),
    "threshold": (["ablate", "--threshold", "2"], "threshold must be in [0, 1]"),
    "setting": (["ablate", "--set", "blok=3"], "unknown decoding setting"),
    "tokenizer": (["ablate", "--what", "start", "--reference", "OTHER"], "tokenizer does not match"),
    "task": (["ablate", "--task", "sudku"], "sudoku"),
    "calibrate": (["calibrate", "--carry", "none"], "carries no residual"),
    "masks": (["calibrate", "--masks", "some"], "choose from: all, undecided"),
    "against": (["calibrate", "--reference", "OTHER"], "tokenizer does not match"),
    "k": (["recall", "--k", "1,five"], "--k takes whole numbers"),
    "k 0": (["recall", "--k", "0"], "k must be a whole number from 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(
    case: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (verb, *flags), expected = BAD[case]
    flags = [other if flag == "OTHER" else flag for flag in flags]
    if "--task" not in flags:
        flags += ["--task", "sudoku"]
    if verb != "calibrate":
        flags += ["--output", str(tmp_path)]
    command = ["rcd", verb, "--model", "bundled:sdar-rcd", "--limit", "2", "--device", "cpu", *flags]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capfd.readouterr()
    assert (caught.value.code, out) == (2, "")
    text = [line for line in err.strip().splitlines() if not line.startswith("rcd: note")]
    assert len(text) == 1 and text[0].startswith("rcd: ") and expected in text[0]
    assert not list(tmp_path.iterdir())
