"""The choice of what a step commits, and what only some commit rules look at for it.

Shapes: B rows (or blocks), P predicted positions of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rcd.diffusion.noise import uniform_of
from rcd.diffusion.rule import Choice, CommitSettings
from rcd.diffusion.score import LAST, Ranking, Score

if TYPE_CHECKING:
    from rcd.decode.step import StepInputs

STREAM = 1
"""Of the noise that commit rules draw by, apart from what tokens are drawn by."""
NONE = float("-inf")


@dataclass(frozen=True)
class ChoiceInputs:
    """None where nobody looks at it."""

    noise: Tensor | None = None
    """[B, P] U[0, 1)."""
    share: Tensor | None = None
    """[B]"""
    ids: Tensor | None = None
    """[B, P] what stands there."""
    early: Tensor | None = None
    """[B] where no prediction counts as stable yet."""
    score: Tensor | None = None
    """[B, P] what the rule ranks by, if not by the confidence."""
    changes: Tensor | None = None
    """[B, P] where the prediction is another token than the one there."""
    drift: Tensor | None = None
    """[B, P] what a rule's memory says."""

    def told(self, token_BP: Tensor, score_BP: Tensor | None, drift_BP: Tensor | None) -> ChoiceInputs:
        """With what the step has predicted."""
        if score_BP is None and drift_BP is None and self.ids is None:
            return self
        if drift_BP is not None and self.early is not None:
            drift_BP = drift_BP.masked_fill(self.early.unsqueeze(-1), float("inf"))
        changes = None if self.ids is None else token_BP != self.ids
        return replace(self, score=score_BP, changes=changes, drift=drift_BP)


def choice_noise(seed: Tensor, step: Tensor, position: Tensor) -> Tensor:
    """U[0, 1) of the row's seed, the number of its step and the position."""
    return uniform_of(seed, step, position, torch.full_like(position, STREAM))


def scored(score: Score, ranking: Ranking, token_BP: Tensor, last: tuple[int, ...]) -> Tensor:
    """What the commit rule ranks by; ids that are committed last come last."""
    found = score.of(ranking)
    for one in last:
        found = found.masked_fill(token_BP == one, LAST)
    return found


def choose(
    commit: Choice, reads: tuple[str, ...], inputs: StepInputs, confidence_BP: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor]:
    """(what is committed [B, P], whether each row's logits were numbers [B])."""
    more, others = inputs.choice, ~inputs.candidates
    offered = confidence_BP.masked_fill(others, NONE)
    scores = offered if more.score is None else more.score.masked_fill(others, NONE)
    named: Any = dict(zip(reads, inputs.settings.rule, strict=True))
    settings = CommitSettings(
        **named, masked=inputs.masked, confidence=offered, noise=more.noise, share=more.share, changes=more.changes,
        drift=more.drift,
    )  # fmt: skip
    committed = commit(scores, inputs.quota, settings)
    # a confidence that is no number would never commit; the normaliser also sees what no candidate does. isfinite is
    # several calls, of which the largest needs none
    finite = (normaliser + confidence_BP).abs().amax(-1) < float("inf")
    return committed & finite.unsqueeze(-1), finite
