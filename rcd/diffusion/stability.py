"""How much a position's distribution has moved over the last steps (KLASS).

Shapes: B rows, L positions, V vocabulary, n steps of history.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rcd.residual.context import wide
from rcd.residual.distribution import Distribution

TINY = 1e-12
"""Added to probabilities before their logarithm, as in KLASS's own code: a first step is far from one before."""


@dataclass(frozen=True)
class Stability:
    """The distribution of the step before, [B, L, V], and KL(now || before) of the last n steps, [B, L, n]; at first
    all zero."""

    def cold(self, shape_BL: tuple[int, int], vocabulary: int, history: int, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros(*shape_BL, size, dtype=wide(like), device=like.device) for size in (vocabulary, history)
        )

    def update(self, before: tuple[Tensor, ...], now: Distribution) -> tuple[tuple[Tensor, ...], Tensor]:
        """(what the next step is given, the largest KL of the last n steps [B, L])."""
        p, (last, kls) = now.p, before
        kl = (p * ((p + TINY).log() - (last + TINY).log())).sum(-1, keepdim=True)
        kls = torch.cat((kls[..., 1:], kl), dim=-1)
        return (p, kls), kls.amax(-1)
