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
class Experts:
    """The matrices of a layer's experts: one tensor [experts, rows, columns] here, whose rows are those of `theirs`,
    one below the other; in the checkpoint each by itself, `{e}` being the expert's number."""

    ours: str
    theirs: tuple[str, ...]


@dataclass(frozen=True)
class Fused:
    """A matrix of the checkpoint that is several here: the rows of `ours`, one below the other. Both are beginnings of
    names, as in `FamilySpec.rename`, so that a bias goes the same way."""

    theirs: str
    ours: tuple[str, ...]


@dataclass(frozen=True)
class FamilySpec:
    """One family. `rename` pairs the beginnings of the family's parameter names with the stock backbone's, `{n}` being
    a layer's number; a checkpoint is written in the names it was read in."""

    name: str
    backbone: str
    """The transformers architecture that runs it: `{backbone}Model` with `{backbone}Config`."""
    backbone_config: Callable[[dict[str, Any]], dict[str, Any]]
    """The family's config.json -> keyword arguments of the stock configuration."""
    attention: str
    shift: int = 0
    """1: position i is predicted by the output at i - 1 (Dream, Fast-dLLM v2)."""
    block_length: int | None = None
    """Where the checkpoint does not say; None: the whole canvas is one block."""
    mask_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    tempered_confidence: bool = True
    causal: bool = False
    """A plain autoregressive family: the start of an adaptation, with no mask token of its own."""
    rename: tuple[tuple[str, str], ...] = ()
    experts: tuple[Experts, ...] = ()
    fused: tuple[Fused, ...] = ()
    wide: tuple[str, ...] = ()
    """Endings of our names of tensors that are kept in fp32 where the model is narrower."""
    unused: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of tensors that the family's files may hold and that are computed, not learnt."""

    def from_stock(self, name: str) -> str:
        """A parameter's name here (`backbone.*` or `head.*`) -> its name in the checkpoint, if it has one of its own
        (`rcd.models.tensors` knows of those that are parts of one another)."""
        return translate(name, tuple((ours, theirs) for theirs, ours in self.rename)) or name


def translate(name: str, pairs: tuple[tuple[str, str], ...]) -> str | None:
    """The name, its beginning replaced by the partner of the first pair that fits; None where none does."""
    for source, target in pairs:
        match = re.match("^" + re.escape(source).replace(r"\{n\}", r"(?P<n>\d+)"), name)
        if match:
            return target.replace("{n}", match.groupdict().get("n") or "") + name[match.end() :]
    return None
