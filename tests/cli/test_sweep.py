"""`rcd sweep` as a user meets it: a grid of points, what fails, what is refused, and going on after a kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rcd.carry.none import NoCarry
from rcd.cli import sweep as cli
from rcd.cli.flags import Given
from rcd.cli.main import app
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate import workers
from rcd.evaluate.campaign import Entry, Grid, Place
from rcd.evaluate.points import Sweep
from rcd.evaluate.records import read_records
from rcd.models import bundled
from tests.processes import GatedChild

MODELS = ["--model", "bundled:llada-seqd", "--model", "bundled:llada-rcd"]
TASK = ["--task", "sudoku", "--limit", "3", "--thresholds", "0.6", "0.9", "--device", "cpu"]
ONE = ["--jobs", "1"]


def call(output: Path, *args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["sweep", "--output", str(output), *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models at two thresholds, once for all tests; who changes it takes a copy."""
    output = tmp_path_factory.mktemp("sweep") / "out"
    code, shown, heard = call(output, *MODELS, *TASK, *ONE)
    assert code == 0, shown + heard
    (output / "shown.txt").write_text(shown)
    (output / "heard.txt").write_text(heard)
    return output


@pytest.fixture
def copy(swept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(swept, tmp_path / "out"))


def test_everything_is_written(swept: Path) -> None:
    for name in ("report.html", "frontier.png", "frontier.svg", "sweep.json", "llada-seqd.jsonl", "llada-rcd.jsonl"):
        assert (swept / name).stat().st_size > 500, name
    sweep = Sweep.load(swept / "llada-rcd.jsonl")
    assert [point.threshold for point in sweep.points] == [0.6, 0.9] and len(sweep.items) == 3
    assert sweep.settings["carry"]["name"] == "residual" and sweep.settings["model"] == "bundled:llada-rcd"
    records = read_records(swept / "points" / "llada-rcd" / "0.9")
    assert [record.item for record in records] == sweep.items
    assert [record.steps for record in records] == sweep.points[1].steps.tolist()
    page = (swept / "report.html").read_text()
    assert "llada-rcd against llada-seqd" in page and "3 items are too few for these intervals." in page
    shown, heard = (swept / "shown.txt").read_text(), (swept / "heard.txt").read_text()
    assert shown.index("llada-rcd") < shown.index("threshold 0.6") and "The report: " in shown
    assert "steps (95% interval" in shown or "never reaches" in shown
    assert "speedup              llada-seqd's best accuracy: " in shown and "(asked of both)" in shown
    assert shown.count("3 items are too few for these intervals.") == 1
    assert "rcd: llada-seqd at 0.9: " in heard and "(4 of 4 points)" in heard


def test_what_is_there_is_not_answered_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (copy / "llada-rcd.jsonl").read_text()
    monkeypatch.setattr(workers, "load", lambda *_, **__: pytest.fail("a model is loaded"))
    code, shown, heard = call(copy, *MODELS, *TASK, "--json")
    found = json.loads(shown)
    assert code == 0 and shown.count("\n") == 1 and (copy / "llada-rcd.jsonl").read_text() == before
    assert set(found) >= {"summary", "entries", "comparisons", "failures", "command", "made", "files", "seed"}
    assert found["base"] == "llada-seqd" and found["comparisons"][0]["other"] == "llada-rcd"
    assert set(found["comparisons"][0]) >= {"all", "tasks", "savings", "throughput"}
    assert "4 of 4 points are there already" in heard
    _, shown, _ = call(copy, *MODELS, *TASK, "--json", "--base", "llada-rcd")
    assert json.loads(shown)["comparisons"][0]["other"] == "llada-seqd"


def test_a_kill_loses_nothing(copy: Path) -> None:
    point = copy / "points" / "llada-rcd" / "0.6"
    whole = (point / "records.jsonl").read_text()
    first = whole.splitlines(keepends=True)[0]
    (point / "records.jsonl").write_text(first + '{"item": "sudoku te')  # as a kill leaves it
    shutil.rmtree(copy / "points" / "llada-seqd" / "0.9")
    code, _, heard = call(copy, *MODELS, *TASK, *ONE)
    assert code == 0 and "2 of 4 points are there already" in heard
    again = (point / "records.jsonl").read_text()
    assert again.startswith(first)

    def told(text: str) -> list[Any]:
        return [{key: value for key, value in json.loads(row).items() if key != "seconds"} for row in text.splitlines()]

    assert told(again) == told(whole)


