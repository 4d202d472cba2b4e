"""SeqD: nothing is carried; every mask enters the next step as the plain mask embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes


@dataclass(frozen=True)
class Nothing:
    alpha: ClassVar[None] = None

    def rows(self, index: Tensor) -> Nothing:
        return self

    def put(self, index: Tensor, other: Nothing) -> Nothing:
        return self

    def at(self, index_BW: Tensor) -> Nothing:
        return self

    def put_at(self, index_BW: Tensor, other: Nothing, where_BW: Tensor) -> Nothing:
        return self


@dataclass(frozen=True)
class NoCarry:
    needs_reference: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False

    def refresh(self, state: Nothing | None, passes: Passes, codebook_VD: Tensor) -> Nothing:
        return Nothing()

    def inject(self, embeds_BLD: Tensor, where_BL: Tensor, state: Nothing, learnt: nn.Module | None = None) -> Tensor:
        return embeds_BLD

    def update(self, state: Nothing, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor) -> Nothing:
        return state
