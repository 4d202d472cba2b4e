"""What is no request is refused with a 400 that names the field: every kind of value in every field, and no JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rcd.serve.parse import parse
from rcd.serve.pieces import Refusal
from rcd.serve.schema import IGNORED, NEUTRAL, Ask, bodies
from tests.serve.conftest import QUESTION, Api

BOUNDS = {"max_n": 16, "max_prompts": 64, "max_messages": 8, "most_tokens": 4096}
ODD: list[Any] = [
    True, False, 0, -1, 5, 10**400, 1.5, -0.5, 1e308, "", "x", "\u0000", [], [None], [[]], [{}], ["x", 1], {}, {"a": 1},
    [True], [1, "x"], [-1], [2**64], {"type": "json_object"},
]  # fmt: skip
FIELDS = [(chat, name) for chat, body in enumerate(bodies()) for name in body.model_fields]
KNOBS = list(bodies()[0].model_fields["rcd"].annotation.__args__[0].model_fields)  # type: ignore[union-attr]


def valid(chat: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": QUESTION}


def asked(chat: int, **more: Any) -> Ask:
    return parse(json.dumps({**valid(chat), **more}).encode(), bool(chat), **BOUNDS)


def names(chat: int, field: str, **more: Any) -> None:
    with pytest.raises(Refusal) as raised:
        asked(chat, **more)
    refused = raised.value.refused
    assert refused.status == 400 and refused.message.endswith(".") and len(refused.message) < 500
    assert refused.param is not None and refused.param.split(".")[0].split("[")[0] == field, refused


ALLOWED: dict[str, tuple[Any, ...]] = {
    "model": ("", "x", "\u0000"), "prompt": ("", "x", "\u0000"), "stop": ("", "x", "\u0000", []), "n": (5,),
    "stream": (True, False), "temperature": (0, 5, 1.5, 1e308), "top_p": (), "seed": (0, 5), "max_tokens": (5,),
    "max_completion_tokens": (5,), "top_logprobs": (), "rcd": ({},), "stream_options": (), "messages": (),
    "suffix": ("", "x", "\u0000"),
}  # fmt: skip
"""Of the odd values, those that are none for a field; whether a model can do it is asked later."""


@pytest.mark.parametrize(("chat", "name"), FIELDS)
def test_every_kind_of_value_in_every_field_is_taken_or_refused_by_name(chat: int, name: str) -> None:
    allowed = ALLOWED.get(name, (0, 5) if (name, chat) == ("logprobs", 0) else (True, False))
    refused = 0
    for value in ODD:
        if any(type(value) is type(one) and value == one for one in allowed):
            asked(chat, **{name: value})
            continue
        names(chat, name, **{name: value})
        refused += 1
    assert refused >= len(ODD) - len(allowed)
    if name not in ("prompt", "messages"):
        assert asked(chat, **{name: None}) == asked(chat)


@pytest.mark.parametrize("knob", KNOBS)
def test_every_kind_of_value_in_every_knob_is_taken_or_refused_by_name(knob: str) -> None:
    flags = knob in ("carry", "drafts")
    for value in ODD:
        if knob == "canvas" and (isinstance(value, str) or value == []):
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, bool) and flags:
            asked(0, rcd={knob: value}, stream=True)
        elif number and not flags and value in (0, 5) and knob not in ("steps", "canvas"):
            continue  # whether it is in bounds is the setting's own; other tests ask
        elif not number or flags:
            names(0, "rcd", rcd={knob: value}, stream=True)
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        with pytest.raises(Refusal):
            parse(f'{{"prompt": "x", "rcd": {{"{knob}": {value}}}}}'.encode(), False, **BOUNDS)


@pytest.mark.parametrize("name", [*IGNORED, *NEUTRAL])
def test_fields_that_change_nothing_are_ignored_and_others_refused_by_name(name: str) -> None:
    plain = asked(1)
    assert asked(1, **{name: None}) == plain
    for value in NEUTRAL.get(name, ()):
        assert asked(1, **{name: value}) == plain
    for value in ({"type": "json_object"}, [{"type": "function"}], 2, 0.5, "high") if name in NEUTRAL else (3, [1]):
        names(1, name, **{name: value})
    if name in NEUTRAL and 0 in NEUTRAL[name] and False not in [v for v in NEUTRAL[name] if isinstance(v, bool)]:
        names(1, name, **{name: False})  # a boolean is no number


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"5", b"{]", b'{"prompt": "x"', b"{'prompt': 'x'}", b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}', b"\xef\xbb\xbf", b'{"prompt": NaN}', b"[" * 100_000, b'{"rcd":' * 50_000,
        b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}", b'{"n": ' + b"9" * 5000 + b"}", b'{"prompt": "x"} {}',
        b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "n": 1.0}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("chat", [False, True])
def test_what_is_no_json_object_is_refused(content: bytes, chat: bool) -> None:
    with pytest.raises(Refusal) as raised:
        parse(content, chat, **BOUNDS)
    assert raised.value.refused.status == 400 and len(raised.value.refused.message) < 500


def test_unknown_fields_are_refused_with_the_one_that_was_meant() -> None:
    for field, meant in (("temprature", "temperature"), ("max_token", "max_tokens"), ("threshold", "in 'rcd'")):
        with pytest.raises(Refusal, match=meant):
            asked(0, **{field: 1})
    with pytest.raises(Refusal, match="did you mean 'threshold'") as raised:
        asked(0, rcd={"treshold": 1})
    assert raised.value.refused.param == "rcd.treshold"
    with pytest.raises(Refusal, match=r"that is the server's own, .* \(rcd serve --commit\); leave it out"):
        asked(0, rcd={"commit": "klass"})
    names(0, "x" * 64, **{"x" * 5000: 1})


def test_bounds_are_those_of_the_server_and_of_the_settings() -> None:
    for field, value in (
        ("n", 17),
        ("n", 0),
        ("max_tokens", 4097),
        ("seed", 2**64),
        ("top_p", 1.1),
        ("temperature", -1),
    ):
        names(0, field, **{field: value})
    names(0, "prompt", prompt=["x"] * 65)
    names(0, "prompt", prompt=[[2**31]])
    names(0, "logprobs", logprobs=21)
    names(1, "messages", messages=[{"role": "user", "content": "x"}] * 9)
    names(1, "top_logprobs", top_logprobs=2)
    names(1, "max_completion_tokens", max_tokens=3, max_completion_tokens=3)
    names(0, "stream_options", stream_options={"include_usage": True})
    names(0, "rcd", rcd={"drafts": True})
    assert asked(0, stop="x").settings["stop"] == ("x",) and asked(0, n=16).n == 16


@pytest.mark.parametrize(
    "message",
    [
        5, "x", {}, {"role": "user"}, {"content": "x"}, {"role": "tool", "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": []}, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]}, {"role": "user", "content": "x", "tool_calls": [1]},
        {"role": "user", "content": "x", "name": 5}, {"role": ["user"], "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]},
    ],
)  # fmt: skip
def test_messages_that_are_none_are_refused_by_their_place(message: Any) -> None:
    with pytest.raises(Refusal) as raised:
        asked(1, messages=[{"role": "user", "content": "x"}, message])
    assert str(raised.value.refused.param).startswith("messages[1]")


def test_what_only_the_model_can_tell_is_a_400_too(api: Api) -> None:
    assert api.refused(max_tokens=4000)["code"] == "context_length_exceeded"
    assert api.refused(prompt="")["param"] == "prompt"
    assert api.refused(prompt=[100_000])["message"]
    assert api.refused(stop=[""])["param"] == "stop"
    assert api.refused(stop=["x"] * 17)["param"] == "stop"
    assert api.refused(temperature=1e-9)["param"] == "temperature"
    assert api.refused(rcd={"top_k": 2**40})["param"] == "rcd.top_k"
    assert api.refused(rcd={"alpha_scale": -1})["param"] == "rcd.alpha_scale"
    assert api.refused(rcd={"t_res": 1e-9})["param"] == "rcd.t_res"
    assert api.refused(prompt="x " * 400)["code"] == "context_length_exceeded"
