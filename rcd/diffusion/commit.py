"""Commit rules: which of a step's predictions become tokens (Algorithm 2, lines 15-20).

A rule takes the confidences [B, L] (-inf where nothing may be committed) and the quota [B] (the least that a step
commits), and returns the positions to commit as booleans. Every rule commits the quota in each row that has so many
candidates, and never a position that is none. The quota is 1 or more where a step must make progress; at 0 (a block
that is in flight behind unfinished ones) a rule commits what is good enough by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CommitSettings:
    """Of a rule: numbers, or tensors [B, 1] with one of each row."""

    threshold: float | Tensor = 0.85
    factor: float | Tensor = 1.0
    masked: Tensor | None = None
    """[B, L] which candidates are masks. A rule with the attribute `revises` is offered the tokens of unfinished blocks
    as well; what it commits there replaces them."""


def top(confidence_BL: Tensor, count_B: Tensor) -> Tensor:
    """The `count` most confident candidates of each row; of equals, the leftmost."""
    order = confidence_BL.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return (rank < count_B.unsqueeze(-1)) & (confidence_BL > float("-inf"))


def by_threshold(confidence_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """All above the threshold; the most confident `quota` instead where fewer than `quota` are above.

    The paper's rule has quota 1: "at least one a step". SDAR's dynamic rule has the schedule's quota. The comparison
    is strict, so that threshold 1 commits one token a step.
    """
    above = confidence_BL > settings.threshold
    enough = above.sum(-1) >= quota_B
    return torch.where(enough.unsqueeze(-1), above, top(confidence_BL, quota_B))


def by_topm(confidence_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The `quota` most confident: Algorithm 2's top-m, m from the step schedule."""
    return top(confidence_BL, quota_B)


def by_factor(confidence_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """By falling confidence, rank r = 1, 2, ...: commit while it is >= 1 - factor / (r + 1), and the quota."""
    ranked, order = confidence_BL.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(1, ranked.shape[-1] + 1, device=ranked.device, dtype=ranked.dtype)
    passes = ranked >= 1.0 - settings.factor / (rank + 1)
    kept = passes.long().cumprod(-1).bool() & (ranked > float("-inf"))
    return torch.zeros_like(kept).scatter_(-1, order, kept) | top(confidence_BL, quota_B)


def sequential(confidence_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The leftmost `quota`, whatever their confidence: left to right, as SDAR's `sequential`."""
    candidate = confidence_BL > float("-inf")
    return candidate & (candidate.long().cumsum(-1) <= quota_B.unsqueeze(-1))


def quota(total_B: int | Tensor, steps: int | Tensor, step_B: Tensor) -> Tensor:
    """The share of step number `step` when `total` positions are split over `steps`, the remainder first; at least 1,
    so that every step makes progress."""
    return (total_B // steps + (step_B < total_B % steps)).clamp_min(1)
