"""A recipe that pretrains its own start: base, then the target from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rcd
from rcd.cli.export import export
from rcd.cli.train import train
from rcd.errors import RCDError

TINY = (
    "data=tasks:sudoku:64 max_steps=2 total_batch=4 device_batch=4 validation=4 precision=float32 save_every=1 "
    "base.toy.width=32 base.toy.heads=2 base.toy.kv_heads=2 base.toy.ffn=48 reference.toy.width=32 reference.toy.ffn=48"
).split()


def run(output: Path | None, *settings: str, stage: str = "all", resume: bool = False, dry: bool = False) -> None:
    train(
        "tasks-llada-rcd", output=output, stage=stage, settings=[*TINY, *settings], reference=None, resume=resume,
        dry_run=dry, device="cpu",
    )  # fmt: skip


def test_the_target_starts_from_the_runs_own_base_wherever_the_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(Path("here"), "target.max_steps=1", stage="base")
    run(Path("here"), "target.max_steps=1", stage="target")
    assert not (tmp_path / "here/reference").exists()  # every step is a trajectory: none would be read
    settings = json.loads((tmp_path / "here/target/train.json").read_text())
    assert settings["model"] == "base" and settings["reference"] is None
    model = rcd.load(tmp_path / "here/target/model", device="cpu")
    assert model.settings.max_new_tokens == 42 and model.resolve().new_tokens == 42
    (tmp_path / "here").rename(tmp_path / "there")
    run(tmp_path / "there", "target.max_steps=1", resume=True)  # a moved run is still the same run
    export(tmp_path / "there/target", tmp_path / "exported", None)
    assert rcd.load(tmp_path / "exported", device="cpu").settings.max_new_tokens == 42


def test_steps_that_are_no_trajectories_want_the_reference(tmp_path: Path) -> None:
    run(tmp_path, "target.residual.trajectory_share=0.5")
    assert json.loads((tmp_path / "target/train.json").read_text())["reference"] == "reference"


def test_the_dry_run_counts_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    train("tasks-llada-rcd", None, stage="all", settings=[], reference=None, resume=False, dry_run=True, device="cpu")
    shown = capsys.readouterr().out
    assert shown.count("1,352,640") == 2 and "reference" not in shown  # as many as the bundled model has
    assert "200,000, 21,000,000" in shown  # 105 tokens each


@pytest.mark.parametrize(
    ("recipe", "settings", "stage", "words"),
    [
        ("tasks-llada-rcd", TINY, "target", "use --stage all"),
        ("smoke", ["base.max_steps=1"], "all", "has no stage 'base'"),
        ("smoke", ["target.model=base"], "all", "has no base"),
        ("tasks-llada-rcd", ["base.bogus=1"], "target", "bogus"),
        ("tasks-sdar-rcd", ["row_padding=4"], "all", "label_padding=row"),
    ],
)
def test_bad_settings_are_refused(recipe: str, settings: list[str], stage: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RCDError, match=words):
        train(
            recipe, output=tmp_path / "run", stage=stage, settings=settings, reference=None, resume=False,
            dry_run=False, device="cpu",
        )  # fmt: skip
