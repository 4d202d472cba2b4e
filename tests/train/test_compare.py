"""`scripts/compare.py`: recipes trained, swept and compared by one command; `scripts/bundle.py`: models as assets."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rcd.api import Pipeline
from rcd.errors import RCDError
from rcd.evaluate.points import Point, Sweep
from rcd.models import bundled
from rcd.models.toy import toy, toy_tokenizer
from rcd.train.config import TrainConfig
from tests.processes import finish

ROOT = Path(__file__).parents[2]
TINY = (
    "--set data=tasks:mixed:200 --set base.toy.width=32 --set base.toy.heads=2 --set base.toy.kv_heads=2 "
    "--set reference.toy.width=32 --set max_steps=2 --set total_batch=4 --set device_batch=4 --set validation=4 "
    "--set precision=float32 --problems 4 --thresholds 0.5 1.0 --jobs 2 --snapshots 2 --store bfloat16"
)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


compare, bundle = script("compare"), script("bundle")


def command(*args: str) -> str:
    done = finish([sys.executable, str(ROOT / "scripts/compare.py"), *args])
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence of a refusal."""
    assert compare.main(args) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("compare: ") and shown.err.count("\n") == 1 and not shown.out
    return shown.err


def options(output: Path, *args: str) -> Any:
    return compare.parsed(["--output", str(output), *args])


def in_turn(jobs: Any, _: Any, given: Any) -> list[str]:
    """`run_all` of checkpoints that are there, in this process."""
    for job in jobs:
        (Path(given.output) / job.name).mkdir(parents=True)
        compare.evaluate(job, given, torch.device("cpu"))
    return []


