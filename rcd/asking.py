"""Checks of what a call asks for: seeds, a reference beside a target, prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
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
    if seeds is not None and not hasattr(seeds, "__len__"):
        raise RCDError(f"seeds are a list of whole numbers, one a prompt, not a {type(seeds).__name__}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise RCDError(f"generator is a torch.Generator, not a {type(generator).__name__}; a whole number is a seed.")
    if seeds is not None and (len(seeds) != rows or generator is not None):
        raise RCDError(f"{rows} prompts need {rows} seeds and no generator beside them, not {len(seeds)} seeds.")
    if seeds is None:
        seeds = [(seed + row) % 2**64 for row in range(rows)]
    if generator is not None:
        seeds = torch.randint(2**62, (rows,), generator=generator, device=generator.device).tolist()
    return list(seeds)


def check_call(
    target: Pipeline, reference: Pipeline | None, prompts: list[list[int]], configs: Sequence[DecodeConfig], probe: Any
) -> None:
    """Refuse a call before any work: every prompt is checked by its own configuration, all that are alike at once."""
    if reference is not None and not isinstance(reference, type(target)):
        raise RCDError(f"the reference is a Pipeline, such as rcd.load gives, not a {type(reference).__name__}.")
    if probe is not None and not callable(probe):
        raise RCDError(f"a probe is a function that is shown every step, not a {type(probe).__name__}.")
    if probe is not None and any(config.oracle for config in configs):
        raise RCDError("the oracle shows its steps to no probe; leave oracle or the probe out.")
    alike: dict[Any, list[int]] = {}
    for number, config in enumerate(configs):
        size = config.new_tokens, config.rounding(target.settings), config.travelling.needs_reference
        alike.setdefault(size, []).append(number)
    for (new_tokens, rounding, refers), numbers in alike.items():
        called = numbers if len(prompts) > 1 else ()
        some = [prompts[number] for number in numbers]
        if refers and reference is None:
            raise RCDError("this carry needs a reference model; name one with reference (--reference).")
        if refers and reference is not None:
            check_reference(target, reference, some, configs[numbers[0]], called)
        check_prompts(some, target.settings, new_tokens, rounding[0], rounding[1], numbers=called)


def stop_tokens(config: DecodeConfig, tokenizer: Any, mask: int) -> tuple[int, ...]:
    """The stop_ids of a request: a stop string that is a special token, which no text shows, is one."""
    added = tokenizer.get_added_vocab()
    special = [added[text] for text in config.stop if text in added]
    if mask in special:
        raise RCDError("a stop string is the mask, so that no answer holds it; leave it out.")
    return tuple(dict.fromkeys((*config.stop_ids, *special)))


def check_reference(
    target: Pipeline, reference: Pipeline, prompts: list[list[int]], config: DecodeConfig, numbers: Sequence[int] = ()
) -> None:
    """A residual is a distribution over tokens: both models must mean the same tokens by the same ids, and the
    reference must be able to read whatever the target writes."""
    ours, theirs = target.settings, reference.settings
    check_pair(target.checkpoint, reference.checkpoint)
    if target.model.device != reference.model.device:
        ours_on, theirs_on = target.model.device, reference.model.device
        raise RCDError(f"the reference is on {theirs_on} and the target on {ours_on}; load both on one.")
    known = ours.vocab_size if target.tokenizer is None else min(len(target.tokenizer), ours.vocab_size)
    if theirs.vocab_size < known:
        raise RCDError(
            f"the reference knows {theirs.vocab_size} tokens and the target {known}; a reference must know them all."
        )
    if ours.mask_token_id != theirs.mask_token_id and any(theirs.mask_token_id in prompt for prompt in prompts):
        mask = theirs.mask_token_id
        raise RCDError(f"a prompt contains the token {mask}, which is the reference's mask; take it out.")
    try:
        unmasked = replace(theirs, mask_token_id=-1)
        check_prompts(prompts, unmasked, config.new_tokens, *config.rounding(ours), numbers=numbers)
    except RCDError as error:
        raise RCDError(f"the reference cannot read this: {error}") from error


def is_single(prompts: Any) -> bool:
    """One prompt rather than a batch: a text, a flat list of ids, a 1D tensor, or one conversation."""
    if isinstance(prompts, str):
        return True
    if hasattr(prompts, "tolist"):
        if prompts.ndim == 0:
            raise RCDError("a prompt is a list of token ids, not a single one; put it into a list.")
        return bool(prompts.ndim == 1)
    return all(isinstance(item, (Real, dict)) for item in prompts)
