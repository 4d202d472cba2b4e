"""Whole runs of `rcd train`, in processes of their own: kill and resume, two processes, SIGTERM, LoRA, bad input."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rcd
from rcd.cli.options import Interrupted
from rcd.cli.train import train
from rcd.errors import RCDError
from tests.processes import GatedChild, finish, two_processes
from tests.train.runs import QUICK, metrics, run, smoke, weights


def test_both_stages_learn_and_export_ordinary_folders(unbroken: Path) -> None:
    for stage in ("reference", "target"):
        logged = metrics(unbroken / stage)
        assert [row["step"] for row in logged] == list(range(1, 13))
        assert logged[-1]["cross_entropy"] < logged[0]["cross_entropy"]
        assert "validation_loss" in logged[-1]
        assert len(list((unbroken / stage / "checkpoints").glob("step-*"))) == 2
    assert metrics(unbroken / "target")[-1]["alpha"] > 0.1
    reference, target = (rcd.load(unbroken / s / "model", device="cpu") for s in ("reference", "target"))
    assert reference.resolve().carry == rcd.NoCarry() and reference.checkpoint.rcd.stage == "seqd"
    assert target.resolve().carry == rcd.Residual() and target.checkpoint.rcd.stage == "rcd"
    assert target.generate("12+3=?", rcd.DecodeConfig(max_new_tokens=8)).results[0].tokens > 0


@pytest.mark.parametrize(
    ("function", "call", "after", "logged", "saved", "half"),
    [
        ("rcd.train.loop:Trainer.step", 17, False, 4, [3], []),  # in the fifth step of stage 2
        ("torch.distributed.checkpoint:save", 6, True, 6, [3], [".writing-00000006"]),  # in its second save
        ("rcd.train.loop:write_trained", 2, False, 12, [9, 12], []),  # before its export
    ],
    ids=["step", "save", "export"],
)
def test_killed_and_resumed_it_ends_with_the_same_weights(
    function: str,
    call: int,
    after: bool,
    logged: int,
    saved: list[int],
    half: list[str],
    unbroken: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "killed"
    with GatedChild(smoke(output), function, call, after) as child:
        child.arrive()
        child.kill()
    target = output / "target"
    assert [row["step"] for row in metrics(target)] == list(range(1, logged + 1))
    checkpoints = sorted(path.name for path in (target / "checkpoints").iterdir())
    assert checkpoints == [*half, *(f"step-{step:08d}" for step in saved)] and not (target / "model").exists()
    run(output, resume=True)
    assert [row["step"] for row in metrics(target)] == list(range(1, 13))
    ours, theirs = weights(target), weights(unbroken / "target")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_sigterm_saves_and_exits_cleanly(unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "stopped"
    extra = ("save_every=1000",)
    with GatedChild(smoke(output, *extra, stage="reference"), "rcd.train.loop:Trainer.step", call=4) as child:
        child.arrive()
        child.send(signal.SIGTERM)
        child.open()
        code, shown, heard = child.finish()
    assert code == 0, heard
    assert "go on with --resume" in shown
    assert [path.name for path in (output / "reference" / "checkpoints").iterdir()] == ["step-00000004"]
    run(output, *extra, stage="reference", resume=True)
    ours, theirs = weights(output / "reference"), weights(unbroken / "reference")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_two_processes_with_fsdp2_have_the_loss_of_one(unbroken: Path, tmp_path: Path) -> None:
    output = tmp_path / "two"
    done = finish(two_processes("rcd", *smoke(output)))
    assert done.returncode == 0, done.stderr[-3000:]
    for stage in ("reference", "target"):
        for one, two in zip(metrics(unbroken / stage), metrics(output / stage), strict=True):
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
            assert two["alpha"] == pytest.approx(one["alpha"], abs=1e-4)
    two_weights, one_weights = weights(output / "target"), weights(unbroken / "target")
    for name, tensor in two_weights.items():
        torch.testing.assert_close(tensor, one_weights[name], atol=1e-3, rtol=0)


def test_two_processes_whose_rows_do_not_split_evenly_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """5 held-out rows, one a pass; recycling and noisier residuals draw alike on both processes."""
    extra = ["validation=5", "device_batch=1", "max_steps=2", "validate_every=1"]
    beyond = ["residual.recycling=2", "residual.noisier=0.3", "residual.dropout=0.5"]
    done = finish(two_processes("rcd", *smoke(tmp_path / "two", *extra, *beyond, stage="target")))
    assert done.returncode == 0, done.stderr[-3000:]
    run(tmp_path / "one", *extra, *beyond, stage="target")
    for one, two in zip(metrics(tmp_path / "one/target"), metrics(tmp_path / "two/target"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two["validation_loss"] == pytest.approx(one["validation_loss"], abs=1e-4)


def test_accumulation_does_not_change_the_run(unbroken: Path, tmp_path: Path) -> None:
    run(tmp_path / "whole", "device_batch=8", stage="reference")
    losses = [[row["loss"] for row in metrics(folder / "reference")] for folder in (unbroken, tmp_path / "whole")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_lora_trains_adapters_and_exports_ordinary_weights(tmp_path: Path) -> None:
    run(tmp_path / "lora", "lora_rank=4", stage="reference")
    run(tmp_path / "again", "lora_rank=4", stage="reference")
    first, second = weights(tmp_path / "lora" / "reference"), weights(tmp_path / "again" / "reference")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    folder = tmp_path / "lora" / "reference"
    logged = metrics(folder)
    assert logged[-1]["loss"] != logged[0]["loss"]
    state = weights(folder)
    assert not any("lora" in name for name in state)
    start = rcd.Pipeline(rcd.load(folder / "model", device="cpu").checkpoint)
    from rcd.recipes.base import find
    from rcd.train.stage import load_start

    recipe = find("smoke").reference
    assert recipe is not None
    before = load_start(recipe, torch.device("cpu")).model
    assert torch.equal(start.model.codebook, before.codebook)  # frozen
    name = "backbone.layers.0.mlp.up_proj.weight"
    assert not torch.equal(start.model.get_parameter(name), before.get_parameter(name))


def test_a_checkpoint_of_a_run_is_exported_as_an_ordinary_folder(unbroken: Path, tmp_path: Path) -> None:
    from rcd.cli.export import export

    export(unbroken / "target", tmp_path / "last", None)
    last, trained = load_file(tmp_path / "last/model.safetensors"), weights(unbroken / "target")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in last.items())
    export(unbroken / "target", tmp_path / "earlier", 9)
    assert rcd.load(tmp_path / "earlier", device="cpu").checkpoint.rcd.provenance["steps"] == 9
    with pytest.raises(RCDError, match=r"no checkpoint of step 1; there are: 9, 12"):
        export(unbroken / "target", tmp_path / "none", 1)
    with pytest.raises(RCDError, match="no stage of a run"):
        export(tmp_path, tmp_path / "none", None)


def test_an_existing_model_can_be_the_reference(unbroken: Path, tmp_path: Path) -> None:
    """--reference skips stage 1; with the first run's reference the second stage is the same run."""
    settings, existing = QUICK.split(), str(unbroken / "reference" / "model")
    train("smoke", output=tmp_path / "run", stage="all", settings=settings, reference=existing, resume=False,
          dry_run=False, device="cpu")  # fmt: skip
    assert not (tmp_path / "run" / "reference").exists()
    ours, theirs = weights(tmp_path / "run" / "target"), weights(unbroken / "target")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    "extra", [["model=toy:llada", "label_padding=row", "loss_normaliser=example"], ["model=toy:dream"]]
)
def test_bidirectional_models_train_too(tmp_path: Path, extra: list[str]) -> None:
    run(tmp_path / "run", *extra, "max_steps=4", "noise_per=sequence")
    for stage in ("reference", "target"):
        logged = metrics(tmp_path / "run" / stage)
        assert logged[-1]["cross_entropy"] < logged[0]["cross_entropy"]
    assert rcd.load(tmp_path / "run/target/model", device="cpu").settings.window == "bidirectional"