def test_recipes_are_trained_swept_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = (
        "half=tasks-sdar-rcd,carry.alpha_scale=0.5,residual.trajectory_share=0.5,residual.trajectory_threshold=[0.6,1]"
    )
    args = ["--output", str(tmp_path / "runs"), *TINY.split(), "--base", "tasks-sdar-seqd", half]
    shown = command(*args)
    assert "FAILED" not in shown and "half against tasks-sdar-seqd" in shown
    run = tmp_path / "runs" / "half"
    held = json.loads((run / "train.json").read_text())
    assert held["carry"]["alpha_scale"] == 0.5 and held["residual"]["trajectory_threshold"] == [0.6, 1]
    assert json.loads((run / "model" / "rcd.json").read_text())["max_new_tokens"] == held["max_new_tokens"] == 64
    assert len((run / "snapshots.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "compare.json").read_text())["all"]["items"] == 4
    assert {path.name.split("-")[0] for path in (tmp_path / "runs").iterdir() if path.is_dir()} >= {"base", "reference"}
    assert (tmp_path / "runs" / "frontier.png").is_file() and (tmp_path / "runs" / "tokens.png").is_file()

    models = [f"{name}={tmp_path / 'runs' / name / 'model'}" for name in ("tasks-sdar-seqd", "half")]
    monkeypatch.setattr(compare, "run_all", in_turn)
    given = ["--trained", "--problems", "4", "--thresholds", "0.5", "1.0", "--base", *models]
    assert compare.main(["--output", str(tmp_path / "again"), *given]) == 0
    assert "half against tasks-sdar-seqd" in capsys.readouterr().out
    assert "| threshold | tasks-sdar-seqd | half |" in (tmp_path / "again" / "report.md").read_text()

    # what is there fits the same command, and no other
    wanted = options(tmp_path / "runs", *args[2:])
    settings = dict(map(compare.setting, wanted.set))
    compare.check_jobs(compare.jobs_of([wanted.base, half], settings, None), wanted)
    moved = (tmp_path / "runs").rename(tmp_path / "moved")
    wanted.output = os.path.relpath(moved)
    compare.check_jobs(compare.jobs_of([wanted.base, half], settings, None), wanted)
    args[1] = str(moved)
    told = refused([*args[:-1], "--seed=1", half], capsys)
    assert "holds a sweep that was made with other settings (seed: 0 -> 1); choose another --output" in told
    changed = half.replace("alpha_scale=0.5", "alpha_scale=0.7")
    assert "half holds a model that was made with other settings (carry: " in refused([*args[:-1], changed], capsys)


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ("", "name at least one recipe"),
        ("--store float16 smoke", "unknown --store 'float16'"),
        ("--mix chess smoke", "unknown --mix 'chess'"),
        ("smoke --thresholds 0.5 1.5", "--thresholds must be in [0, 1], not 1.5"),
        ("smoke --thresholds nan", "--thresholds must be in [0, 1], not nan"),
        ("--jobs 0 smoke", "--jobs must be a whole number of 1 or more"),
        ("--problems 0 smoke", "--problems must be a whole number of 1 or more"),
        ("--problems 8193 smoke", "ask for 8192 of the mix 'mixed' at most"),
        ("--mix sudoku --problems 4097 smoke", "ask for 4096 of the mix 'sudoku' at most"),
        ("--set seed smoke", "'seed' should be key=value"),
        ("--set sed=1 smoke", "unknown training setting 'sed'"),
        ("x=smoke,seed", "'seed' should be key=value"),
        ("x=smoke,betas=[0.9,0.99", "the brackets in 'smoke,betas=[0.9,0.99' do not match"),
        ("x=smok", "unknown recipe 'smok'"),
        ("a/b=smoke", "'a/b' is no name for a run's folder"),
        ("smoke,seed=1", "a variant needs a name of its own"),
        ("--base smoke smoke", "two entries are named 'smoke'"),
        ("--trained sdar", "'sdar' should be NAME=CHECKPOINT"),
        ("--trained a=nowhere", "there is no folder or file 'nowhere'"),
        ("--trained a=bundled:sdar-rcd --set seed=1", "are for training"),
        ("--set data=some.jsonl smoke", "only tasks:MIX:N and sums:N"),
        ("--set data=tasks:chess:9 smoke", "only tasks:MIX:N and sums:N"),
        ("--set data=sums:0 smoke", "only tasks:MIX:N and sums:N"),
        ("--set device_batch=5 smoke", "is no multiple of device_batch 5"),
        ("--set max_steps=null --snapshots 2 smoke", "no max_steps, which --snapshots needs"),
        ("--set data=sums:50 --base-model bundled:sdar-seqd tasks-sdar-rcd", "bundled:sdar-seqd has another tokenizer"),
        ("--set base.data=sums:50 tasks-sdar-rcd", "has another tokenizer than the examples of tasks-sdar-rcd"),
        ("--set data=sums:50 --set validation=50 smoke", "are to be held out, but there are only 50"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    args: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = compare.main(["--output", str(tmp_path / "runs"), *args.split()])
    shown = capsys.readouterr().err
    assert told == 2 and cause in shown and shown.count("\n") == 1, shown
    assert not (tmp_path / "runs").exists()


def test_commas_in_brackets_do_not_part_a_variant() -> None:
    name, recipe, changes = compare.entry("x=tasks-sdar-rcd,betas=[0.8,0.9],seed=3,split=test,carry=null")
    assert (name, recipe.name) == ("x", "tasks-sdar-rcd")
    assert changes == {"betas": [0.8, 0.9], "seed": 3, "split": "test", "carry": None}


def test_bases_and_references_are_trained_once_and_only_where_needed() -> None:
    entries = ["tasks-sdar-seqd", "tasks-sdar-rcd", "tasks-sdar-paper", "more=tasks-sdar-paper,seed=5"]
    jobs = {job.name: job for job in compare.jobs_of(entries, {"carry.alpha_scale": 2.0, "base.seed": 7}, None)}
    (base,) = (name for name in jobs if name.startswith("base-"))
    (reference,) = (name for name in jobs if name.startswith("reference-"))
    assert jobs[base].config.seed == 7 and jobs[base].config.carry is None and not jobs[base].sweeps
    assert jobs["tasks-sdar-seqd"].config.carry is None, "what is said of all gives the baseline no carry"
    assert jobs["tasks-sdar-rcd"].config.carry.alpha_scale == 2.0
    assert [jobs[name].needs for name in entries[:3]] == [[base], [base], [base, reference]]
    assert jobs["more"].needs == [base, reference] and jobs["more"].config.seed == 5
    named = {job.name: job for job in compare.jobs_of(entries[:2], {}, "bundled:sdar-seqd")}
    assert set(named) == set(entries[:2]) and named["tasks-sdar-rcd"].config.model == "bundled:sdar-seqd"


def test_every_job_gets_the_examples_of_its_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = list[Any](), compare.examples_of

    def counted(source: Any) -> Any:
        made.append(source)
        return plain(source)

    monkeypatch.setattr(compare, "examples_of", counted)
    jobs = compare.jobs_of(
        ["a=smoke", "b=smoke,data=sums:200,validation=20", "c=smoke,max_length=30", "d=smoke,data=sums:200"], {}, None
    )
    examples = compare.examples_for(jobs, tmp_path)
    sizes = {job.name: len(examples[compare.Source.of(job.config)]) for job in jobs}
    assert (sizes["a"], sizes["b"], sizes["d"]) == (4000, 200, 200) and 0 < sizes["c"] < 4000
    assert len(made) == len(set(made)) == 3
    first, held_out = compare.parted(next(job for job in jobs if job.name == "b"), list(range(200)))
    assert (len(first), held_out) == (180, list(range(180, 200)))


def test_snapshots_are_as_many_as_were_asked_for(tmp_path: Path) -> None:
    for steps, snapshots in ((10, 4), (7, 3), (3, 5), (12, 4), (9, 0)):
        config = compare.Job("a", TrainConfig(max_steps=steps)).settled(tmp_path, snapshots)
        saved = {step for step in range(1, steps + 1) if step % config.save_every == 0 or step == steps}
        assert len(saved) <= config.keep == max(1, snapshots)


def swept(folder: Path, name: str) -> None:
    """A run's folder with a sweep of nothing much."""
    points = [Point(t, [True, False], [8, 8], [4, steps]) for t, steps in ((0.5, 4), (1.0, 8))]  # type: ignore[arg-type]
    Sweep(name, ["words test 0", "sudoku test 0"], ["words", "sudoku"], points, digest="x").save(folder / "sweep.jsonl")
    (folder / "seconds.json").write_text("{}")


def test_a_sweep_is_used_again_only_if_it_is_the_same(tmp_path: Path) -> None:
    model = Pipeline(toy("sdar", tokenizer=toy_tokenizer(128))).save(tmp_path / "model")
    (job,) = compare.trained_jobs([f"a={model}"])
    given = options(tmp_path, "--trained", "--problems", "2")
    swept(tmp_path / "a", "a")
    with pytest.raises(RCDError, match=r"a sweep but no sweep.json that says how it was made; choose another --output"):
        compare.check_jobs([job], given)
    (tmp_path / "a" / "sweep.json").write_text(json.dumps(compare.sweep_record(job, given)))
    compare.check_jobs([job], given)
    for other in ("--problems 3", "--seed 1", "--mix words", "--thresholds 0.5", "--store bfloat16"):
        changed = options(tmp_path, "--trained", "--problems", "2", *other.split())
        with pytest.raises(RCDError, match=rf"made with other settings \({other.split()[0][2:]}: .* another --output"):
            compare.check_jobs([job], changed)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    with pytest.raises(RCDError, match=r"made with other settings \(model: "):
        compare.check_jobs([job], given)


def test_what_needs_a_failed_job_is_skipped_and_the_rest_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(job: Any, examples: Any, given: Any) -> None:
        if job.name == "broken":
            os._exit(3)
        swept(tmp_path / job.name, job.name)

    def undrawable(*_: Any) -> None:
        raise RCDError("figures need matplotlib: pip install matplotlib.")

    config = TrainConfig()
    jobs = [compare.Job("broken", config, sweeps=False), compare.Job("first", config), compare.Job("good", config)]
    jobs += [compare.Job("lost", config, base="broken"), compare.Job("after", config, reference="lost")]
    monkeypatch.setattr(compare, "jobs_of", lambda *_: jobs)
    monkeypatch.setattr(compare, "work", work)
    monkeypatch.setattr(compare.plots, "frontier", undrawable)
    assert compare.main(["--output", str(tmp_path), "--jobs", "2", "--base", "first", "good"]) == 1
    shown = capsys.readouterr()
    assert "broken: FAILED" in shown.out and "lost: skipped, as it needs broken" in shown.out
    assert "after: skipped, as it needs lost" in shown.out and not (tmp_path / "lost").exists()
    assert "good against first" in shown.out and "note: no figures: figures need matplotlib" in shown.err
    page = (tmp_path / "report.md").read_text()
    assert "| threshold | first | good |" in page and "Failed or skipped: broken, lost, after." in page


def test_a_model_is_bundled_and_the_old_one_stays_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundled, "ASSETS", tmp_path / "assets")
    pipeline = Pipeline(toy("sdar", tokenizer=toy_tokenizer(128)))
    pipeline.save(tmp_path / "run" / "model-bfloat16", max_new_tokens=5)
    newer = pipeline.save(tmp_path / "run" / "model", max_new_tokens=6)
    os.utime(newer / "config.json", (4e9, 4e9))
    assert bundle.find(tmp_path / "run") == newer
    assert bundle.main([f"sdar-rcd={tmp_path / 'run'}"]) == 0
    held = bundled.folder_of("sdar-rcd")
    assert json.loads((held / "rcd.json").read_text())["max_new_tokens"] == 6

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rcd.models.writing.save_file", full)
    assert bundle.main([f"sdar-rcd={tmp_path / 'run'}"]) == 2
    assert bundled.folder_of("sdar-rcd") == held
    for entry, cause in (("sdar-rcd", "should be NAME=RUN"), (f"x={tmp_path}", "holds no trained model")):
        assert bundle.main([entry]) == 2 and cause in capsys.readouterr().err
