"""p of step 0, from which Algorithm 2 computes its first residual: the rows of tab:init-ablation.

Every start takes what its pass predicted (`PASS` says which pass that is), the `Passes` of the block and a
concentration, and returns probabilities [B, L, V], or None for the all-zero distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rcd.residual.distribution import Distribution

PASS = {"self": "own", "reference": "reference"}
"""The pass that a start reads; the others read none."""
DRAWS = ("dirichlet",)
"""Starts that draw from the rows' generators."""


@dataclass(frozen=True)
class Passes:
    """What a fresh block's state is made of, besides a prediction."""

    shape: tuple[int, int, int]
    """(B, L, V)"""
    device: torch.device
    generators: list[torch.Generator] = field(default_factory=list)
    """One a row, for a carry that declares `start_draws`."""


def zero(predicted: Distribution | None, passes: Passes, concentration: float) -> None:
    """Cold start: p = 0, hence alpha = 0. Nothing is computed."""
    return None


def dirichlet(predicted: Distribution | None, passes: Passes, concentration: float) -> Tensor:
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


def own_pass(predicted: Distribution | None, passes: Passes, concentration: float) -> Tensor:
    """An extra pass of the target over its plain masks ("Target Model (Self)")."""
    return _given(predicted).p


def reference_pass(predicted: Distribution | None, passes: Passes, concentration: float) -> Tensor:
    """Warm start: one pass of the reference model."""
    return _given(predicted).p


def _given(predicted: Distribution | None) -> Distribution:
    assert predicted is not None, "the start asked for a pass"
    return predicted
