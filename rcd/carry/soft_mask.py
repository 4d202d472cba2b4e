"""Soft masks of IBM (Soft-Masked Diffusion Language Models): E[M] mixed with the top 3, more where it is sure."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rcd.carry.residual import ResidualState
from rcd.carry.soft import SoftFeedback, embedding_of, top_k
from rcd.errors import number, whole


@dataclass(frozen=True)
class SoftMask(SoftFeedback):
    """(1 - w) E[M] + w sum over the renormalised top k of p_v E_v, w = scale sigmoid(steepness (-H - centre)).

    H is in nats, over the whole vocabulary: w falls with the entropy, where RCD's alpha rises. IBM trains the three
    numbers with the model, in two passes; here they are settings, the model is not trained for them, and the defaults
    are ours: at most 0.22, half the scale at an entropy of 1.
    """

    top_k: int = 3
    scale: float = 0.3
    """At 0 it is SeqD."""
    steepness: float = 1.0
    centre: float = -1.0

    def __post_init__(self) -> None:
        whole("top_k", self.top_k, least=1)
        number("scale", self.scale, least=0, most=1)
        number("steepness", self.steepness, least=0)
        number("centre", self.centre, least=-1e6)

    def feedback(self, state: ResidualState, p_BLV: Tensor, codebook_VD: Tensor) -> ResidualState:
        entropy = torch.special.entr(p_BLV).sum(-1)
        weight = self.scale * torch.sigmoid(self.steepness * (-entropy - self.centre))
        _, share, token = top_k(p_BLV, self.top_k)
        return ResidualState(weight, embedding_of(share, token, codebook_VD))
