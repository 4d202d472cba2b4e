"""Runs on the project's own tasks: the bundled models, their baselines, and what was tried on the way (docs/log.md).

As in the paper, SeqD and RCD start from the same pretrained model and are trained on equally many tokens; here it is
pretrained first (`base`), from random weights.
"""

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
TRAJECTORIES = ResidualSource(trajectory=6, trajectory_share=1.0, trajectory_from_noise=0.5)


def _base(family: str) -> TrainConfig:
    """SeqD's objective from random weights, on one GPU in a minute or two."""
    return replace(
        FAMILIES[family], toy=SHAPE, data="tasks:mixed:400000", max_length=96, max_steps=5000, total_batch=256,
        device_batch=256, learning_rate=2e-3, betas=(0.9, 0.98), weight_decay=0.01, warmup_ratio=0.03,
        scheduler="cosine", gradient_checkpointing=False, flex=False, validation=512, log_every=100,
        validate_every=1000, save_every=1000,
    )  # fmt: skip


def _tuned(family: str) -> TrainConfig:
    base = _base(family)
    return replace(base, model="base", toy={}, seed=1, max_steps=1500, learning_rate=1e-3, block_length=None)


def _smaller(family: str) -> TrainConfig:
    return replace(_base(family), toy=SMALLER)


def _base_alone(family: str) -> Recipe:
    """The pretraining alone."""
    return Recipe(f"tasks-{family}-base", _base(family))


def _seqd(family: str, source: ResidualSource = TRAJECTORIES, longer: float = 1.0) -> Recipe:
    """The baseline, which sees its own trajectories as RCD does; `longer`: with more steps."""
    config = _tuned(family)
    steps = round((config.max_steps or 0) * longer)
    target = replace(config, residual=source, max_steps=steps)
    return Recipe(f"tasks-{family}-seqd", target, base=_base(family))


def _rcd(family: str, carry: Residual, source: ResidualSource = TRAJECTORIES) -> Recipe:
    """RCD on the model's own trajectories; steps that are none take the reference's residuals, as the paper's do."""
    target = replace(_tuned(family), carry=carry, residual=source)
    return Recipe(f"tasks-{family}-rcd", target, _smaller(family), _base(family))


sdar_base, llada_base = (partial(_base_alone, family) for family in FAMILIES)
sdar_seqd, llada_seqd = partial(_seqd, "sdar"), partial(_seqd, "llada")
sdar_seqd_plain, llada_seqd_plain = (partial(_seqd, family, ResidualSource()) for family in FAMILIES)
sdar_seqd_longer, llada_seqd_longer = (partial(_seqd, family, longer=1.5) for family in FAMILIES)
sdar_rcd, llada_rcd = (partial(_rcd, family, Residual()) for family in FAMILIES)
sdar_paper, llada_paper = (partial(_rcd, family, Residual(), ResidualSource()) for family in FAMILIES)
