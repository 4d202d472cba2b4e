"""What tells one model family from another: a small table of facts, no modelling code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BLOCK_CAUSAL = "block_causal"
BIDIRECTIONAL = "bidirectional"
ATTENTIONS = (BLOCK_CAUSAL, BIDIRECTIONAL)


@dataclass(frozen=True)
class FamilySpec:
    """One family. `rename` pairs the beginnings of the family's parameter names with the stock backbone's, `{n}` being
    a layer's number; it is read in both directions, because a checkpoint is written in the names it was read in."""

    name: str
    backbone: str
    """The transformers architecture that runs it: `{backbone}Model` with `{backbone}Config`."""
    backbone_config: Callable[[dict[str, Any]], dict[str, Any]]
    """The family's config.json -> keyword arguments of the stock configuration."""
    attention: str
    shift: int = 0
    """1: position i is predicted by the output at i - 1 (Dream)."""
    block_length: int | None = None
    """Where the checkpoint does not say; None: the whole canvas is one block."""
    mask_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    tempered_confidence: bool = True
    causal: bool = False
    """A plain autoregressive family: the start of an adaptation, with no mask token of its own."""
    rename: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of tensors that the family's files may hold and that are computed, not learnt."""

    def to_stock(self, name: str) -> str:
        """A parameter's name in the checkpoint -> its name here (`backbone.*` or `head.*`)."""
        return _translate(name, self.rename)

    def from_stock(self, name: str) -> str:
        """The inverse of `to_stock`."""
        return _translate(name, tuple((ours, theirs) for theirs, ours in self.rename))


def _translate(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for source, target in pairs:
        match = re.match("^" + re.escape(source).replace(r"\{n\}", r"(?P<n>\d+)"), name)
        if match:
            return target.replace("{n}", match.groupdict().get("n") or "") + name[match.end() :]
    return name
