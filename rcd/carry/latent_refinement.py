"""Latent Refinement (Zhu et al. 2025), its embedding rule: E[M] mixed with the top-p expectation; no training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rcd.carry.residual import ResidualState
from rcd.carry.soft import SoftFeedback
from rcd.diffusion.sampling import filter_top_p
from rcd.errors import number
from rcd.residual.alpha import normalised_entropy
from rcd.residual.context import soft_embedding


@dataclass(frozen=True)
class LatentRefinement(SoftFeedback):
    """(1 - alpha) E[M] + alpha sum over the nucleus of p_v E_v (renormalised), alpha = weight (1 - H / log V).

    Left out, since they are no matter of the embedding: the first phase, which refines without committing until the
    predictions' KL divergence between steps is small, and the stop when it is small again.
    """

    weight: float = 0.15
    """r_f, 0.1 to 0.2 in the paper. At 0 it is SeqD."""
    top_p: float = 0.9

    def __post_init__(self) -> None:
        number("weight", self.weight, least=0, most=1)
        number("top_p", self.top_p, least=1e-6, most=1)

    def feedback(self, state: ResidualState, p_BLV: Tensor, codebook_VD: Tensor) -> ResidualState:
        nucleus = filter_top_p(p_BLV.log(), self.top_p).softmax(-1)
        return ResidualState(self.weight * (1.0 - normalised_entropy(p_BLV)), soft_embedding(nucleus, codebook_VD))
