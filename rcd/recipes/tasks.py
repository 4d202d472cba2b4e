"""Runs on the project's own tasks: the bundled models, their baselines, and what was tried on the way (docs/log.md).

As in the paper, SeqD and RCD start from the same pretrained model and are trained on equally many tokens; here it is
pretrained first (`base`), from random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rcd.carry.loopholing import Loopholing
from rcd.carry.residual import Residual
from rcd.recipes.base import Recipe
from rcd.train.config import TrainConfig
from rcd.train.residuals import ResidualSource

TRAJECTORIES = ResidualSource(trajectory=6, trajectory_share=1.0, trajectory_from_noise=0.5, trajectory_slow=0.25)
"""Both SeqD and RCD are trained on states that their own decoding visits."""
EXTRA_COMPUTE = 1.15
"""RCD's training steps take 6 to 12% longer than SeqD's on the same trajectories (docs/log.md); rounded up."""


@dataclass(frozen=True)
class Set:
    """What the models of one family share."""

    common: TrainConfig
    shape: dict[str, int]
    smaller: dict[str, int]
    base_steps: int
    steps: int
    carry: Residual
    source: ResidualSource = TRAJECTORIES


def _shape(width: int, heads: int) -> dict[str, int]:
    return {"layers": 2, "width": width, "heads": heads, "kv_heads": heads, "ffn": 3 * width, "context": 256}


SETS = {
    "sdar": Set(
        TrainConfig(
            model="toy:sdar", block_length=64, label_padding="block", data="tasks:sudoku:200000", max_new_tokens=64
        ),
        shape=_shape(96, 2), smaller=_shape(64, 2), base_steps=3000, steps=2000,
        carry=Residual(alpha_scale=4, alpha_most=0.5),
        source=replace(TRAJECTORIES, trajectory_slow=0.35, trajectory_tail=True),
    ),
    "llada": Set(
        TrainConfig(
            model="toy:llada", label_padding="row", loss_normaliser="example", data="tasks:sudoku:200000",
            max_new_tokens=42,
        ),
        shape=_shape(192, 4), smaller=_shape(96, 2), base_steps=3000, steps=2000,
        carry=Residual(alpha_scale=4, alpha_most=0.5),
    ),
    "words": Set(
        TrainConfig(
            model="toy:sdar", block_length=32, label_padding="block", data="tasks:words:300000", max_new_tokens=48
        ),
        shape=_shape(256, 4), smaller=_shape(128, 2), base_steps=4000, steps=1700,
        carry=Residual(alpha_scale=4, alpha_most=0.3),
    ),
}  # fmt: skip


def _pretrained(family: str) -> TrainConfig:
    """SeqD's objective on random masks, from random weights: one GPU, a minute or two."""
    one = SETS[family]
    return replace(
        one.common, toy=one.shape, max_length=128, max_steps=one.base_steps, total_batch=256, device_batch=256,
        learning_rate=2e-3, betas=(0.9, 0.98), weight_decay=0.01, warmup_ratio=0.03, scheduler="cosine",
        gradient_checkpointing=False, flex=False, validation=512, log_every=100, validate_every=1000, save_every=1000,
    )  # fmt: skip


def _tuned(family: str) -> TrainConfig:
    base, steps = _pretrained(family), SETS[family].steps
    return replace(base, model="base", toy={}, seed=1, max_steps=steps, learning_rate=1e-3, block_length=None)


def _smaller(family: str) -> TrainConfig:
    return replace(_pretrained(family), toy=SETS[family].smaller, max_steps=2500)


def _base(family: str) -> Recipe:
    """The pretraining alone."""
    return Recipe(f"tasks-{family}-base", _pretrained(family), about="what the bundled models of the set start from")


def _reference(family: str) -> Recipe:
    """The smaller reference alone."""
    about = (
        "a smaller reference, not bundled"
        if family == "words"
        else f"bundled:{family}-reference, the smaller reference"
    )
    return Recipe(f"tasks-{family}-reference", None, _smaller(family), about=about)


def _seqd(family: str, name: str = "seqd", source: ResidualSource | None = None, longer: float = 1.0) -> Recipe:
    """SeqD on its own trajectories; or on random masks, or with more steps."""
    config = _tuned(family)
    steps = round((config.max_steps or 0) * longer)
    target = replace(config, residual=source or SETS[family].source, max_steps=steps)
    about = {
        "seqd": f"bundled:{family}-seqd, the baseline, which sees its own trajectories as RCD does",
        "seqd-plain": "the baseline on random masks alone",
        "seqd-longer": f"the baseline with RCD's extra compute ({longer} times the steps)",
    }[name]
    return Recipe(f"tasks-{family}-{name}", target, base=_pretrained(family), about=about)


def _rcd(family: str, name: str = "rcd", carry: Residual | None = None, source: ResidualSource | None = None) -> Recipe:
    """RCD on its own trajectories; or on random masks with a reference's residuals, as the paper."""
    target = replace(_tuned(family), carry=carry or SETS[family].carry, residual=source or SETS[family].source)
    about = {
        "rcd": f"bundled:{family}-rcd, residual context on the model's own trajectories",
        "paper": "the paper's recipe: random masks, a reference's residuals, alpha x 1",
    }[name]
    return Recipe(f"tasks-{family}-{name}", target, _smaller(family), _pretrained(family), about)


def _loopholing(family: str) -> Recipe:
    """Loopholing on its own trajectories, as SeqD and RCD."""
    target = replace(_tuned(family), carry=Loopholing(), residual=SETS[family].source)
    about = "the rival of tab:comparison, hidden states carried between steps, on its own trajectories"
    return Recipe(f"tasks-{family}-loopholing", target, base=_pretrained(family), about=about)


PARTS: dict[str, Callable[[str], Recipe]] = {
    "base": _base,
    "reference": _reference,
    "seqd": _seqd,
    "seqd-plain": partial(_seqd, name="seqd-plain", source=ResidualSource()),
    "seqd-longer": partial(_seqd, name="seqd-longer", longer=EXTRA_COMPUTE),
    "rcd": _rcd,
    "paper": partial(_rcd, name="paper", carry=Residual(), source=ResidualSource()),
    "loopholing": _loopholing,
}


def __getattr__(name: str) -> Callable[[], Recipe]:
    """`sdar_seqd` and the like: each part of each set."""
    models, _, part = name.partition("_")
    if models in SETS and part in PARTS:
        return partial(PARTS[part], models)
    raise AttributeError(name)
