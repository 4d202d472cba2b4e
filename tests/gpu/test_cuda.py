"""The same claims on a CUDA device. Skipped without one; run there with `python -m pytest tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rcd
from rcd.carry.residual import Residual
from rcd.models.toy import toy
from tests.conftest import FAMILIES, exact

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]
PROMPTS = [[5, 9, 13, 2, 40, 41, 7, 8, 1, 3, 77], [4, 4, 6], [60 + k for k in range(21)]]


def on(device: str, family: str) -> rcd.Pipeline:
    pipeline = exact(family)
    pipeline.model.to(device)
    return pipeline


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("carry", ["none", Residual(), Residual(start="self", t_res=0.9)], ids=["seqd", "rcd", "self"])
def test_tokens_are_those_of_the_cpu(family: str, carry: str | Residual) -> None:
    config = rcd.DecodeConfig(max_new_tokens=16, block_length=8, threshold=0.55, carry=carry)
    cpu, cuda = (on(device, family).generate(PROMPTS, config) for device in ("cpu", "cuda"))
    assert cpu.sequences == cuda.sequences
    assert [r.counts for r in cpu.results] == [r.counts for r in cuda.results]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_ragged_batch_equals_its_rows(family: str, temperature: float) -> None:
    pipeline = on("cuda", family)
    config = rcd.DecodeConfig(
        max_new_tokens=16, block_length=8, threshold=0.55, temperature=temperature, carry="residual"
    )
    together = pipeline.generate(PROMPTS, config)
    for row, prompt in enumerate(PROMPTS):
        alone = rcd.DecodeConfig(**{**vars(config), "seed": row})
        assert pipeline.generate(prompt, alone).sequences[0] == together.sequences[row]


def test_a_bf16_checkpoint_stays_bf16_and_decodes(tmp_path: Path) -> None:
    pipeline = rcd.Pipeline(toy("sdar", spread=6.0))
    pipeline.save(tmp_path / "model")
    state = {name: tensor.bfloat16() for name, tensor in _tensors(tmp_path / "model").items()}
    save_file(state, tmp_path / "model" / "model.safetensors")
    half = rcd.load(tmp_path / "model")
    assert (half.model.device.type, half.model.codebook.dtype) == ("cuda", torch.bfloat16)
    result = half.generate(PROMPTS, rcd.DecodeConfig(max_new_tokens=16, carry="residual"))
    assert all(r.tokens for r in result.results)
    half.save(tmp_path / "copy")
    again = _tensors(tmp_path / "copy")
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))
