"""Soft masks of IBM (Soft-Masked Diffusion Language Models): E[M] mixed with the top 3, more where it is sure."""

from __future__ import annotations

import torch
from torch import Tensor

from rcd.carry.residual import ResidualState
from rcd.carry.soft import SoftFeedback, embedding_of, top_k
from rcd.residual.distribution import Distribution
from rcd.settings import setting, settings


@settings
class SoftMask(SoftFeedback):
    """(1 - w) E[M] + w sum over the renormalised top k of p_v E_v, w = scale sigmoid(steepness (-H - centre)).

    H is in nats, over the whole vocabulary: w falls with the entropy, where RCD's alpha rises. IBM trains the three
    numbers with the model, in two passes; here they are settings, the model is not trained for them, and the defaults
    are ours: at most 0.22, half the scale at an entropy of 1.
    """

    top_k: int = setting(default=3, help="Tokens that enter.", ge=1)
    scale: float = setting(default=0.3, help="The largest weight. At 0 it is SeqD.", ge=0, le=1)
    steepness: float = setting(default=1.0, help="How fast the weight falls with the entropy.", ge=0)
    centre: float = setting(default=-1.0, help="Minus the entropy, in nats, at which it is half the scale.", ge=-1e6)

    @property
    def strongest(self) -> float:
        return self.scale

    def feedback(self, state: ResidualState, predicted: Distribution, codebook_VD: Tensor) -> ResidualState:
        entropy = torch.special.entr(predicted.p).sum(-1)
        # a sigmoid; torch.sigmoid's last digits depend on where in its tensor a number stands
        weight = self.scale / (1.0 + (self.steepness * (entropy + self.centre)).exp())
        _, share, token = top_k(predicted.p, self.top_k)
        return ResidualState(weight, embedding_of(share, token, codebook_VD))
