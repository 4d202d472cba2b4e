"""A run of both stages for a laptop: additions, one token a character, a model of a few hundred thousand parameters."""

from __future__ import annotations

from dataclasses import replace

from rcd.carry.residual import Residual
from rcd.recipes.base import Recipe
from rcd.train.config import TrainConfig


def smoke() -> Recipe:
    """Both stages on a CPU in under 2 minutes; proves the machinery, not the method."""
    target = TrainConfig(
        model="toy:sdar",
        toy={"layers": 2, "width": 96, "heads": 4, "context": 256, "block_length": 8},
        data="sums:4000",
        validation=100,
        max_length=64,
        max_steps=120,
        total_batch=32,
        device_batch=32,
        learning_rate=2e-3,
        precision="float32",
        gradient_checkpointing=False,
        log_every=20,
        save_every=40,
        validate_every=60,
    )
    reference = replace(target, toy={**target.toy, "layers": 1, "width": 64})
    return Recipe("smoke", replace(target, carry=Residual()), reference)
