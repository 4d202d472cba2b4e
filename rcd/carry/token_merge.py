"""TokenMerge of Diffulex (DMax): the top-k tokens' embeddings and E[M], each by its probability; no training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rcd.carry.residual import ResidualState
from rcd.carry.soft import SoftFeedback, embedding_of, top_k
from rcd.residual.context import interpolate, wide
from rcd.residual.distribution import Distribution
from rcd.settings import setting, settings


@dataclass(frozen=True)
class MergedState(ResidualState):
    norm: Tensor
    """[B, L] the expected norm of the top-k embeddings."""


@settings
class TokenMerge(SoftFeedback):
    """sum over the top k of w p_v E_v + (1 - w sum p_v) E[M], rescaled to the same mean of the components' norms.

    Diffulex merges at tokens that it has filled in and may still revise; here a token is committed for good, and the
    rule is at the masks. `weight` is ours.
    """

    state: ClassVar[type[ResidualState]] = MergedState
    top_k: int = setting(default=1, help="Tokens that enter.", ge=1)
    renormalise: bool = setting(default=True, help="Rescale the mixture to the mean of its components' norms.")
    weight: float = setting(
        default=1.0, help="w, the share of the predicted mass that enters. At 0 it is SeqD.", ge=0, le=1
    )

    @property
    def strongest(self) -> float:
        return self.weight

    def inject(
        self, embeds_BLD: Tensor, where_BL: Tensor, state: ResidualState, learnt: nn.Module | None = None
    ) -> Tensor:
        assert isinstance(state, MergedState)
        mixed = interpolate(embeds_BLD, where_BL, state.alpha, state.delta)
        if not self.renormalise:
            return mixed
        dtype = wide(embeds_BLD)
        wanted = (1 - state.alpha) * embeds_BLD.to(dtype).norm(dim=-1) + state.alpha * state.norm
        factor = wanted / mixed.to(dtype).norm(dim=-1).clamp_min(1e-12)
        scaled = (mixed.to(dtype) * factor.unsqueeze(-1)).to(embeds_BLD.dtype)
        return torch.where((where_BL & (state.alpha > 0)).unsqueeze(-1), scaled, mixed)

    def feedback(self, state: ResidualState, predicted: Distribution, codebook_VD: Tensor) -> ResidualState:
        mass, share, token = top_k(predicted.p, self.top_k)
        norm = (share * codebook_VD[token].to(wide(codebook_VD)).norm(dim=-1)).sum(-1)
        return MergedState(self.weight * mass, embedding_of(share, token, codebook_VD), norm)