def test_other_settings_are_refused(copy: Path) -> None:
    for change, key in (
        (["--seed", "1"], "items_digest"),
        (["--max-new-tokens", "40"], "max_new_tokens: 42 -> 40"),
        (["--dtype", "bfloat16"], "dtype: 'float32' -> 'bfloat16'"),
    ):
        with pytest.raises(RCDError, match="holds results of other settings") as caught:
            call(copy, *MODELS, *TASK, *change)
        assert key in str(caught.value)
    with pytest.raises(RCDError, match="holds 3 items, more than the 2 asked for"):
        call(copy, *MODELS, *TASK, "--limit", "2")
    assert (copy / "points" / "llada-rcd" / "0.6" / "records.jsonl").is_file()


def test_more_items_keep_what_is_there(copy: Path) -> None:
    point = copy / "points" / "llada-rcd" / "0.6" / "records.jsonl"
    before = point.read_text()
    code, _, _ = call(copy, *MODELS, *TASK, "--limit", "4", *ONE)
    assert code == 0 and point.read_text().startswith(before) and len(read_records(point.parent)) == 4
    assert len(Sweep.load(copy / "llada-rcd.jsonl").items) == 4


def test_a_claim_without_answers_binds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "load", lambda *_, **__: (_ for _ in ()).throw(RCDError("no weights.")))
    assert call(tmp_path / "out", *MODELS, *TASK, *ONE)[0] == 1
    assert call(tmp_path / "out", *MODELS, *TASK, "--limit", "2", *ONE)[0] == 1


def test_a_point_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = workers.evaluate

    def flawed(*args: Any, **more: Any) -> Any:
        if more["model"] == "bundled:llada-rcd" and args[2].threshold == 0.9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate <2> GiB\nand so on")
        if more["model"] == "bundled:llada-rcd":
            raise KeyError("a bug")
        return plain(*args, **more)

    monkeypatch.setattr(workers, "evaluate", flawed)
    code, shown, heard = call(tmp_path / "out", *MODELS, *TASK, *ONE)
    assert code == 1
    assert "rcd: llada-rcd at 0.9: FAILED: out of memory" in heard
    assert "llada-rcd at 0.9: out of memory (CUDA out of memory. Tried to allocate <2> GiB); a smaller --batch" in shown
    assert "llada-rcd at 0.6: KeyError: 'a bug'; the whole of it is in " in shown and "llada-seqd has its best" in shown
    assert "Traceback" in (tmp_path / "out" / "points" / "llada-rcd" / "0.6" / "error.txt").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 of 4 points failed." in page and "allocate &lt;2&gt; GiB" in page
    assert not (tmp_path / "out" / "llada-rcd.jsonl").exists()

    monkeypatch.setattr(workers, "evaluate", plain)
    code, shown, heard = call(tmp_path / "out", *MODELS, *TASK, *ONE)
    assert code == 0 and "Failed" not in shown and "2 of 4 points are there already" in heard
    assert not (tmp_path / "out" / "points" / "llada-rcd" / "0.6" / "error.txt").exists()


def test_a_broken_model_fails_alone_and_the_base_may_be_it(tmp_path: Path) -> None:
    broken = Path(shutil.copytree(bundled.folder_of("llada-rcd"), tmp_path / "broken"))
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    models = ["--model", str(broken), "--model", "plain=bundled:llada-seqd"]
    code, shown, _ = call(tmp_path / "out", *models, *TASK, *ONE)
    assert code == 1 and "broken has failed, so the others are compared with nothing." in shown
    assert "broken at 0.6, 0.9: " in shown and (tmp_path / "out" / "plain.jsonl").is_file()


def test_carries_are_lines_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [cli.name_of("bundled:llada-seqd"), cli.name_of("mine=bundled:llada-rcd")]
    carries = ["trained", "none", "residual,alpha_scale=0.5"]
    entries = cli.entries_of(named, carries, Given(), 99)
    assert [entry.name for entry in entries] == [
        "llada-seqd", "llada-seqd+residual,alpha_scale=0.5", "mine", "mine+none", "mine+residual,alpha_scale=0.5",
    ]  # fmt: skip
    assert "llada-seqd+none is the same as llada-seqd, and left out" in capsys.readouterr().err
    trained, scaled = entries[2].carry, entries[4].carry
    assert scaled != trained and scaled == type(trained)(**{**vars(trained), "alpha_scale": 0.5})
    assert entries[0].config.max_new_tokens is None, "the checkpoint's own"


