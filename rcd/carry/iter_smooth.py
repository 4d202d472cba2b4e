"""IterSmooth of dInfer: E[M] + w softmax(z) E at masks, w growing with the steps; no training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rcd.carry.residual import ResidualState
from rcd.carry.soft import SoftFeedback
from rcd.errors import number
from rcd.residual.context import soft_embedding


@dataclass(frozen=True)
class SmoothState(ResidualState):
    steps: Tensor
    """[B, L] steps since the start."""


@dataclass(frozen=True)
class IterSmooth(SoftFeedback):
    """w = min(start + growth k, most) after step k = 0, 1, ...

    The steps are counted over the canvas, as in dInfer; a block diffusion model's begin anew with each block. dInfer
    pairs the rule with a threshold max(1 - 0.02 k, theta), which is a matter of committing and left out.
    """

    state: ClassVar[type[ResidualState]] = SmoothState
    start: float = 0.15
    growth: float = 0.02
    most: float = 0.3
    """At 0 it is SeqD."""

    def __post_init__(self) -> None:
        for name in ("start", "growth", "most"):
            number(name, getattr(self, name), least=0)

    def inject(
        self, embeds_BLD: Tensor, where_BL: Tensor, state: ResidualState, learnt: nn.Module | None = None
    ) -> Tensor:
        added = embeds_BLD.float() + state.alpha.unsqueeze(-1) * state.delta.float()
        return torch.where(where_BL.unsqueeze(-1), added.to(embeds_BLD.dtype), embeds_BLD)

    def feedback(self, state: ResidualState, p_BLV: Tensor, codebook_VD: Tensor) -> ResidualState:
        assert isinstance(state, SmoothState)
        weight = (self.start + self.growth * state.steps).clamp(max=self.most)
        return SmoothState(weight, soft_embedding(p_BLV, codebook_VD), state.steps + 1)
