"""What a request gives of its answers: `rcd.canvas`, a prompt with masks, and `suffix`, OpenAI's text behind a gap."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from rcd.api import Pipeline
from rcd.decode.config import DecodeConfig
from rcd.decode.filling import alone, check_canvas, split
from rcd.errors import RCDError
from rcd.serve.pieces import Refusal
from rcd.serve.schema import Ask
from rcd.serve.text import Words

SHORT = 4096
"""Characters that are encoded on the event loop."""


class Laid(NamedTuple):
    """A prompt and its canvas."""

    prompt: list[int]
    canvas: list[int]
    told: int | None = None
    """So many tokens of the answer are its text; None: all."""


async def laid_out(
    pipeline: Pipeline, words: Words, config: DecodeConfig, ask: Ask, prompts: list[list[int]], most_tokens: int
) -> list[Laid]:
    """Every prompt with what is given of its answer; `most_tokens`: that a request may ask for."""
    mask = pipeline.settings.mask_token_id
    if ask.suffix:
        found = [Laid(prompt, *await _before(pipeline, words, config, ask)) for prompt in prompts]
    elif ask.canvas is not None:
        canvas = await _read(words, ask.canvas, mask, pipeline.settings.context_length)
        found = [Laid(prompt, canvas) if prompt else _alone(canvas, mask) for prompt in prompts]
    else:
        found = [Laid(prompt, []) if ask.chat else Laid(*split(prompt, mask)) for prompt in prompts]
    name = "suffix" if ask.suffix else "prompt" if ask.canvas is None else "rcd.canvas"
    for one in found:
        if len(one.canvas) > most_tokens:
            raise Refusal(f"the canvas has {len(one.canvas)} tokens and {most_tokens} is the most here.", name)
        context = pipeline.settings.context_length
        if one.canvas and len(one.prompt) + len(one.canvas) > context:
            raise Refusal(
                f"the prompt's {len(one.prompt)} tokens and the canvas's {len(one.canvas)} are more than the {context} "
                "that the model reads; shorten one of them.",
                name,
            )
        new = ask.settings.get("max_new_tokens") if one.told is None else None
        try:
            ends = [*pipeline.settings.eos_token_ids, *config.stop_ids]
            check_canvas(one.canvas, new or len(one.canvas), pipeline.settings, ends)
        except RCDError as error:
            raise Refusal(str(error).replace("max_new_tokens", "max_tokens"), name) from None
    return found


def _alone(canvas: list[int], mask: int) -> Laid:
    try:
        return Laid(*alone(canvas, mask))
    except RCDError as error:
        raise Refusal(str(error), "rcd.canvas") from None


async def _read(words: Words, canvas: str | list[int], mask: int, most: int) -> list[int]:
    if not isinstance(canvas, str):
        return canvas
    try:
        if len(canvas) <= SHORT:
            return words.canvas(canvas, mask, most)
        return await asyncio.to_thread(words.canvas_apart, canvas, mask, most)
    except RCDError as error:
        raise Refusal(str(error), "rcd.canvas") from None


async def _before(pipeline: Pipeline, words: Words, config: DecodeConfig, ask: Ask) -> tuple[list[int], int | None]:
    """(max_tokens masks and the suffix, how many they are)."""
    resolved, gap = pipeline.resolve(config), ask.settings.get("max_new_tokens")
    if pipeline.settings.attention != "bidirectional" or resolved.window == "d2f":
        raise Refusal(
            "suffix needs a model whose attention is bidirectional: this one decodes a block before it sees what "
            "stands behind it; leave it out.",
            "suffix",
        )
    if gap is None:
        raise Refusal("suffix needs max_tokens, the length of what stands before it; give both.", "suffix")
    if pipeline.tokenizer is None:
        raise Refusal("suffix is a text, and this model has no tokenizer; give rcd.canvas as token ids.", "suffix")
    mask = pipeline.settings.mask_token_id
    behind = await asyncio.to_thread(words.behind_apart, ask.suffix or "")
    if mask in behind:
        raise Refusal("suffix holds the mask; give such a text as rcd.canvas.", "suffix")
    return [*[mask] * gap, *behind], gap
