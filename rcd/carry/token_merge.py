"""TokenMerge of Diffulex (DMax): the top-k tokens' embeddings and E[M], each by its probability; no training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rcd.carry.residual import ResidualState
from rcd.carry.soft import SoftFeedback, embedding_of, top_k
from rcd.errors import number, whole
from rcd.residual.context import interpolate


@dataclass(frozen=True)
class MergedState(ResidualState):
    norm: Tensor
    """[B, L] the expected norm of the top-k embeddings."""


@dataclass(frozen=True)
class TokenMerge(SoftFeedback):
    """sum over the top k of w p_v E_v + (1 - w sum p_v) E[M], rescaled to the same mean of the components' norms.

    Diffulex merges at tokens that it has filled in and may still revise; here a token is committed for good, and the
    rule is at the masks. `weight` is ours.
    """

    state: ClassVar[type[ResidualState]] = MergedState
    top_k: int = 1
    renormalise: bool = True
    weight: float = 1.0
    """w, the share of the predicted mass that enters. At 0 it is SeqD."""

    def __post_init__(self) -> None:
        whole("top_k", self.top_k, least=1)
        number("weight", self.weight, least=0, most=1)

    def inject(
        self, embeds_BLD: Tensor, where_BL: Tensor, state: ResidualState, learnt: nn.Module | None = None
    ) -> Tensor:
        assert isinstance(state, MergedState)
        mixed = interpolate(embeds_BLD, where_BL, state.alpha, state.delta)
        if not self.renormalise:
            return mixed
        wanted = (1 - state.alpha) * embeds_BLD.float().norm(dim=-1) + state.alpha * state.norm
        factor = wanted / mixed.float().norm(dim=-1).clamp_min(1e-12)
        scaled = (mixed.float() * factor.unsqueeze(-1)).to(embeds_BLD.dtype)
        return torch.where((where_BL & (state.alpha > 0)).unsqueeze(-1), scaled, mixed)

    def feedback(self, state: ResidualState, p_BLV: Tensor, codebook_VD: Tensor) -> ResidualState:
        mass, share, token = top_k(p_BLV, self.top_k)
        norm = (share * codebook_VD[token].float().norm(dim=-1)).sum(-1)
        return MergedState(self.weight * mass, embedding_of(share, token, codebook_VD), norm)
