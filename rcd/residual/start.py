"""p of step 0, from which Algorithm 2 computes its first residual: the rows of tab:init-ablation.

Every start takes a `Passes` (the passes that may be run before the first step, and the shape wanted) and returns
probabilities [B, L, V] in fp32, or None for the all-zero distribution.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rcd.residual.distribution import Distribution


class Passes(Protocol):
    """What a carry may ask for before a step. Each call of `own` or `reference` is one counted forward."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def generators(self) -> list[torch.Generator]: ...

    def own(self) -> Distribution: ...

    def reference(self) -> Distribution: ...


def zero(passes: Passes, concentration: float) -> None:
    """Cold start: p = 0, hence alpha = 0. Nothing is computed."""
    return None


def dirichlet(passes: Passes, concentration: float) -> Tensor:
    """p ~ Dirichlet(concentration) at every position, from each row's own generator.

    The paper does not give its concentration; 1 is the flat prior. Drawn as normalised Gamma variates; on a row
    that underflows to zero the normaliser is kept away from 0, which leaves the cold start there.
    """
    _, length, vocabulary = passes.shape
    rows = []
    for generator in passes.generators:
        shape = torch.full((length, vocabulary), concentration, dtype=torch.float32, device=generator.device)
        gamma = torch._standard_gamma(shape, generator=generator)
        rows.append(gamma / gamma.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny))
    return torch.stack(rows).to(passes.device)


def own_pass(passes: Passes, concentration: float) -> Tensor:
    """An extra pass of the target over its plain masks ("Target Model (Self)")."""
    return passes.own().p


def reference_pass(passes: Passes, concentration: float) -> Tensor:
    """Warm start: one pass of the reference model."""
    return passes.reference().p
