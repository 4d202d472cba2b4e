"""alpha, the weight of a residual: Eq. 3 and the other weights of fig:ablation-on-alpha.

Every weight maps probabilities p [..., V] (fp32) to alpha [...] in [0, 1].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rcd import registry


def normalised_entropy(p: Tensor) -> Tensor:
    """H(p) / log V (Eq. 3), in [0, 1]: 1 for the uniform distribution, 0 for a one-hot or an all-zero row."""
    vocabulary = p.shape[-1]
    if vocabulary == 1:
        return torch.zeros(p.shape[:-1], dtype=p.dtype, device=p.device)
    return torch.special.entr(p).sum(-1).div_(math.log(vocabulary)).clamp_(0.0, 1.0)


def confidence(p: Tensor) -> Tensor:
    """max p: variant (2)."""
    return p.amax(-1)


def fixed(p: Tensor, value: float = 0.3) -> Tensor:
    """A constant, 0.3 in the paper: variant (3)."""
    return torch.full(p.shape[:-1], value, dtype=p.dtype, device=p.device)


def one(p: Tensor) -> Tensor:
    """The residual replaces the mask embedding: variant (4), "standard residual"."""
    return fixed(p, 1.0)


def top1(p: Tensor) -> Tensor:
    """The weight of the most probable token's embedding alone, here the normalised entropy: variant (5)."""
    return normalised_entropy(p)


def inverse_entropy(p: Tensor) -> Tensor:
    """1 - H(p) / log V: variant (6)."""
    return 1.0 - normalised_entropy(p)


def inverse_confidence(p: Tensor) -> Tensor:
    """1 - max p: variant (7)."""
    return 1.0 - confidence(p)


def zero(p: Tensor) -> Tensor:
    """No residual: variant (8), standard sequential denoising."""
    return fixed(p, 0.0)


def weight(name: str, p: Tensor, *, scale: float = 1.0, value: float = 0.3, most: float = 1.0) -> Tensor:
    """The named weight times `scale`, kept in [0, `most`].

    An all-zero distribution (the cold start) gives 0 under every weight: without a prediction there is no residual.
    """
    function = registry.get("alpha", name)
    alpha = function(p, value) if function is fixed else function(p)
    if scale != 1.0 or most < 1.0:
        alpha = (alpha * scale).clamp(0.0, most)
    return alpha * (p.sum(-1) > 0)
