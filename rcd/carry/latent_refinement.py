"""Latent Refinement (Zhu et al. 2025), its embedding rule: E[M] mixed with the top-p expectation; no training."""

from __future__ import annotations

from torch import Tensor

from rcd.carry.residual import ResidualState
from rcd.carry.soft import SoftFeedback
from rcd.diffusion.sampling import filter_top_p
from rcd.residual.alpha import normalised_entropy
from rcd.residual.distribution import Distribution
from rcd.settings import setting, settings


@settings
class LatentRefinement(SoftFeedback):
    """(1 - alpha) E[M] + alpha sum over the nucleus of p_v E_v (renormalised), alpha = weight (1 - H / log V).

    Left out, since they are no matter of the embedding: the first phase, which refines without committing until the
    predictions' KL divergence between steps is small, and the stop when it is small again.
    """

    weight: float = setting(default=0.15, help="r_f, 0.1 to 0.2 in the paper. At 0 it is SeqD.", ge=0, le=1)
    top_p: float = setting(default=0.9, help="The mass of the nucleus.", ge=1e-6, le=1)

    @property
    def strongest(self) -> float:
        return self.weight

    def feedback(self, state: ResidualState, predicted: Distribution, codebook_VD: Tensor) -> ResidualState:
        nucleus = filter_top_p(predicted.p.log(), self.top_p).softmax(-1)
        return ResidualState(
            self.weight * (1.0 - normalised_entropy(predicted.p)), predicted.mixed(nucleus, codebook_VD)
        )
