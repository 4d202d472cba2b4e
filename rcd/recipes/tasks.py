"""Runs on the project's own tasks: the bundled models, their baselines, and what was tried on the way (docs/log.md)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rcd.carry.residual import Residual
from rcd.recipes.base import Recipe
from rcd.train.config import TrainConfig
from rcd.train.residuals import ResidualSource

SHAPE = {"layers": 3, "width": 256, "heads": 4, "kv_heads": 4, "ffn": 768, "context": 256}
SMALLER = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 4, "ffn": 384, "context": 256}
FAMILIES = {
    "sdar": TrainConfig(model="toy:sdar", block_length=32, label_padding="block"),
    "llada": TrainConfig(model="toy:llada", label_padding="row", loss_normaliser="example"),
}
TRAJECTORIES = ResidualSource(trajectory=6, trajectory_share=0.75, trajectory_from_noise=0.3)


def _plain(family: str) -> TrainConfig:
    """SeqD's objective from random weights, on one GPU in a minute or two."""
    return replace(
        FAMILIES[family], toy=SHAPE, data="tasks:mixed:400000", max_length=192, max_steps=4000, total_batch=256,
        device_batch=256, learning_rate=1.5e-3, betas=(0.9, 0.98), weight_decay=0.01, scheduler="cosine",
        warmup_ratio=0.03, gradient_checkpointing=False, compile=False, flex=False, validation=512, log_every=100,
        validate_every=1000, save_every=1000,
    )  # fmt: skip


def _smaller(family: str) -> TrainConfig:
    return replace(_plain(family), toy=SMALLER, max_steps=2000)


def _seqd(family: str, source: ResidualSource = TRAJECTORIES, longer: float = 1.0) -> Recipe:
    """The baseline, which sees its own trajectories as RCD does; `longer`: with more steps."""
    config = _plain(family)
    steps = round((config.max_steps or 0) * longer)
    return Recipe(f"tasks-{family}-seqd", replace(config, residual=source, max_steps=steps))


def _rcd(family: str, carry: Residual, source: ResidualSource = TRAJECTORIES) -> Recipe:
    """RCD on the model's own trajectories; the steps that are none take the reference's residuals, as the paper's."""
    return Recipe(f"tasks-{family}-rcd", replace(_plain(family), carry=carry, residual=source), _smaller(family))


sdar_seqd, llada_seqd = partial(_seqd, "sdar"), partial(_seqd, "llada")
sdar_seqd_plain, llada_seqd_plain = (partial(_seqd, family, ResidualSource()) for family in ("sdar", "llada"))
sdar_seqd_longer, llada_seqd_longer = (partial(_seqd, family, longer=1.5) for family in ("sdar", "llada"))
sdar_rcd, llada_rcd = (partial(_rcd, family, Residual()) for family in ("sdar", "llada"))
sdar_paper, llada_paper = (partial(_rcd, family, Residual(), ResidualSource()) for family in ("sdar", "llada"))
