"""Checks of what a call asks for: seeds, a reference beside a target, prompts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rcd.decode.config import DecodeConfig
from rcd.decode.filling import check_canvas
from rcd.decode.stopping import check_prompts
from rcd.errors import RCDError
from rcd.models.pairing import check_pair
from rcd.settings import described, entries, unknown_setting

if TYPE_CHECKING:
    from rcd.api import Pipeline

T = TypeVar("T")


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


def with_settings(config: Any, given: Mapping[str, Any], of: Any = DecodeConfig, owner: str = "decoding") -> Any:
    """A call's configuration (or those of its prompts) with the settings that stand beside it."""
    if not given:
        return config
    if isinstance(config, Sequence):
        return [with_settings(one, given, of, owner) for one in config]
    if config is not None and not isinstance(config, of):
        return config  # refused where it is resolved
    plain = of()
    names = {entry.name for entry in entries(of)}
    for name, value in given.items():
        if name not in names:
            raise unknown_setting(of, name, owner)
        if config is not None and getattr(config, name) != getattr(plain, name):
            old = getattr(config, name)
            raise RCDError(f"{name} stands in the configuration ({old!r}) and beside it ({value!r}); give it once.")
    return replace(config or plain, **given)


def keywords(of: type, gives: type | None = None) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A method whose `**settings` are those of a class: its signature names them, and its help tells what they are,
    and what the fields of `gives` are."""

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        own = inspect.signature(method)
        fixed = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        named = [
            inspect.Parameter(
                one.name, kind, default=one.default, annotation=one.type | None if one.optional else one.type
            )
            for one in entries(of)
        ]
        method.__signature__ = own.replace(parameters=[*fixed, *named])  # type: ignore[attr-defined]
        parts = [inspect.cleandoc(method.__doc__ or ""), described(of)]
        method.__doc__ = "\n\n".join([*parts, f"{gives.__name__}: {gives.__doc__}"] if gives else parts)
        return method

    return wrap


def check_call(
    target: Pipeline, reference: Pipeline | None, prompts: list[list[int]], configs: Sequence[DecodeConfig], probe: Any,
    canvases: Sequence[Sequence[int]],
) -> None:  # fmt: skip
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
    for number, (canvas, config) in enumerate(zip(canvases, configs, strict=True)):
        ends = (*target.settings.eos_token_ids, *config.stop_ids)
        which = f"prompt {number}" if len(prompts) > 1 else ""
        check_canvas(canvas, config.new_tokens, target.settings, ends, which)
        if canvas and reference is not None and config.travelling.needs_reference:
            check_reference_reads(target, reference, canvas)


def check_reference_reads(target: Pipeline, reference: Pipeline, canvas: Sequence[int]) -> None:
    """Whether the reference knows the tokens that a canvas gives."""
    ours, theirs = target.settings, reference.settings
    bad = next((one for one in canvas if one != ours.mask_token_id and one == theirs.mask_token_id), None)
    bad = next((one for one in canvas if one >= theirs.vocab_size and one != ours.mask_token_id), bad)
    if bad is not None:
        raise RCDError(f"the canvas gives the token {bad}, which the reference cannot read; take it out.")


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
