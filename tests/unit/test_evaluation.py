"""Evaluations: every item once, whatever happens; the same results however they are spread; fair comparisons."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import rcd
from rcd.data.tasks.base import Problem, problems
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate.evaluation import compare_runs, evaluate, interval, point_of, summary
from rcd.evaluate.journal import repair
from rcd.evaluate.records import Record, read_records, read_run
from tests.processes import FAILSAFE, GatedChild

NAME = "bundled:sdar-rcd"
ITEMS = list(problems("sudoku", "test", 6, seed=3))


@pytest.fixture(scope="module")
def pipeline() -> rcd.Pipeline:
    return rcd.load(NAME, device="cpu")


def run(pipeline: rcd.Pipeline, folder: Path, given: list[Problem] | None = None, **changes: Any) -> dict[str, Any]:
    config = changes.pop("config", DecodeConfig(threshold=0.8))
    return evaluate(pipeline, given or ITEMS, config, folder, model=NAME, task="sudoku", **changes)


def told(folder: Path) -> list[tuple[Any, ...]]:
    """What was answered, without the times."""
    return [tuple(v for k, v in asdict(record).items() if k != "seconds") for record in read_records(folder)]


@pytest.fixture(scope="module")
def whole(pipeline: rcd.Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval") / "whole"
    run(pipeline, folder)
    return folder


def test_the_summary_states_what_the_records_hold(whole: Path) -> None:
    figures, records = summary(whole), read_records(whole)
    assert [record.item for record in records] == [item.name for item in ITEMS] and figures["complete"]
    assert figures["accuracy"] == sum(record.right for record in records) / 6
    assert figures["tokens_per_step"] == sum(r.tokens for r in records) / sum(r.steps for r in records)
    assert figures["low"] < figures["accuracy"] < figures["high"] or figures["accuracy"] in (0, 1)
    assert point_of(whole).accuracy == 100 * figures["accuracy"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_results_depend_neither_on_the_batch_nor_on_the_processes(
    pipeline: rcd.Pipeline, temperature: float, tmp_path: Path
) -> None:
    config = DecodeConfig(threshold=0.8, temperature=temperature)
    samples = 2 if temperature else 1
    run(pipeline, tmp_path / "1", config=config, samples=samples, batch=1)
    run(pipeline, tmp_path / "4", config=config, samples=samples, batch=4)
    barrier = threading.Barrier(2, timeout=FAILSAFE)  # two threads instead of processes, which meet in the same places

    def share(process: int) -> Any:
        try:
            return run(
                pipeline, tmp_path / "two", config=config, samples=samples, process=process, processes=2,
                wait=barrier.wait,
            )  # fmt: skip
        except BaseException:
            barrier.abort()  # the other does not wait for it
            raise

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(share, (0, 1))
    assert first["accuracy"] == second["accuracy"]
    assert told(tmp_path / "1") == told(tmp_path / "4") == told(tmp_path / "two")
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["records.jsonl", "run.json"]


def test_a_limit_does_not_change_what_the_first_items_get(pipeline: rcd.Pipeline, whole: Path, tmp_path: Path) -> None:
    run(pipeline, tmp_path / "few", ITEMS[:3])
    assert told(tmp_path / "few") == told(whole)[:3]


def test_an_interrupted_run_goes_on_where_it_stopped(pipeline: rcd.Pipeline, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "run.json").write_text((whole / "run.json").read_text())
    lines = (whole / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:2]) + lines[2][:40])  # a kill in the middle of a line
    assert len(read_records(folder)) == 2
    run(pipeline, folder)
    assert told(folder) == told(whole)
    assert (folder / "records.jsonl").read_text().splitlines(keepends=True)[:2] == lines[:2]  # not decoded again


@pytest.mark.parametrize("after", [1, 4])
def test_a_kill_loses_no_item_and_counts_none_twice(
    after: int, pipeline: rcd.Pipeline, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    command = ["eval", "--task", "sudoku", "--model", NAME, "--threshold", "0.8", "--limit", "6", "--task-seed", "3"]
    command += ["--device", "cpu", "--output", str(folder)]
    with GatedChild(command, "rcd.evaluate.records:Folder.append", call=after, after=True) as child:
        child.arrive()
        child.kill()
    held = (folder / "records.jsonl").read_text()
    assert len(read_records(folder)) == held.count("\n") == after
    run(pipeline, folder)
    kept = (folder / "records.jsonl").read_text().splitlines()
    assert told(folder) == told(whole) and set(held.splitlines()) <= set(kept)  # those are not decoded again


def test_other_settings_are_refused_in_the_same_folder(pipeline: rcd.Pipeline, whole: Path) -> None:
    with pytest.raises(RCDError, match=r"results of other settings .*threshold"):
        run(pipeline, whole, config=DecodeConfig(threshold=0.9))
    with pytest.raises(RCDError, match=r"results of other settings .*items_digest"):
        run(pipeline, whole, [*ITEMS[1:], ITEMS[0]])
    with pytest.raises(RCDError, match=r"results of other settings .*items: 6 -> 8"):
        run(pipeline, whole, list(problems("sudoku", "test", 8, seed=4)))


def test_more_items_go_on_and_fewer_are_refused(pipeline: rcd.Pipeline, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "grown"
    assert run(pipeline, folder, ITEMS[:2])["items"] == 2
    first, said = (folder / "records.jsonl").read_text(), list[int]()
    figures = run(pipeline, folder, say=lambda done, total, right: said.append(done))
    assert (figures["items"], figures["complete"], said) == (6, True, [3, 4, 5, 6])
    assert (folder / "records.jsonl").read_text().startswith(first) and told(folder) == told(whole)
    assert read_run(folder) == read_run(whole)
    with pytest.raises(RCDError, match="holds 6 items, more than the 3 asked for; ask for 6 or more"):
        run(pipeline, folder, ITEMS[:3])
    assert told(folder) == told(whole)


def test_an_unfinished_run_is_called_so(pipeline: rcd.Pipeline, whole: Path, tmp_path: Path) -> None:
    lines = (whole / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run.json").write_text((whole / "run.json").read_text())
    (tmp_path / "records.jsonl").write_text("".join(lines[:4]))
    with pytest.raises(
        RCDError, match=r"holds an unfinished run \(4 of 6 answered\), more than the 3 asked for; .* 6 or"
    ):
        run(pipeline, tmp_path, ITEMS[:3])
    for pair in ((whole, tmp_path), (tmp_path, whole)):
        with pytest.raises(RCDError, match=rf"^{tmp_path} is unfinished \(4 of 6 answered\); the `rcd eval` command"):
            compare_runs(*pair)


def test_another_carry_is_told_by_its_name_alone(pipeline: rcd.Pipeline, whole: Path) -> None:
    with pytest.raises(RCDError, match=r"other settings \(carry\.name: 'residual' -> 'none'\);"):
        run(pipeline, whole, config=DecodeConfig(threshold=0.8, carry="none"))


def test_a_run_says_on_what_it_was_made(pipeline: rcd.Pipeline, whole: Path, tmp_path: Path) -> None:
    here = {"device": "cpu", "dtype": "float32"}
    assert summary(whole)["made_on"] == [here] == read_run(whole)["made_on"]
    folder = tmp_path / "two"
    run(pipeline, folder, ITEMS[:1])
    other = read_run(folder) | {"made_on": [{"device": "cuda", "dtype": "float32"}]}
    (folder / "run.json").write_text(json.dumps(other))
    assert run(pipeline, folder, ITEMS[:1])["made_on"] == other["made_on"], "nothing was answered here"
    assert run(pipeline, folder)["made_on"] == [*other["made_on"], here]


def test_damage_is_named(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text((whole / "run.json").read_text())
    lines = (whole / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text(lines[0] + "{broken\n" + lines[2])
    with pytest.raises(RCDError, match=r"line 2 of .*records.jsonl is damaged"):
        read_records(tmp_path)
    with pytest.raises(RCDError, match=r"there is no folder .*nowhere; name one that `rcd eval` wrote"):
        summary(tmp_path / "nowhere")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text("{")
    with pytest.raises(RCDError, match=r"run.json is damaged; run the evaluation again in another folder\.$"):
        summary(tmp_path / "half")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "records.jsonl").write_text("")
    with pytest.raises(RCDError, match=r"no run\.json"):
        run(rcd.load(NAME, device="cpu"), tmp_path / "other")


def test_repair_cuts_half_a_line_off(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert repair(path) == 0
    path.write_text("one\ntw")
    assert repair(path) == 2 and path.read_text() == "one\n" and repair(path) == 0


def test_runs_over_different_items_are_not_compared(pipeline: rcd.Pipeline, whole: Path, tmp_path: Path) -> None:
    run(pipeline, tmp_path / "few", ITEMS[:3])
    with pytest.raises(RCDError, match="over different items"):
        compare_runs(whole, tmp_path / "few")
    run(pipeline, tmp_path / "plain", config=DecodeConfig(threshold=0.8, carry="none"))
    found = compare_runs(whole, tmp_path / "plain")
    a, b = ({r.item: r.right for r in read_records(folder)} for folder in (whole, tmp_path / "plain"))
    assert found["difference"] == pytest.approx(100 * sum(b[k] - a[k] for k in a) / 6)
    assert found["gained"] - found["lost"] == sum(b.values()) - sum(a.values())
    assert compare_runs(whole, whole)["difference"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 2}, "2 samples at temperature 0 are the same answer"),
        ({"samples": 0}, "samples must be a whole number of 1 or more"),
        ({"given": [ITEMS[0], ITEMS[0]]}, "two items are named 'sudoku test 0'"),
    ],
)
def test_bad_input(pipeline: rcd.Pipeline, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RCDError, match=words):
        run(pipeline, tmp_path / "bad", **changes)
    assert not (tmp_path / "bad").exists()


def test_samples_of_one_item_are_no_items_of_their_own() -> None:
    assert interval([1.0, 0.0], one_each=True) == pytest.approx((0.0945, 0.9055), abs=1e-3)
    low, high = interval([0.5, 0.75, 0.25, 0.5], one_each=False)
    assert (low + high) / 2 == pytest.approx(0.5) and high - low == pytest.approx(2 * 1.96 * 0.2041 / 2, abs=1e-3)


def test_a_record_goes_through_json() -> None:
    record = Record("a", 0, "words", "p\n", "o\u2028", "1", True, 3, 2, 4, 0.5, "eos")
    assert Record(**json.loads(json.dumps(asdict(record), ensure_ascii=False))) == record
    assert replace(record, sample=1).key == ("a", 1)


def of_before(run: dict[str, Any], dtypes: list[str], delta: str | None = None) -> dict[str, Any]:
    """A run.json as the version with two decoders wrote it."""
    decode = {key: value for key, value in run["decode"].items() if key not in ("stop", "stop_ids", "residual_scale")}
    decode |= {"engine": "fast", "delta": delta, "delta_tokens": 32, "delta_rank": 4}
    made_on = [{"device": "cpu", "dtype": dtype} for dtype in dtypes]
    kept = {key: value for key, value in run.items() if key not in ("dtype", "delta")}
    return {**kept, "decode": decode, "made_on": made_on}


def copied(whole: Path, folder: Path, lines: int, run: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(run))
    text = (whole / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(text[:lines]))
    return folder


def test_a_folder_of_the_version_before_goes_on_and_is_compared(
    pipeline: rcd.Pipeline, whole: Path, tmp_path: Path
) -> None:
    assert (read_run(whole)["dtype"], read_run(whole)["delta"]) == ("float32", "exact")
    assert not {"oracle", "passes", "batch_invariant", "logprobs"} & set(read_run(whole)["decode"])
    old = copied(whole, tmp_path / "old", 4, of_before(read_run(whole), ["float32"]))
    assert run(pipeline, old)["complete"] and told(old) == told(whole)
    assert read_run(old) == read_run(whole), "from here on it says all"
    full = copied(whole, tmp_path / "full", 6, of_before(read_run(whole), ["float32"]))
    assert compare_runs(whole, full)["difference"] == 0 == compare_runs(full, full)["difference"]


@pytest.mark.parametrize(
    ("dtypes", "delta", "resumed", "compared"),
    [
        (["bfloat16"], None, "dtype: 'bfloat16' -> 'float32'", "in bfloat16 and .* in float32; .* same --dtype"),
        (["bfloat16", "float32"], None, "dtype: 'bfloat16 and float32'", "answered in bfloat16 and float32, so"),
        ([], None, "dtype: None -> 'float32'", "does not say in which dtype"),
        (["float32"], "kept", "delta: 'kept' -> 'exact'", "delta is kept in .* and exact in .*; .* same --set delta"),
    ],
)
def test_answers_computed_in_another_way_are_refused(
    pipeline: rcd.Pipeline, whole: Path, tmp_path: Path, dtypes: list[str], delta: str | None, resumed: str,
    compared: str,
) -> None:  # fmt: skip
    old = copied(whole, tmp_path / "old", 6, of_before(read_run(whole), dtypes, delta))
    with pytest.raises(RCDError, match=resumed):
        run(pipeline, old)
    with pytest.raises(RCDError, match=compared):
        compare_runs(old, whole)


def test_a_delta_that_no_carry_reads_is_none(pipeline: rcd.Pipeline, whole: Path, tmp_path: Path) -> None:
    run(pipeline, tmp_path / "plain", config=DecodeConfig(threshold=0.8, carry="none", delta="kept"))
    run(pipeline, tmp_path / "kept", config=DecodeConfig(threshold=0.8, delta="kept"))
    assert read_run(tmp_path / "plain")["delta"] is None and read_run(tmp_path / "kept")["delta"] == "kept"
    assert compare_runs(tmp_path / "plain", whole)["base"]["items"] == 6
    with pytest.raises(RCDError, match=r"delta is exact in .* and kept in"):
        compare_runs(whole, tmp_path / "kept")


def test_seconds_are_shares_of_the_time(pipeline: rcd.Pipeline, tmp_path: Path) -> None:
    began = time.perf_counter()
    figures = run(pipeline, tmp_path / "timed", batch=3)
    assert 0 < figures["seconds"] <= time.perf_counter() - began
    assert all(record.seconds > 0 for record in read_records(tmp_path / "timed"))
