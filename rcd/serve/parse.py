"""The bytes of a body -> what it asks for, or a refusal that names the field."""

from __future__ import annotations

import difflib
import reprlib
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from rcd.decode.config import DecodeConfig
from rcd.errors import first_line
from rcd.serve.pieces import Refusal
from rcd.serve.schema import (
    IGNORED,
    MESSAGES,
    NEUTRAL,
    OWN,
    RENAMED,
    Ask,
    bodies,
    carry_settings,
    own_settings,
)
from rcd.settings import entries


def parse(content: bytes, chat: bool, *, max_n: int, max_prompts: int, max_messages: int, most_tokens: int) -> Ask:
    """A request's body; what is wrong with it is a Refusal that names the field."""
    body = _valid(_object(content), bodies()[chat])
    n = body.n or 1
    _at_most("n", n, max_n)
    bound = "max_completion_tokens" if chat and body.max_completion_tokens else "max_tokens"
    tokens = getattr(body, bound)
    if chat and None not in (body.max_tokens, body.max_completion_tokens):
        raise Refusal("max_tokens and max_completion_tokens mean the same; give one of them.", "max_completion_tokens")
    _at_most(bound, tokens or 1, most_tokens)
    if body.stream_options is not None and not body.stream:
        raise Refusal("stream_options is of streams; set stream to true or leave it out.", "stream_options")
    if chat and body.top_logprobs is not None and not body.logprobs:
        raise Refusal("top_logprobs needs logprobs: true.", "top_logprobs")
    logprobs = ((body.top_logprobs or 0) if body.logprobs else None) if chat else body.logprobs
    own = body.rcd.model_dump(exclude_none=True) if body.rcd is not None else {}
    drafts = own.pop("drafts", False)
    if drafts and not body.stream:
        raise Refusal("rcd.drafts are sent in a stream; set stream to true.", "rcd.drafts")
    alternatives, canvas = own.pop("alternatives", 0), _canvas(own.pop("canvas", None))
    if chat:
        prompts = [_messages(body.messages, max_messages)]
    else:
        prompts = [[]] if canvas is not None and body.prompt in (None, "", []) else _prompts(body.prompt, max_prompts)
    suffix = None if chat else body.suffix
    if suffix and canvas is not None:
        raise Refusal("suffix and rcd.canvas both say what is given; give one of them.", "suffix")
    back = {short: name for name, short in RENAMED.items()}
    settings = {back.get(key, key): value for key, value in own.items() if back.get(key, key) in OWN}
    settings |= {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
    settings |= {"max_new_tokens": tokens} if tokens is not None else {}
    settings |= {"stop": stop} if (stop := _stop(body.stop)) else {}
    wanted = [value for value in (logprobs, alternatives or None) if value is not None]
    settings |= {"logprobs": max(wanted)} if wanted else {}
    return Ask(
        chat, body.model, prompts, n, body.seed, settings, own.get("carry"), own.get("t_res"), own.get("alpha_scale"),
        bool(body.stream), bool(body.stream_options and body.stream_options.include_usage), drafts, alternatives,
        logprobs, canvas, suffix or None,
    )  # fmt: skip


def _canvas(canvas: Any) -> Any:
    if canvas is None or isinstance(canvas, str):
        return canvas or None
    if not isinstance(canvas, list) or not all(type(token) is int for token in canvas):
        raise Refusal(
            f"rcd.canvas is a text with [MASK:12] where tokens are wanted, or token ids, not {_short(canvas)}.",
            "rcd.canvas",
        )
    return _ids(canvas, "rcd.canvas") or None


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(f"the body is no JSON ({first_line(error)}); send one JSON object.") from None
    if not isinstance(found, dict):
        raise Refusal('the body is no JSON object; send one such as {"prompt": "..."}.')
    return found


def _valid(given: dict[str, Any], model: type[BaseModel]) -> Any:
    known = model.model_fields
    kept = {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
        elif name in IGNORED:
            kinds = IGNORED[name]
            if value is not None and type(value) not in kinds:
                raise Refusal(f"{name} must be {_kind(kinds[0])}, not {_short(value)}.", name)
        elif name in NEUTRAL:
            if value is not None and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                raise Refusal(f"{name} is not supported here and would change the answer; leave it out.", name)
        else:
            raise _unknown(name, [*known, *IGNORED, *NEUTRAL], "the request")
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise _refusal(error, model) from None


def _refusal(error: ValidationError, model: type[BaseModel]) -> Refusal:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    if first["type"] == "missing":
        return Refusal(f"{name} is missing; give it.", name)
    if first["type"] == "extra_forbidden":
        fields: Any = model.model_fields[path[0]].annotation
        inner = next(one for one in fields.__args__ if hasattr(one, "model_fields"))
        return _unknown(path[-1], list(inner.model_fields), path[0])
    entry = own_settings().get(path[-1]) or carry_settings().get(path[-1])
    back = {short: name for name, short in RENAMED.items()}
    entry = entry or own_settings().get(back.get(path[-1], ""))
    value = first["input"]
    if entry is not None and first["type"] not in ("string_type",):
        must = entry.bounds
        return Refusal(f"{name} must be {must}, not {_short(value)}{'; ' + entry.why if entry.why else ''}.", name)
    return Refusal(f"{name} must be {_must(first)}, not {_short(value)}.", name)


WANTED = {
    "int": "a whole number", "bool": "true or false", "string": "a text", "model": "an object", "dict": "an object",
    "float": "a number",
}  # fmt: skip


def _must(first: Any) -> str:
    """What pydantic asked for, as part of a sentence."""
    context = first.get("ctx", {})
    for kind, words in (("ge", "of {} or more"), ("gt", "above {}"), ("le", "of {} or less")):
        if kind in context:
            return f"a number {words.format(context[kind])}"
    return WANTED.get(first["type"].split("_")[0], "of another kind")


def _unknown(name: str, names: list[str], owner: str) -> Refusal:
    inner = owner == "the request"
    if owner == "rcd" and name in {entry.name for entry in entries(DecodeConfig)} - {*own_settings()}:
        flag = f"--{name.replace('_', '-')}"
        raise Refusal(
            f"rcd has no field {_short(name)}: that is the server's own, the same for all requests (rcd serve {flag}); "
            "leave it out.", f"{owner}.{name}", "unknown_parameter",
        )  # fmt: skip
    near = difflib.get_close_matches(name[:64], names, n=1)
    own = [*OWN, *RENAMED.values(), "t_res", "alpha_scale", "carry", "drafts", "alternatives", "canvas"]
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    if not inner and name in RENAMED:
        hint = f" (did you mean {RENAMED[name]!r}?)"
    if inner and name in own:
        hint = f" (did you mean {RENAMED.get(name, name)!r} in 'rcd'?)"
    shown = _short(name)
    param = name[:64] if inner else f"{owner}.{name[:64]}"
    way_out = "write that instead" if hint else "leave it out"
    return Refusal(f"{owner} has no field {shown}{hint}; {way_out}.", param, "unknown_parameter")


def _kind(kind: type) -> str:
    return {str: "a text", dict: "an object", bool: "true or false"}[kind]


def _same(value: Any, neutral: Any) -> bool:
    """As JSON: a boolean is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _at_most(name: str, value: int, most: int, what: str = "") -> None:
    if value > most:
        raise Refusal(f"{what or name} is {_short(value)} and {most} is the most here; lower it.", name)


def _prompts(prompt: Any, most: int) -> list[Any]:
    """Texts, or lists of token ids."""
    if prompt is None:
        raise Refusal("prompt is missing; give it.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise Refusal(f"prompt is a text, a list of texts, or token ids, not {_short(prompt)}.", "prompt")
    if all(type(item) is int for item in prompt):
        return [_ids(prompt)]
    _at_most("prompt", len(prompt), most, "the number of prompts")
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) and item and all(type(one) is int for one in item) for item in prompt):
        return [_ids(item) for item in prompt]
    raise Refusal("prompt is a list of several kinds; give texts, or lists of token ids.", "prompt")


def _ids(ids: list[int], name: str = "prompt") -> list[int]:
    bad = next((token for token in ids if not 0 <= token < 2**31), None)
    if bad is not None:
        raise Refusal(f"{name} has the token id {_short(bad)}, which no vocabulary has.", name)
    return ids


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise Refusal(f"stop is a text or a list of texts, not {_short(stop)}.", "stop")
    return tuple(texts)


def _messages(messages: Any, most: int) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise Refusal('messages is a list such as [{"role": "user", "content": "..."}].', "messages")
    _at_most("messages", len(messages), most, "the number of messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, name: str) -> dict[str, str]:
    roles = MESSAGES["items"]["properties"]["role"]["enum"]
    if not isinstance(message, dict):
        raise Refusal(f"{name} is an object with a role and a content, not {_short(message)}.", name)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in roles:
        raise Refusal(f"{name}.role is one of {', '.join(roles)}, not {_short(role)}.", f"{name}.role")
    for key, value in message.items():
        if key not in ("role", "content", "name") and value is not None and value != []:
            raise Refusal(f"{name} has the field {_short(key)}, which is not supported; leave it out.", name)
    if not isinstance(message.get("name"), (str, type(None))):
        raise Refusal(f"{name}.name is a text, not {_short(message['name'])}.", f"{name}.name")
    if isinstance(content, list) and content:
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part.get("text") for part in parts if part.keys() <= {"type", "text"}]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise Refusal(f"{name}.content is a text or a list of text parts, not {_short(content)}.", f"{name}.content")
    return {"role": "system" if role == "developer" else role, "content": content}
