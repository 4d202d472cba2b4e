"""What a commit rule is: a function, and what it declares. The rules themselves are in `rcd.diffusion.commit`.

Shapes: B rows, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rcd.diffusion.stability import Stability


@dataclass(frozen=True)
class CommitSettings:
    """What a rule may look at beside the scores: numbers, or tensors [B, 1] with one of each row."""

    threshold: float | Tensor = 0.85
    factor: float | Tensor = 1.0
    entropy_bound: float | Tensor = 0.1
    kl_threshold: float | Tensor = 0.01
    edit_threshold: float | Tensor = 0.5
    alg_temp: float | Tensor = 0.0
    masked: Tensor | None = None
    """[B, L] which candidates are masks. A rule that `revises` is offered the tokens of unfinished blocks as well; what
    it commits there replaces them."""
    confidence: Tensor | None = None
    """[B, L] the probability of each candidate's token, whatever the scores are; -inf elsewhere."""
    noise: Tensor | None = None
    """[B, L] U[0, 1), of a rule that `draws`."""
    share: Tensor | None = None
    """[B] the part of its masks that each row is due to commit, of a rule that `takes_share`."""
    changes: Tensor | None = None
    """[B, L] where the prediction is another token than the one there, of a rule that `revises`."""
    drift: Tensor | None = None
    """[B, L] what the memory of a rule that `remembers` says of each prediction."""


RULE_SETTINGS = ("threshold", "factor", "entropy_bound", "kl_threshold", "edit_threshold", "alg_temp")
"""Of those, what a request sets."""
OWN_SETTINGS = (*RULE_SETTINGS, "max_post_steps", "klass_history")
"""All settings that have a meaning under some rules alone."""
Choice = Callable[[Tensor, Tensor, CommitSettings], Tensor]


@dataclass(frozen=True)
class Rule:
    """A commit rule: (scores [B, L], quota [B], settings) -> booleans [B, L], and what it needs."""

    choice: Choice
    score: str = "confidence"
    """What it ranks by (`rcd list score`), unless the setting `score` says otherwise."""
    schedule: str = "even"
    """How many a step commits at least (`rcd list schedule`), likewise."""
    confidence: str | None = None
    """What a confidence is, where the setting `confidence` does not say; None: as the family has it."""
    reads: tuple[str, ...] = ("threshold",)
    """The settings of a request that it reads."""
    revises: bool = False
    """Whether it may replace tokens of an unfinished block."""
    post_edits: bool = False
    """Whether a block without masks stays open while its tokens are replaced, for at most `max_post_steps` steps."""
    draws: bool = False
    takes_share: bool = False
    remembers: Stability | None = None
    """A state of every position that is kept between steps."""
    source: str = ""
    """The paper or repository that it is from."""
    published: str = ""
    """The setting that is published with it."""

    def __call__(self, scores_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
        return self.choice(scores_BL, quota_B, settings)

    @property
    def unread(self) -> tuple[str, ...]:
        """The settings of other rules."""
        also = {"max_post_steps": self.post_edits, "klass_history": self.remembers is not None}
        return tuple(name for name in OWN_SETTINGS if not (name in self.reads or also.get(name)))

    @classmethod
    def of(cls, found: Any) -> Rule:
        """A rule as registered; a plain function declares nothing, and may read every setting."""
        return found if isinstance(found, Rule) else cls(found, reads=RULE_SETTINGS)


def rule(**declared: Any) -> Callable[[Choice], Rule]:
    """What the function below declares."""

    def made(choice: Choice) -> Rule:
        return Rule(choice, **declared)

    return made


@dataclass(frozen=True)
class Schedule:
    """How many positions a step commits at least. All functions take (total, steps, step, left), numbers or tensors of
    one shape: the positions of the block, the steps that they are split over, the number of this step, from 0, and a
    function that gives the masks left."""

    quota: Callable[..., Tensor]
    share: Callable[..., Tensor] = field(kw_only=True)
    """The same as a part of the masks left, 1 at the last step."""


def top(scores_BL: Tensor, count_B: Tensor) -> Tensor:
    """The `count` candidates of each row that score best; of equals, the leftmost."""
    order = scores_BL.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    return (rank < count_B.unsqueeze(-1)) & (scores_BL > float("-inf"))