def test_commit_rules_are_lines_of_their_own(tmp_path: Path) -> None:
    """One over the thresholds, one at bounds of its own, one that reads no number; one page, and going on."""
    rules = "threshold,entropy_bound,entropy_bound=0.1/2,topm"
    given = ["--model", "m=bundled:llada-seqd", "--commit", rules, *TASK, *ONE]
    code, shown, heard = call(tmp_path / "out", *given, "--json")
    found = json.loads(shown)
    lines = {entry["name"]: entry for entry in found["entries"]}
    assert code == 0 and list(lines) == ["m+threshold", "m+entropy_bound", "m+topm"], heard
    points = [[(p["setting"], p["threshold"]) for p in entry["points"]] for entry in lines.values()]
    bounds = [("entropy_bound", 0.1), ("entropy_bound", 2)]
    assert points == [[("threshold", 0.6), ("threshold", 0.9)], bounds, [("num_inference_steps", None)]]
    assert [entry["decode"]["commit"] for entry in lines.values()] == ["threshold", "entropy_bound", "topm"]
    slow, fast = (p["tokens_per_step"] for p in lines["m+entropy_bound"]["points"])
    assert lines["m+topm"]["points"][0]["tokens_per_step"] == 1.0 < slow < fast
    assert "m+topm at one setting: " in heard and "m+entropy_bound at entropy_bound 2: " in heard
    page = (tmp_path / "out" / "report.html").read_text()
    assert "entropy_bound 0.1" in page and "one setting" in page
    code, _, heard = call(tmp_path / "out", *given)
    assert code == 0 and "5 of 5 points are there already" in heard


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ("--commit thresold", "unknown commit 'thresold' (did you mean 'threshold'?)"),
        ("--commit threshold,threshold", "'threshold' is there twice"),
        ("--commit factor=1,factor", "'factor=1' stands before any rule"),
        ("--commit factor,,topm", "--commit names no rule"),
        ("--commit factor,factor=-1", "factor must be a number of 0 or more"),
        (
            "--commit klass,threshold=0.5/0.9,kl_threshold=0.1/1",
            "threshold and kl_threshold of klass have several values",
        ),
        ("--commit klass,score=margin/confidence", "score is no number"),
        ("--commit klass,commit=factor", "names its rule twice"),
        ("--commit klass,carry=none", "name it with --carry"),
        ("--commit topm --set commit=factor", "commit is given twice"),
        ("--thresholds 1.5", "--thresholds must be in [0, 1], not 1.5"),
        ("--thresholds 0.5,x", "--thresholds takes numbers in [0, 1], not 'x'"),
        ("--thresholds nan", "--thresholds must be in [0, 1], not nan"),
        ("0.5", "unexpected '0.5'"),
        ("--task sudku", "unknown task 'sudku' (did you mean 'sudoku'?)"),
        ("--task nowhere.jsonl", "there is no file 'nowhere.jsonl'"),
        ("--model bundled:llada-seqd", "'llada-seqd' is there twice"),
        ("--model nowhere", "there is no folder or file 'nowhere'"),
        ("--model bundled:lada", "lada"),
        ("--model a/b=bundled:llada-rcd", "should be MODEL or NAME=MODEL"),
        ("--carry none --carry none", "'none' is there twice"),
        ("--carry residul", "unknown carry 'residul' (did you mean 'residual'?)"),
        ("--carry residual,alpha=entropi", "unknown alpha 'entropi'"),
        ("--carry residual,start=reference", "the carry of llada-seqd+residual,start=reference needs a reference"),
        ("--base llada", "unknown --base 'llada' (did you mean 'llada-rcd'?)"),
        ("--set threshold=0.5", "name the values with --thresholds"),
        ("--set comit=factor", "unknown decoding setting 'comit'"),
        ("--limit 0", "limit must be a whole number of 1 or more"),
        ("--jobs 0", "jobs must be a whole number of 1 or more"),
        ("--batch 0", "batch must be a whole number of 1 or more"),
        ("--max-new-tokens 4000", "bundled:llada-seqd cannot read the task sudoku: prompt 0 has "),
        ("--device tpu9", "the device 'tpu9' cannot be used here"),
        ("--reference nowhere", "there is no folder or file 'nowhere'"),
    ],
)
def test_bad_input_is_refused_before_any_work(args: str, cause: str, tmp_path: Path) -> None:
    given = args.split()
    with pytest.raises(RCDError) as caught:
        call(tmp_path / "out", *MODELS, "--task", "sudoku", "--limit", "2", *given)
    assert cause in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RCDError, match=r"cannot be written to .*; give another folder"):
        call(tmp_path / "file" / "out", *MODELS, *TASK)


def test_two_items_of_one_name_are_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "x", "question": "one", "answer": "1"}\n' * 2)
    with pytest.raises(RCDError, match="two items are named 'x'"):
        call(tmp_path / "out", *MODELS, "--task", str(rows))


