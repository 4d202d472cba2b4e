"""alpha, the weight of a residual: Eq. 3 and the other weights of fig:ablation-on-alpha.

All eight are made of two numbers of a prediction, in [0, 1]: its normalised entropy h and its largest probability c.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rcd import registry


def normalised_entropy(p: Tensor) -> Tensor:
    """H(p) / log V (Eq. 3), in [0, 1]: 1 for the uniform distribution, 0 for a one-hot or an all-zero row."""
    return normalised(torch.special.entr(p).sum(-1), p.shape[-1]).clamp_(0.0, 1.0)


def normalised(entropy: Tensor, vocabulary: int) -> Tensor:
    """H / log V, of an entropy in nats; by rounding a little below 0 or above 1."""
    return entropy / math.log(vocabulary) if vocabulary > 1 else torch.zeros_like(entropy)


def entropy(h: Tensor, c: Tensor, value: float) -> Tensor:
    """The paper's weight: variant (1)."""
    return h


def confidence(h: Tensor, c: Tensor, value: float) -> Tensor:
    """max p: variant (2)."""
    return c


def fixed(h: Tensor, c: Tensor, value: float) -> Tensor:
    """A constant, 0.3 in the paper: variant (3)."""
    return torch.full_like(h, value)


def one(h: Tensor, c: Tensor, value: float) -> Tensor:
    """The residual replaces the mask embedding: variant (4), "standard residual"."""
    return torch.ones_like(h)


def top1(h: Tensor, c: Tensor, value: float) -> Tensor:
    """The weight of the most probable token's embedding alone, here the normalised entropy: variant (5)."""
    return h


def inverse_entropy(h: Tensor, c: Tensor, value: float) -> Tensor:
    """1 - H(p) / log V: variant (6)."""
    return 1.0 - h


def inverse_confidence(h: Tensor, c: Tensor, value: float) -> Tensor:
    """1 - max p: variant (7)."""
    return 1.0 - c


def zero(h: Tensor, c: Tensor, value: float) -> Tensor:
    """No residual: variant (8), standard sequential denoising."""
    return torch.zeros_like(h)


def weigh(name: str, h: Tensor, c: Tensor, *, scale: float = 1.0, value: float = 0.3, most: float = 1.0) -> Tensor:
    """The named weight, kept in [0, 1], times `scale`, kept in [0, `most`]."""
    alpha: Tensor = registry.get("alpha", name)(h, c, value)
    return (alpha if scale == 1.0 else alpha * scale).clamp(0.0, min(scale, most))


def weight(name: str, p: Tensor, *, scale: float = 1.0, value: float = 0.3, most: float = 1.0) -> Tensor:
    """The named weight of probabilities p [..., V].

    An all-zero distribution (the cold start) gives 0 under every weight: without a prediction there is no residual.
    """
    alpha = weigh(name, normalised_entropy(p), p.amax(-1), scale=scale, value=value, most=most)
    return alpha * (p.sum(-1) > 0)
