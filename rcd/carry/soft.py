"""What the soft-feedback rivals of RCD share: at masks, the last prediction's embedding mixed with E[M]; a cold start;
no parameters. Each rival is a file of its own beside this one; docs/decoding.md has their formulas.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from rcd.carry.base import Carry
from rcd.carry.residual import ResidualState
from rcd.residual.context import interpolate
from rcd.residual.distribution import Distribution


class SoftFeedback(Carry):
    """(1 - alpha) E[M] + alpha delta at every mask; a rival says what alpha and delta are. Rivals are for models as
    they are: none is trained."""

    trains = False
    state: ClassVar[type[ResidualState]] = ResidualState

    def cold(self, shape_BL: tuple[int, int], codebook_VD: Tensor) -> ResidualState:
        return self.state.zero(shape_BL, codebook_VD)

    def inject(
        self, embeds_BLD: Tensor, where_BL: Tensor, state: ResidualState, learnt: nn.Module | None = None
    ) -> Tensor:
        return interpolate(embeds_BLD, where_BL, state.alpha, state.delta)

    def update(
        self, state: ResidualState, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor
    ) -> ResidualState:
        return self.feedback(state, predicted, codebook_VD)

    @abstractmethod
    def feedback(self, state: ResidualState, predicted: Distribution, codebook_VD: Tensor) -> ResidualState:
        """alpha and delta of a prediction, behind the state that it was made with."""


def top_k(p_BLV: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the mass of the k most probable tokens [B, L], the share of each in it [B, L, K], the tokens [B, L, K])."""
    p, token = p_BLV.topk(min(k, p_BLV.shape[-1]), dim=-1)
    mass = p.sum(-1)
    return mass, p / mass.unsqueeze(-1), token


def embedding_of(share_BLK: Tensor, token_BLK: Tensor, codebook_VD: Tensor) -> Tensor:
    """The expected embedding, in the codebook's dtype. A sum, not a product of matrices, whose last digits would depend
    on how many positions there are."""
    return (share_BLK.to(codebook_VD.dtype).unsqueeze(-1) * codebook_VD[token_BLK]).sum(-2)
