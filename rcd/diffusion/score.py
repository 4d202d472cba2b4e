"""What commit rules rank predictions by: higher is committed sooner.

Shapes: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from rcd.residual.distribution import Distribution

LAST = -1e4
"""The score of what is to be committed when nothing else is left."""


@dataclass(frozen=True)
class Ranking:
    """What a step knows of its predictions."""

    confidence: Tensor
    """[B, L] the probability of each position's token."""
    read: Callable[[], Distribution]
    noise: Tensor | None = None
    """[B, L] U[0, 1), for a score that draws."""

    @cached_property
    def distribution(self) -> Distribution:
        """That of which `confidence` is the token's probability."""
        return self.read()


@dataclass(frozen=True)
class Score:
    """Scores [B, L] of a ranking."""

    of: Callable[[Ranking], Tensor]
    draws: bool = False

    @property
    def plain(self) -> bool:
        """Whether it is the confidence, which costs nothing."""
        return self is confidence


def _margin(ranking: Ranking) -> Tensor:
    found = ranking.distribution
    best = found.scaled.topk(2, dim=-1).values
    p = (best - found.normaliser.unsqueeze(-1)).exp()
    return p[..., 0] - p[..., 1]


def _noise(ranking: Ranking) -> Tensor:
    assert ranking.noise is not None, "a rule that draws gets noise"
    return ranking.noise


confidence = Score(lambda ranking: ranking.confidence)
"""The probability of the token (the setting `confidence` says, under which distribution)."""
margin = Score(_margin)
"""The largest probability less the second largest."""
neg_entropy = Score(lambda ranking: -ranking.distribution.entropy_at(ranking.distribution.temperature))
"""The entropy, negative: 0 where the model is certain."""
random = Score(_noise, draws=True)
"""A number drawn for every position and step."""