def test_thresholds_with_spaces_and_commas() -> None:
    assert cli.parsed_thresholds(["0.9,0.5"], ["1", "0.50"]) == [0.5, 0.9, 1.0]
    assert cli.parsed_thresholds(["0.5", "0.6 0.7"], []) == [0.5, 0.6, 0.7]
    assert cli.parsed_thresholds(None, []) == list(cli.THRESHOLDS) and len(cli.THRESHOLDS) == 8


def grid(output: Path, thresholds: list[float], entries: int = 1) -> Grid:
    own = [Entry(f"m{k}", f"toy/{k}", DecodeConfig(carry=NoCarry())) for k in range(entries)]
    problems: Any = [SimpleNamespace(name=f"p{k}") for k in range(10)]
    return Grid(own, thresholds, "words", problems, output)


def test_a_process_that_dies_fails_its_point_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(pipe: Any, _: Grid) -> None:
        while True:
            place = pipe.recv()
            if place == Place(0, 0.7):
                os.kill(os.getpid(), signal.SIGKILL)
            pipe.send(workers.Said(place, 1, 10, 1))
            pipe.send(workers.Said(place, ended=True, figures={"accuracy": 1.0}))

    def start(given: Grid) -> workers._Hand:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, given), daemon=True)
        process.start()
        theirs.close()
        return workers._Hand(process, ours)

    monkeypatch.setattr(workers, "_start", start)
    given, heard = grid(tmp_path, [0.5, 0.7, 0.9, 1.0], 2), list[workers.Said]()
    failures = workers.run(given, given.places, 2, heard.append)
    assert list(failures) == [Place(0, 0.7)] and "its process ended by itself (exit code -9)" in failures[Place(0, 0.7)]
    assert {said.place for said in heard if said.ended} == set(given.places)


def test_two_processes_and_an_interrupt(tmp_path: Path) -> None:
    """Answers by two processes; an interrupt in the middle leaves what is there, and no process behind: `finish`
    returns once the last process that has the command's stderr is gone."""
    command = ["sweep", "--output", str(tmp_path / "out"), *MODELS, *TASK, "--jobs", "2"]
    with GatedChild(command, "rcd.evaluate.records:Folder.append", after=True) as child:
        child.arrive(2)
        child.send(signal.SIGINT, group=True)  # as a terminal does
        code, _, heard = child.finish()
    assert code == 130 and "Traceback" not in heard, heard
    assert heard.count("rcd: interrupted; the answers so far are in ") == 1
    for name in ("llada-seqd", "llada-rcd"):
        (point,) = (tmp_path / "out" / "points" / name).iterdir()
        assert len(read_records(point)) == 1


def test_the_time_left_knows_slow_thresholds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(cli.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cli, "show", lambda text, _: said.append(text))
    given = grid(tmp_path, [0.5, 1.0], 2)
    progress = cli.Progress(given, given.places, jobs=2)
    for done in range(1, 11):
        now[0] = 4.0 * done
        progress(workers.Said(Place(0, 1.0), done, 10, done // 2))
    progress(workers.Said(Place(0, 1.0), ended=True, figures={"accuracy": 0.5, "tokens_per_step": 1.0}))
    # 4 s an answer at 1.0, nothing known of 0.5 yet: 30 answers of 4 s in two processes
    assert said[0] == "rcd: m0 at 1: 3 of 10, 33.3% right so far; about 74 s left"
    assert said[-1] == "rcd: m0 at 1: 50.0% right, 1.00 tokens per step (1 of 4 points, about 60 s left)"
    progress(workers.Said(Place(0, 0.5), 5, 10, 5))  # 5 were there before
    now[0] += 1.0
    progress(workers.Said(Place(0, 0.5), 6, 10, 5))
    assert progress.time_left() == "about 27 s left"  # (4 * 1 + 10 * 1 + 10 * 4) / 2
    progress(workers.Said(Place(0, 0.5), ended=True, failure="no room."))
    assert said[-1] == "rcd: m0 at 0.5: FAILED: no room. (2 of 4 points)"
    assert (cli.spelt(98.6), cli.spelt(100), cli.spelt(7300)) == ("99 s", "2 min", "2 h 2 min")


def test_small_models_on_a_cpu_take_a_process_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Grid([Entry("a", "bundled:llada-rcd", DecodeConfig(carry=NoCarry()))], [0.5], "words", [], tmp_path)
    monkeypatch.setattr(cli, "usable_cores", lambda: 2)
    small = replace(given, device="cpu")
    assert cli.processes(small, None, 6) == (2, 1) and cli.processes(small, None, 1) == (1, 1)
    assert cli.processes(small, 5, 6) == (5, 1) and cli.processes(small, None, 0) == (1, 1)
    monkeypatch.setattr(cli, "SMALL", 10)
    assert cli.processes(small, None, 6) == (1, 2), "a large model has all threads"
