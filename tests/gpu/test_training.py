"""Training on a CUDA device: flex attention equals the dense mask, and a run trains. Skipped without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rcd.carry.residual import Residual
from rcd.data.examples import Example
from rcd.models.lm import DiffusionLM
from rcd.models.toy import toy
from rcd.train.batches import Batches, Batching
from rcd.train.objective import Objective

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]
EXAMPLES = [Example(f"example {n}", [(7 * n + 3 * k) % 100 for k in range(40 + 17 * n)], 11 + n) for n in range(6)]


def model(seed: int, layers: int = 2) -> DiffusionLM:
    built = toy("sdar", seed=seed, layers=layers, block_length=16, width=128, heads=4, device="cuda").model
    for parameter in built.parameters():
        parameter.requires_grad_(True)
    return built


@pytest.mark.parametrize("pack", [0, 256])
@pytest.mark.parametrize("carry", [None, Residual()])
def test_flex_attention_gives_the_dense_masks_loss_and_gradients(pack: int, carry: Residual | None) -> None:
    batching = Batching(total=6, device=6, block_length=16, pad_token_id=127)
    batches = Batches(EXAMPLES, replace(batching, pack=pack, total=2, device=2) if pack else batching)
    batch = batches.step(0, 0)[0].to(torch.device("cuda"))
    reference, found = model(9, layers=1), []
    for flex in (False, True):
        target = model(3)
        total = Objective(target, carry=carry, reference=reference, flex=flex)(batch).total
        total.backward()
        found.append((total.detach(), target.backbone.layers[0].self_attn.q_proj.weight.grad))  # type: ignore[union-attr, index]
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_smoke_recipe_trains_in_bf16(tmp_path: Path, checkpointing: bool) -> None:
    from accelerate import Accelerator

    from rcd.recipes.base import find
    from rcd.train.config import TrainConfig
    from rcd.train.loop import Trainer
    from rcd.train.stage import Stage

    recipe = find("smoke").target
    assert recipe is not None
    config: TrainConfig = replace(
        recipe, precision="bfloat16", max_steps=30, carry=None, gradient_checkpointing=checkpointing
    )
    stage = Stage.of(config, torch.device("cuda"))
    trainer = Trainer(stage, tmp_path, Accelerator(), say=lambda _: None)
    first = trainer.step(0)["cross_entropy"]
    exported = trainer.run()
    assert trainer.step(1)["cross_entropy"] < first
    assert (exported / "model.safetensors").is_file()
