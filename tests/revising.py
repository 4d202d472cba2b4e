"""A commit rule that revises, as another package would define it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from rcd import registry
from rcd.diffusion.commit import by_threshold
from rcd.diffusion.rule import CommitSettings, rule

REPLACED = 0.15
"""A token of an unfinished block is replaced by what is surer than this."""


@rule(revises=True)
def revising(confidence_BL: Tensor, quota_B: Tensor, settings: CommitSettings) -> Tensor:
    """The threshold's choice among masks; and tokens, as long as some mask is left of what may be committed."""
    assert settings.masked is not None
    masks = confidence_BL.masked_fill(~settings.masked, float("-inf"))
    chosen = by_threshold(masks, quota_B, settings)
    left = ((masks > float("-inf")) & ~chosen).any(-1, keepdim=True)
    return chosen | (left & ~settings.masked & (confidence_BL > REPLACED))


@contextmanager
def registered() -> Iterator[str]:
    """The rule's name, while it is one."""
    registry.PARTS["commit"]["revising"] = "tests.revising:revising"
    try:
        yield "revising"
    finally:
        del registry.PARTS["commit"]["revising"]
