"""From a checked body to what the decoder takes: prompts as token ids, a configuration for every choice."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rcd.api import Pipeline
from rcd.carry.base import Carry
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError, first_line
from rcd.serve.canvases import SHORT, laid_out
from rcd.serve.pieces import Refusal, Refused
from rcd.serve.schema import OWN, RENAMED, Ask
from rcd.serve.text import Words

SEEDS = 2**64
LEAVING = Refused(503, "the server is shutting down; send the request again later.", None, "shutting_down", 5)


def DEADLINE(code: str, why: str) -> Refused:
    return Refused(504, f"the request was given up because {why}; try again, or ask for less.", None, code)


@dataclass(frozen=True)
class Job:
    """One choice."""

    prompt: list[int]
    config: DecodeConfig
    apart: Any = None
    """The carry, where its settings are the request's own."""
    canvas: list[int] = field(default_factory=list)
    told: int | None = None
    """So many tokens of the answer are its text; None: all."""


async def jobs(pipeline: Pipeline, words: Words, base: DecodeConfig, ask: Ask, most_tokens: int) -> list[Job]:
    """Every choice of the request, prompt by prompt."""
    prompts = await _encoded(words, ask)
    config, apart = configured(pipeline, base, ask)
    seed = ask.seed if ask.seed is not None else base.seed
    if ask.seed is None and config.temperature > 0:
        seed = random.getrandbits(64)
    made: list[Job] = []
    for prompt, canvas, told in await laid_out(pipeline, words, config, ask, prompts, most_tokens):
        if not prompt:
            raise Refusal("the prompt is empty; give at least one token.", "messages" if ask.chat else "prompt")
        seeds, own = range(seed + len(made), seed + len(made) + ask.n), config
        if canvas and (told is not None or "max_new_tokens" not in ask.settings):
            own = replace(config, max_new_tokens=len(canvas))
        made += [
            Job(prompt, own if one == own.seed else replace(own, seed=one % SEEDS), apart, canvas, told)
            for one in seeds
        ]
    return made


async def _encoded(words: Words, ask: Ask) -> list[list[int]]:
    """Prompts as token ids; long ones in another thread, so that nobody waits for them."""
    prompts: list[Any] = ask.prompts
    if ask.chat and not words.chat:
        prompts = [_only(prompts[0])]
    if all(isinstance(prompt, list) and all(isinstance(one, int) for one in prompt[:1]) for prompt in prompts):
        return prompts
    size = sum(len(text) for prompt in prompts for text in _texts(prompt))
    try:
        return words.encode(prompts) if size <= SHORT else await asyncio.to_thread(words.encode_apart, prompts)
    except RCDError:
        raise
    except Exception as error:  # the template's own: it refuses roles and orders in ways of its own
        if not ask.chat:
            raise
        raise Refusal(f"the model's chat template refuses these messages ({first_line(error)}).", "messages") from error


def _texts(prompt: Any) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [part["content"] for part in prompt]


def _only(messages: list[dict[str, str]]) -> str:
    """What a model without a chat template is asked: the one message of a user."""
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise Refusal(
            "this model has no chat template, so it takes one message of the user and nothing else; leave the others "
            "out, or use /v1/completions.",
            "messages",
        )
    return messages[0]["content"]


def configured(pipeline: Pipeline, base: DecodeConfig, ask: Ask) -> tuple[DecodeConfig, Carry | None]:
    """(the request's configuration, its carry if that is its own). `base` names its carry."""
    try:
        config = replace(base, **ask.settings)
        stopped = pipeline.tokenizer is None and config.stop
    except RCDError as error:
        raise Refusal(str(error), _named(error, ask)) from None
    if stopped:
        raise Refusal("stop strings are texts, and this model has no tokenizer; leave stop out.", "stop")
    carry = base.travelling
    if ask.carry and not carry.carries:
        raise Refusal(
            "this model is served without residual context; leave rcd.carry out, or serve it with --carry residual.",
            "rcd.carry",
        )
    if ask.carry is False:
        return replace(config, residual_scale=0.0) if carry.carries else config, None
    own: dict[str, float] = {}
    scale = ask.alpha_scale
    if scale is not None:
        _has(carry, "alpha_scale")
        if scale <= 1 and (carry.scalable or scale in (0, 1)):
            config = replace(config, residual_scale=scale)
        else:
            own["alpha_scale"] = scale * _has(carry, "alpha_scale")
    if ask.t_res is not None and _has(carry, "t_res") != ask.t_res:
        own["t_res"] = ask.t_res
    if not own:
        return config, None
    changed = replace(carry, **own)  # type: ignore[type-var]
    return replace(config, carry=changed), changed


def _has(carry: Carry, name: str) -> float:
    """A setting of the model's carry, which must have it."""
    found: dict[str, Any] = asdict(carry)  # type: ignore[call-overload]
    if name not in found:
        raise Refusal(f"this model carries nothing that has {name}; leave rcd.{name} out.", f"rcd.{name}")
    return float(found[name])


def _named(error: RCDError, ask: Ask) -> str | None:
    """The field that a refusal of the settings is of."""
    names = {"max_new_tokens": "max_tokens", **{name: f"rcd.{RENAMED.get(name, name)}" for name in OWN}}
    told = sorted((name for name in ask.settings if name in str(error)), key=len)
    found = told[-1] if told else None
    if found is None and "stop string" in str(error):
        return "stop"
    return None if found is None else names.get(found, found)
