"""Checks of what a call asks for: seeds, a reference beside a target, prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rcd.decode.config import DecodeConfig
from rcd.decode.stopping import check_prompts
from rcd.errors import RCDError
from rcd.models.pairing import check_pair

if TYPE_CHECKING:
    from rcd.api import Pipeline


def row_seeds(rows: int, seed: int, generator: torch.Generator | None, seeds: Sequence[int] | None = None) -> list[int]:
    """One seed a row, so that a row's draws do not depend on the batch: those of `seeds`, from `generator`, or
    seed + row."""
    if seeds is not None and (len(seeds) != rows or generator is not None):
        raise RCDError(f"{rows} prompts need {rows} seeds and no generator beside them, not {len(seeds)} seeds.")
    if seeds is None:
        seeds = [(seed + row) % 2**64 for row in range(rows)]
    if generator is not None:
        seeds = torch.randint(2**62, (rows,), generator=generator, device=generator.device).tolist()
    return list(seeds)


def check_reference(target: Pipeline, reference: Pipeline, prompts: list[list[int]], config: DecodeConfig) -> None:
    """A residual is a distribution over tokens: both models must mean the same tokens by the same ids, and the
    reference must be able to read whatever the target writes."""
    ours, theirs = target.settings, reference.settings
    check_pair(target.checkpoint, reference.checkpoint)
    if target.model.device != reference.model.device:
        raise RCDError(
            f"the reference is on {reference.model.device} and the target on {target.model.device}; load both on one."
        )
    known = ours.vocab_size if target.tokenizer is None else min(len(target.tokenizer), ours.vocab_size)
    if theirs.vocab_size < known:
        raise RCDError(
            f"the reference knows {theirs.vocab_size} tokens and the target {known}; a reference must know them all."
        )
    if ours.mask_token_id != theirs.mask_token_id and any(theirs.mask_token_id in prompt for prompt in prompts):
        raise RCDError(
            f"a prompt contains the token {theirs.mask_token_id}, which is the reference's mask; take it out."
        )
    assert config.block_length is not None
    try:
        check_prompts(prompts, replace(theirs, mask_token_id=-1), config.new_tokens, *config.rounding(ours))
    except RCDError as error:
        raise RCDError(f"the reference cannot read this: {error}") from error


def is_single(prompts: Any) -> bool:
    """One prompt rather than a batch: a text, a flat list of ids, a 1D tensor, or one conversation."""
    if isinstance(prompts, str):
        return True
    if hasattr(prompts, "tolist"):
        return bool(prompts.ndim == 1)
    return all(isinstance(item, (int, float, dict)) for item in prompts)
