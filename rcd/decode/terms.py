"""What stays the same over an engine's life, and what the requests that it serves ask for beside tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rcd.carry.base import Carry
from rcd.decode.config import DecodeConfig
from rcd.decode.step import Rules
from rcd.diffusion.rule import Rule
from rcd.models.lm import ModelSettings


class Features(NamedTuple):
    """What the requests that are served ask for beside the tokens: what nobody asks for costs nothing."""

    draws: bool = False
    top_k: int = 0
    """The largest."""
    top_p: bool = False
    sorts: bool = False
    """Whether some row has a top_p and no top_k."""
    scaled: bool = False
    """Whether any residual is scaled."""
    logprobs: int = -1
    """Alternatives of every token; -1: nobody asks for log probabilities."""
    watched: bool = False
    """Whether a row tells its steps."""
    probed: bool = False

    def join(self, other: Features) -> Features:
        """What either asks for: of every feature the larger."""
        return Features._make(map(max, self, other))


@dataclass(frozen=True)
class Terms:
    """What stays the same over an engine's life."""

    config: DecodeConfig
    carry: Carry
    model: ModelSettings
    device: torch.device
    rules: Rules

    @property
    def b(self) -> int:
        return self.config.block

    @property
    def rule(self) -> Rule:
        """Of what is committed."""
        return self.rules.rule

    @property
    def revises(self) -> bool:
        """Whether tokens of an unfinished block may be replaced."""
        return self.rule.revises

    @property
    def starts(self) -> bool:
        """Whether a block's carry starts by more than being nothing."""
        return self.carry.start_pass != "none" or self.carry.start_draws

    @property
    def early(self) -> bool:
        return self.config.eos_early_stop
