"""`rcd eval` and `rcd compare` as a user meets them: notes, going on, few items, an interrupt."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rcd.cli import main as cli
from rcd.cli.main import app
from rcd.cli.options import Interrupted, keeping_answers
from rcd.errors import RCDError, unwritable
from rcd.evaluate.records import read_records
from rcd.evaluate.wording import counted, too_few
from tests.processes import GatedChild

SUDOKU = ["--task", "sudoku", "--model", "bundled:sdar-rcd", "--threshold", "0.8", "--device", "cpu"]


def call(*args: str) -> Any:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval") / "one"
    result = call("eval", *SUDOKU, "--limit", "1", "--output", str(folder))
    assert " of 1 item; bundled:sdar-rcd, carry residual" in result.stdout and "note" not in result.stderr
    return folder


def test_a_run_keeps_device_and_dtype_and_a_mixture_is_told(one: Path, tmp_path: Path) -> None:
    run = json.loads((one / "run.json").read_text())
    assert run["made_on"] == [{"device": "cpu", "dtype": "float32"}]
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "records.jsonl").write_text((one / "records.jsonl").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "made_on": [{"device": "cuda", "dtype": "bfloat16"}]}))
    result = call("eval", *SUDOKU, "--limit", "2", "--output", str(folder))
    assert (
        "rcd: note: some answers of bundled:sdar-rcd on sudoku were made on cuda (bfloat16) and others on cpu (float32)"
        in result.stderr
    )
    assert " of 2 items; " in result.stdout
    with pytest.raises(RCDError, match="holds 2 items, more than the 1 asked for") as caught:
        call("eval", *SUDOKU, "--limit", "1", "--output", str(folder))
    assert "\n" not in str(caught.value)


def test_few_items_are_called_few_and_no_interval_is_a_point(one: Path) -> None:
    shown = call("compare", str(one), str(one)).stdout.splitlines()
    assert shown[-1] == "1 item is too few for these intervals."
    # no difference on one item: 1.96 sqrt((2 / 3) / 3) = 0.9239
    assert shown[-2] == "difference  +0.00 points [-92.39, +92.39], 0 gained, 0 lost, p 1"
    assert too_few(30) == [] and counted(1, "item") == "1 item" and counted(2000, "item") == "2,000 items"


def test_questions_that_a_model_cannot_know_are_noted(tmp_path: Path) -> None:
    flags = ["--limit", "1", "--max-new-tokens", "8", "--device", "cpu", "--output"]
    heard = call("eval", "--task", "words", "--model", "bundled:llada-rcd", *flags, str(tmp_path / "a")).stderr
    told = "bundled:llada-rcd was trained for sudoku alone, so its answers to words mean little"
    assert heard.count(told) == 1 and heard.count("rcd: note: ") == 1
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "How many zebras photosynthesise?", "answer": "1"}\n')
    heard = call("eval", "--task", str(rows), "--model", "bundled:words-rcd", *flags, str(tmp_path / "b")).stderr
    assert "rcd: note: the tokenizer of bundled:words-rcd does not know 'zebras', 'photosynthesise'; answers" in heard
    assert "was trained for" not in heard, "of a file nothing is known"
    sweep = ["sweep", "--task", "words", "--thresholds", "0.5", *flags, str(tmp_path / "c"), "--jobs", "1"]
    heard = call(*sweep, "--model", "bundled:llada-seqd", "--model", "bundled:words-seqd").stderr
    assert heard.count("rcd: note: ") == 1 and "bundled:llada-seqd was trained for sudoku alone" in heard


def test_what_cannot_be_read_or_written_is_one_plain_sentence(one: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{oops\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{oops\n')
    full = unwritable("the results", "runs/a", OSError(28, "No space left on device", "runs/a"))
    assert str(full) == "the results cannot be written to runs/a (the disk is full); give another folder."
    for args, expected in (
        (["eval", *SUDOKU, "--output", str(tmp_path / "file" / "out")], "(a part of its path is a file); give another"),
        (["eval", *SUDOKU, "--task", str(tmp_path / "rows.jsonl"), "--output", "x"], "is not valid JSON; mend it."),
        (["compare", str(one), str(tmp_path)], f"no evaluation is in {tmp_path}; name one that `rcd eval` wrote."),
        (["compare", str(one), "nowhere"], "there is no folder nowhere; name one that `rcd eval` wrote."),
    ):
        with pytest.raises(RCDError) as caught:
            call(*args)
        told = str(caught.value)
        assert expected in told and "Errno" not in told and "Expecting" not in told and "\n" not in told


@pytest.mark.parametrize("kept", ["", "the answers so far are in runs/a"])
def test_an_interrupt_is_one_line_and_130(
    kept: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every command: what interrupts one is seen before typer sees it."""

    def stop(*_: Any, **__: Any) -> None:
        with cli.keeping(kept):
            raise KeyboardInterrupt

    monkeypatch.setattr("rcd.evaluate.evaluation.compare_runs", stop)
    monkeypatch.setattr(sys, "argv", ["rcd", "compare", "a", "b"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == f"rcd: interrupted{'; ' + kept if kept else ''}\n"


def test_an_interrupt_before_any_answer_promises_none(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(Interrupted, match=r"^nothing was answered yet$"), keeping_answers(tmp_path):
        raise KeyboardInterrupt


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    command = ["eval", *SUDOKU, "--limit", "4", "--output", str(tmp_path / "out")]
    with GatedChild(command, "rcd.evaluate.records:Folder.append", call=2, after=True) as child:
        child.arrive()
        child.send(signal.SIGINT)
        child.open()
        code, shown, heard = child.finish()
    assert (code, shown) == (130, "")
    last = heard.strip().splitlines()[-1]
    assert last == f"rcd: interrupted; the answers so far are in {tmp_path / 'out'}, and the same command goes on"
    assert "Traceback" not in heard and "Aborted" not in heard
    assert len(read_records(tmp_path / "out")) == 2
