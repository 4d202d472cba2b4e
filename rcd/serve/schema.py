"""The bodies of requests: one table of what is known, refused or ignored, from which OpenAPI is written as well.

Names, kinds, bounds and words of decoding's own settings are taken from the settings (`rcd.settings:entries`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from rcd import registry
from rcd.decode.request_settings import MOST_LOGPROBS, RequestSettings
from rcd.settings import Entry, entries

TEXTS: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
}
IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPT: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, IDS, {"type": "array", "items": IDS}]
}
ABOUT_PROMPT = "A text, several, or token ids; without it, the first words of rcd.canvas are the prompt."
CANVAS: dict[str, Any] = {"anyOf": [{"type": "string"}, IDS, {"type": "null"}]}
MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                            "additionalProperties": False,
                        },
                    },
                ]
            },
            "name": {"type": "string"},
        },
        "additionalProperties": False,
    },
}

IGNORED: dict[str, tuple[type, ...]] = {
    "user": (str,),
    "safety_identifier": (str,),
    "prompt_cache_key": (str,),
    "metadata": (dict,),
    "store": (bool,),
    "service_tier": (str,),
    "prediction": (dict,),
}
"""Fields that change no answer, and their kinds: they are taken and not looked at."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
}
"""Fields of OpenAI's that would change the answer and are not supported: refused but for these values and null. What
stands in a body (`suffix` in a completion's) is not of these there."""
ABOUT_CANVAS = (
    "The answer's beginning with tokens given: a text with [MASK] or [MASK:12] where tokens are wanted, or token ids. "
    "Without max_tokens the answer is as long."
)
ABOUT_SUFFIX = (
    "The text behind the gap of max_tokens tokens that is filled in; the answer is what stands in the gap. For models "
    "whose attention is bidirectional."
)
OTHERS = ("max_new_tokens", "temperature", "top_p", "seed", "residual_scale", "stop", "stop_ids", "logprobs")
"""Settings of a request that have a name of OpenAI's, or another one here."""
OWN = tuple(entry.name for entry in entries(RequestSettings) if entry.name not in OTHERS)
"""The others stand in `rcd`."""
RENAMED = {"num_inference_steps": "steps"}


@dataclass(frozen=True)
class Ask:
    """A checked body: plain values that may travel between processes."""

    chat: bool
    model: str | None
    prompts: list[Any]
    """Texts or token ids; of a chat, its messages as the only one."""
    n: int = 1
    seed: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Of `RequestSettings`, those that were given."""
    carry: bool | None = None
    t_res: float | None = None
    alpha_scale: float | None = None
    stream: bool = False
    include_usage: bool = False
    drafts: bool = False
    alternatives: int = 0
    logprobs: int | None = None
    canvas: Any = None
    """Of every answer: a text with masks, or token ids."""
    suffix: str | None = None


def _field(entry: Entry, default: Any = None) -> Any:
    """A field of a body, from a setting."""
    kind: Any = entry.type
    limits = {key: value for key in ("ge", "gt", "le") if (value := getattr(entry, key)) is not None}
    return (kind | None, Field(default=default, description=entry.help, **limits))


def _plain(kind: Any, about: str, default: Any = None, **limits: Any) -> Any:
    return (kind | None, Field(default=default, description=about, **limits))


@functools.cache
def own_settings() -> dict[str, Entry]:
    return {entry.name: entry for entry in entries(RequestSettings)}


@functools.cache
def carry_settings() -> dict[str, Entry]:
    return {entry.name: entry for entry in entries(registry.get("carry", "residual"))}


@functools.cache
def bodies() -> tuple[type[BaseModel], type[BaseModel]]:
    """The bodies of /v1/completions and of /v1/chat/completions."""
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    ours, residual = own_settings(), carry_settings()
    knobs = {RENAMED.get(name, name): _field(ours[name]) for name in OWN}
    knobs |= {name: _field(residual[name]) for name in ("t_res", "alpha_scale")}
    knobs |= {
        "carry": _plain(bool, "False decodes without residual context (SeqD). None: as the model was trained."),
        "drafts": _plain(bool, "With `stream`: an event after each step with the whole canvas."),
        "alternatives": _plain(int, "Alternatives of each place in a draft.", ge=0, le=MOST_LOGPROBS),
        "canvas": (Any, Field(default=None, description=ABOUT_CANVAS, json_schema_extra=CANVAS)),
    }
    rcd = create_model("RCD", __config__=config, **knobs)
    usage = create_model(
        "StreamOptions", __config__=config,
        include_usage=_plain(bool, "A last chunk with the usage."),
        include_obfuscation=_plain(bool, "Ignored."),
    )  # fmt: skip
    shared: dict[str, Any] = {
        "model": _plain(str, "One of /v1/models; may be left out for the first."),
        "n": _plain(int, "Answers to each prompt.", ge=1),
        **{name: _field(ours[name]) for name in ("temperature", "top_p", "seed")},
        "stop": (Any, Field(default=None, description=ours["stop"].help, json_schema_extra=TEXTS)),
        "stream": _plain(bool, "Send the text as it is committed, as server-sent events."),
        "stream_options": _plain(usage, "Of streams."),
        "max_tokens": _plain(int, "The most new tokens; by default the model's.", ge=1),
        "rcd": _plain(rcd, "What OpenAI's fields have no name for."),
    }
    completion = create_model(
        "CompletionBody", __config__=config,
        prompt=(Any, Field(default=None, description=ABOUT_PROMPT, json_schema_extra=PROMPT)),
        suffix=_plain(str, ABOUT_SUFFIX), logprobs=_field(ours["logprobs"]), **shared,
    )  # fmt: skip
    chat = create_model(
        "ChatBody", __config__=config,
        messages=(Any, Field(description="What was said; the last message is answered.", json_schema_extra=MESSAGES)),
        max_completion_tokens=_plain(int, "The same as max_tokens.", ge=1),
        logprobs=_plain(bool, "Log probabilities of the tokens."),
        top_logprobs=_plain(int, "Alternatives of each token.", ge=0, le=MOST_LOGPROBS), **shared,
    )  # fmt: skip
    return completion, chat
