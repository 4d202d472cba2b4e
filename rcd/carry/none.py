"""SeqD: nothing is carried; every mask enters the next step as the plain mask embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from rcd.carry.base import Carry, CarryState
from rcd.residual.distribution import Distribution
from rcd.settings import settings


@dataclass(frozen=True)
class Nothing(CarryState):
    def scaled(self, scale_B: Tensor) -> Self:
        return self

    def kept(self, keep: Tensor) -> Self:
        return self


@settings
class NoCarry(Carry):
    """Nothing travels: every mask is the mask (SeqD)."""

    method = "SeqD"
    carries = False

    def cold(self, shape_BL: tuple[int, int], codebook_VD: Tensor) -> Nothing:
        return Nothing()

    def inject(self, embeds_BLD: Tensor, where_BL: Tensor, state: Nothing, learnt: nn.Module | None = None) -> Tensor:
        return embeds_BLD

    def update(self, state: Nothing, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor) -> Nothing:
        return state
