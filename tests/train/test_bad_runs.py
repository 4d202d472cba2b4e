"""Bad input and faults of a run: one clear sentence, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rcd
from rcd.cli.train import train
from rcd.errors import RCDError
from tests.train.runs import QUICK, run, weights


def test_too_little_memory_says_what_to_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rcd.train.objective import Objective

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Objective, "forward", full)
    with pytest.raises(RCDError, match=r"does not fit into the device's memory; lower device_batch \(now 4\)"):
        run(tmp_path / "run", stage="reference")


def test_an_output_that_holds_another_run_is_refused(unbroken: Path) -> None:
    with pytest.raises(RCDError, match="holds a run; go on with --resume"):
        run(unbroken)
    with pytest.raises(RCDError, match=r"other settings \(learning_rate: 0.002 -> 0.5\)"):
        run(unbroken, "learning_rate=0.5", resume=True)
    run(unbroken, "log_every=2", "device_batch=2", resume=True)  # these change no result


def test_a_start_that_fails_claims_nothing(tmp_path: Path) -> None:
    with pytest.raises(RCDError, match="there is no data file"):
        run(tmp_path / "run", "data=typo.jsonl", stage="reference")
    run(tmp_path / "run", "max_steps=2", stage="reference")


def test_a_gradient_that_is_no_number_is_not_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rcd.train import loop

    plain, calls = loop.nn.utils.clip_grad_norm_, []

    def norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return plain(*args, **kwargs) if len(calls) < 5 else torch.tensor(float("inf"))

    monkeypatch.setattr(loop.nn.utils, "clip_grad_norm_", norm)
    with pytest.raises(
        RCDError, match=r"the gradient is inf at step 5; it was not applied, and the last checkpoint is 3"
    ):
        run(tmp_path / "run", stage="reference")


def test_the_reference_belongs_to_the_run(unbroken: Path, tmp_path: Path) -> None:
    other = str(unbroken / "target" / "model")
    with pytest.raises(RCDError, match=r"other settings .reference"):
        train("smoke", output=unbroken, stage="target", settings=QUICK.split(), reference=other, resume=True,
              dry_run=False, device="cpu")  # fmt: skip


def test_a_loss_that_is_no_number_names_the_step_and_the_examples(tmp_path: Path) -> None:
    with pytest.raises(RCDError, match=r"the loss is (nan|inf) at step \d+ \(examples of this process: sum \d+"):
        run(tmp_path / "bad", "learning_rate=1e18", "clip=1e30", "warmup_ratio=0", stage="reference")


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (['{"prompt": "1+1=?"}'] * 3, "no training example is left: 3 dropped: no 'response'.*line 1, line 2, line 3"),
        (["{"], "line 1 of .* is not valid JSON"),
        (["[" * 10**5], "line 1 of .* is nested too deeply"),
        (['{"prompt": 1' + "0" * 5000 + "}"], "line 1 of .* is not valid JSON"),
        (["[1]"], "line 1 of .* is no JSON object"),
        ([], "no training example is left: the data set is empty"),
        (['{"prompt": "1", "response": "' + "1" * 500 + '"}'], "1 dropped: longer than 64 tokens .line 1."),
    ],
)
def test_bad_data_is_counted_and_named(tmp_path: Path, rows: list[str], match: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(RCDError, match=match):
        run(tmp_path / "run", f"data={path}", stage="reference")


def test_some_bad_rows_are_reported_and_the_rest_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [json.dumps({"prompt": f"{n}+1=?", "response": f"{n + 1}"}) for n in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join([*good, '{"prompt": "x"}', ""]))
    run(tmp_path / "run", f"data={tmp_path / 'data.jsonl'}", "max_steps=2", stage="reference")
    shown = capsys.readouterr().out
    assert "40 examples" in shown and "1 dropped: no 'response' (line 41)" in shown


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        (["nonsense=1"], "unknown training setting 'nonsense'"),
        (["nonsense"], "--set takes key=value"),
        (["total_batch=" + "[" * 10**5], r"total_batch should be int, not '\[{99}\.\.\."),
        (["device_batch=3"], "total_batch 8 is no multiple of device_batch 3"),
        (["validation=300"], "300 examples are to be held out"),
        (["data=nowhere.jsonl"], "there is no data file"),
        (['trackers=["tensorbored"]'], "unknown tracker 'tensorbored'.*did you mean 'tensorboard'"),
        (["model=/no/such"], "there is no folder or file"),
        (["model=toy:xyz"], "unknown family 'xyz'"),
        (["toy.foo=1"], "this is no shape for a toy"),
        (["seed=abc"], "seed should be int, not 'abc'"),
        (["data=sums:abc"], "sums:N or tasks:MIX:N with a whole number"),
        (["attention=bidirectional"], "attention and mask_token_id are for checkpoints"),
        (["total_batch=512"], "total_batch = 512 rows, and the data gives 280"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, extra: list[str], match: str) -> None:
    with pytest.raises(RCDError, match=match):
        run(tmp_path / "run", *extra, stage="reference")


def test_stage_two_without_a_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RCDError, match="stage 2 needs a reference"):
        run(tmp_path / "run", stage="target")


def test_a_reference_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    from rcd.models.toy import toy, toy_tokenizer

    rcd.Pipeline(toy("sdar", tokenizer=toy_tokenizer(128))).save(tmp_path / "other")
    with pytest.raises(RCDError, match="tokenizer does not match"):
        run(tmp_path / "run", f"reference={tmp_path / 'other'}", stage="target")


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rcd.train import store

    plain, calls = store.dcp.save, []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return plain(*args, **kwargs)

    monkeypatch.setattr(store.dcp, "save", full)
    with pytest.raises(RCDError, match=r"checkpoint of step 9 could not be written .*; the last good one is of step 6"):
        run(tmp_path / "run", stage="reference")
    monkeypatch.setattr(store.dcp, "save", plain)
    run(tmp_path / "run", stage="reference", resume=True)
    assert weights(tmp_path / "run" / "reference")