@pytest.mark.parametrize("attention", ["block_causal", "bidirectional"])
def test_a_causal_checkpoint_is_adapted_to_diffusion(tmp_path: Path, attention: str) -> None:
    from rcd.data.sums import character_tokenizer
    from rcd.models.toy import toy

    words = character_tokenizer()
    pipeline = rcd.Pipeline(toy("qwen3", vocab=len(words), tokenizer=words))
    pipeline.save(tmp_path / "causal")
    (tmp_path / "causal/rcd.json").unlink()
    start = [f"model={tmp_path / 'causal'}", f"attention={attention}", "block_length=8", "max_steps=3"]
    run(tmp_path / "run", *start, stage="reference")
    adapted = rcd.load(tmp_path / "run/reference/model", device="cpu")
    assert adapted.settings.attention == attention and not adapted.untrained


def test_trajectories_and_recycling_need_no_reference(tmp_path: Path) -> None:
    for name, setting in (("a", "residual.trajectory=3"), ("b", "residual.recycling=2")):
        run(tmp_path / name, setting, "max_steps=5", stage="target")
        assert metrics(tmp_path / name / "target")[-1]["loss"] > 0


def test_packing_trains(tmp_path: Path) -> None:
    run(tmp_path / "packed", "pack=true", "max_steps=4", "total_batch=4", "device_batch=2", stage="reference")
    assert metrics(tmp_path / "packed/reference")[-1]["loss"] > 0


def test_a_resumed_run_logs_no_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rcd.train.loop import Trainer

    plain = Trainer.step

    def broken(self: Trainer, number: int) -> dict[str, float]:
        if number == 7:
            raise KeyboardInterrupt
        return plain(self, number)

    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(Interrupted):
        run(tmp_path / "run", stage="reference")
    monkeypatch.setattr(Trainer, "step", plain)
    run(tmp_path / "run", stage="reference", resume=True)
    assert [row["step"] for row in metrics(tmp_path / "run/reference")] == list(range(1, 13))


def test_a_carrys_settings_do_not_turn_stage_one_into_stage_two(tmp_path: Path) -> None:
    run(tmp_path / "run", "carry.alpha_scale=0.5", "max_steps=2")
    target = rcd.load(tmp_path / "run/target/model", device="cpu")
    assert target.resolve().carry == rcd.Residual(alpha_scale=0.5)
    assert target.checkpoint.rcd.provenance["reference"] == "reference"  # of the same run
    assert rcd.load(tmp_path / "run/reference/model", device="cpu").resolve().carry == rcd.NoCarry()


def test_the_dry_run_says_what_would_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("smoke", "paper-sdar-8b-b64"):
        train(name, output=None, stage="all", settings=[], reference=None, resume=False, dry_run=True, device="cpu")
    shown = capsys.readouterr().out
    assert "parameters" in shown and "steps" in shown and "unknown" in shown
