"""What a carry has learnt travels with the checkpoint, in a file of its own; a file that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rcd
from rcd.carry.loopholing import Loopholing
from rcd.models.learnt import CARRY_FILE
from rcd.models.toy import toy

FAMILIES = ("sdar", "llada", "dream")
PARITY = Path(__file__).parent.parent / "fixtures" / "parity"


def learnt(pipeline: rcd.Pipeline) -> dict[str, torch.Tensor]:
    assert pipeline.model.carry_parameters is not None
    return dict(pipeline.model.carry_parameters.state_dict())


def looped(pipeline: rcd.Pipeline) -> rcd.Pipeline:
    pipeline.model.hold(Loopholing())
    for tensor in learnt(pipeline).values():
        tensor.normal_(generator=torch.Generator().manual_seed(len(tensor)))
    return pipeline


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint to spoil."""
    looped(rcd.Pipeline(toy("sdar"))).save(tmp_path / "model", carry=Loopholing(two_passes=0.9))
    return tmp_path / "model"


def refused(match: str, folder: Path) -> None:
    with pytest.raises(rcd.RCDError, match=match) as caught:
        rcd.load(folder, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_read_as_it_was_written_in_the_weights_dtype(family: str, dtype: str, tmp_path: Path) -> None:
    pipeline = looped(rcd.Pipeline(toy(family)))
    pipeline.model.to(getattr(torch, dtype))
    pipeline.save(tmp_path / "one", carry=Loopholing(two_passes=0.9))
    again = rcd.load(tmp_path / "one", device="cpu", dtype=dtype)
    assert again.resolve().carry == Loopholing(two_passes=0.9)
    for name, tensor in learnt(again).items():
        assert tensor.dtype == again.model.codebook.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, learnt(pipeline)[name]) and not tensor.requires_grad
    prompt, config = [5, 9, 13], rcd.DecodeConfig(max_new_tokens=12)
    assert again.generate(prompt, config).sequences == pipeline.generate(
        prompt, rcd.DecodeConfig(max_new_tokens=12, carry=Loopholing())
    ).sequences  # fmt: skip
    rcd.load(tmp_path / "one", device="cpu").save(tmp_path / "two")  # computed in fp32, written back as it was
    for file in ("model.safetensors", CARRY_FILE):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rest_of_the_checkpoint_is_the_familys_own(family: str, tmp_path: Path) -> None:
    original = PARITY / family / "model"
    plain, loop = rcd.load(original, device="cpu"), looped(rcd.load(original, device="cpu"))
    plain.save(tmp_path / "plain")
    loop.save(tmp_path / "loop", carry=Loopholing())
    for file in (tmp_path / "plain").iterdir():
        assert file.name == "rcd.json" or file.read_bytes() == (tmp_path / "loop" / file.name).read_bytes()
    more = {file.name for file in (tmp_path / "loop").iterdir()} - {f.name for f in (tmp_path / "plain").iterdir()}
    assert CARRY_FILE in more and more <= {CARRY_FILE, "rcd.json"}


def test_a_carry_that_learns_nothing_adds_no_file(folder: Path, tmp_path: Path) -> None:
    for carry in (rcd.Residual(), rcd.NoCarry()):
        rcd.load(folder, device="cpu").save(tmp_path / type(carry).__name__, carry=carry)
        assert not (tmp_path / type(carry).__name__ / CARRY_FILE).exists()
        assert rcd.load(tmp_path / type(carry).__name__, device="cpu").model.carry_parameters is None


def test_a_missing_file_is_refused(folder: Path) -> None:
    (folder / CARRY_FILE).unlink()
    refused(r"was trained with the carry 'loopholing' and lacks carry.safetensors", folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": torch.ones(63)}, r"holds .*\[63\].*, but the carry 'loopholing' of this model has .*\[64\]"),
        ({"weight": None}, "but the carry 'loopholing' of this model has"),
        ({"gate": torch.ones(64)}, "gate.*but the carry 'loopholing' of this model has"),
        ({"bias": torch.full((64,), float("nan"))}, "the tensor bias .* holds NaN"),
        ({"bias": torch.ones(64, dtype=torch.long)}, "the tensor bias .* no floats"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(folder: Path, change: dict[str, Any], match: str) -> None:
    held = {**load_file(folder / CARRY_FILE), **change}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / CARRY_FILE)
    refused(match, folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    (folder / CARRY_FILE).write_bytes((folder / CARRY_FILE).read_bytes()[:100])
    refused("truncated or is no safetensors file", folder)


def test_a_model_that_has_not_learnt_a_carry_can_neither_decode_with_it_nor_be_saved_for_it(tmp_path: Path) -> None:
    plain = rcd.Pipeline(toy("sdar"))
    with pytest.raises(rcd.RCDError, match="Loopholing has parameters of its own, and this model has not learnt them"):
        plain.generate([5, 9], rcd.DecodeConfig(carry="loopholing"))
    with pytest.raises(rcd.RCDError, match="has not learnt them"):
        plain.save(tmp_path / "model", carry=Loopholing())
    assert not (tmp_path / "model").exists()


def test_a_tied_model_can_hold_one_too(tmp_path: Path) -> None:
    """Neither paper asks for untied embeddings: h is as wide as they are."""
    rcd.Pipeline(toy("qwen3")).save(tmp_path / "tied")
    config = json.loads((tmp_path / "tied/config.json").read_text())
    (tmp_path / "tied/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    state = load_file(tmp_path / "tied/model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "tied/model.safetensors")
    tied = looped(rcd.load(tmp_path / "tied", device="cpu"))
    tied.save(tmp_path / "looped", carry=Loopholing())
    again = rcd.load(tmp_path / "looped", device="cpu")
    assert torch.equal(learnt(again)["weight"], learnt(tied)["weight"])
    assert again.generate([5, 9], rcd.DecodeConfig(max_new_tokens=8)).results[0].tokens > 0


def test_what_is_held_moves_with_the_model() -> None:
    pipeline = looped(rcd.Pipeline(toy("llada")))
    pipeline.model.to("meta", torch.bfloat16)
    assert all(tensor.is_meta and tensor.dtype == torch.bfloat16 for tensor in learnt(pipeline).values())
    names = {name for name, _ in pipeline.model.named_parameters()}
    assert {"carry_parameters.weight", "carry_parameters.bias"} <= names
