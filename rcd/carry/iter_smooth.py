"""IterSmooth of dInfer: E[M] + w softmax(z) E at masks, w growing with the steps; no training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rcd.carry.residual import ResidualState
from rcd.carry.soft import SoftFeedback
from rcd.residual.context import wide
from rcd.residual.distribution import Distribution
from rcd.settings import setting, settings


@dataclass(frozen=True)
class SmoothState(ResidualState):
    steps: Tensor
    """[B, L] steps since the start."""


@settings
class IterSmooth(SoftFeedback):
    """w = min(start + growth k, most) after step k = 0, 1, ...

    The steps are counted over the canvas, as in dInfer; a block diffusion model's begin anew with each block. dInfer
    pairs the rule with a threshold max(1 - 0.02 k, theta), which is a matter of committing and left out.
    """

    state: ClassVar[type[ResidualState]] = SmoothState
    start: float = setting(default=0.15, help="The weight after the first step.", ge=0)
    growth: float = setting(default=0.02, help="What every further step adds to it.", ge=0)
    most: float = setting(default=0.3, help="The largest weight. At 0 it is SeqD.", ge=0)

    @property
    def strongest(self) -> float:
        return self.most

    def inject(
        self, embeds_BLD: Tensor, where_BL: Tensor, state: ResidualState, learnt: nn.Module | None = None
    ) -> Tensor:
        dtype = wide(embeds_BLD)
        added = embeds_BLD.to(dtype) + state.alpha.unsqueeze(-1) * state.delta.to(dtype)
        return torch.where(where_BL.unsqueeze(-1), added.to(embeds_BLD.dtype), embeds_BLD)

    def feedback(self, state: ResidualState, predicted: Distribution, codebook_VD: Tensor) -> ResidualState:
        assert isinstance(state, SmoothState)
        weight = (self.start + self.growth * state.steps).clamp(max=self.most)
        return SmoothState(weight, predicted.mixed(predicted.p, codebook_VD), state.steps + 1)
