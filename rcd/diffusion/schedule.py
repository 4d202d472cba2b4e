"""How many positions a step commits at least, over the steps of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rcd.diffusion.noise import finest
from rcd.diffusion.rule import Schedule

EPS = 1e-3
"""Where Dream's timesteps end."""
Left = Callable[[], Tensor]


def quota(total_B: int | Tensor, steps: int | Tensor, step_B: Tensor) -> Tensor:
    """The share of step number `step` when `total` positions are split over `steps`, the remainder first; at least 1,
    so that every step makes progress."""
    return (total_B // steps + (step_B < total_B % steps)).clamp_min(1)


def even_quota(total_B: int | Tensor, steps_B: Tensor, step_B: Tensor, left: Left) -> Tensor:
    return quota(total_B, steps_B, step_B)


def even_share(total_B: int | Tensor, steps_B: Tensor, step_B: Tensor, left: Left) -> Tensor:
    share = quota(total_B, steps_B, step_B) / left().clamp_min(1)
    return torch.where(step_B >= steps_B - 1, 1.0, share)


def timestep_quota(total_B: int | Tensor, steps_B: Tensor, step_B: Tensor, left: Left) -> Tensor:
    masks = left()
    part = (masks * timestep_share(total_B, steps_B, step_B, left)).long()
    return torch.where(step_B >= steps_B - 1, masks, part)


def timestep_share(total_B: int | Tensor, steps_B: Tensor, step_B: Tensor, left: Left) -> Tensor:
    """1 - s / t, in the fp32 of Dream's own code: with 4 steps 0.24975, 0.33289, 0.49900, 1."""
    share = 1.0 - _time(steps_B, step_B + 1) / _time(steps_B, step_B)
    return torch.where(step_B >= steps_B - 1, 1.0, share)


def _time(steps_B: Tensor, at_B: Tensor) -> Tensor:
    """linspace(1, EPS, steps + 1) at some places, as torch makes it in fp32: from the nearer end, rounded once."""
    kind, one = finest(at_B.device), torch.ones((), device=at_B.device)
    every = ((EPS - one) / steps_B).to(kind)
    above = (1.0 + every * at_B).float()
    below = ((EPS * one).to(kind) - every * (steps_B - at_B)).float()
    return torch.where(at_B < (steps_B + 1) // 2, above, below)


even = Schedule(even_quota, share=even_share)
"""The block's positions split over its steps, the remainder first; at least one a step (LLaDA, SDAR)."""
timesteps = Schedule(timestep_quota, share=timestep_share)
"""The masks left times 1 - s / t, t falling evenly from 1 to 0.001; a step may commit none, the last commits all
(Dream)."""
