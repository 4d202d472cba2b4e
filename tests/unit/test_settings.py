"""One source of a setting's default, bound and help: what is refused, and what is generated."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from rcd import registry
from rcd.errors import RCDError
from rcd.settings import entries, json_schema, parse_pairs, setting, settings


@settings
class Knobs:
    """What the tests turn."""

    share: float = setting(default=0.5, help="A share\n    of all.", ge=0, le=1, why="1 is everything")
    count: int | None = setting(default=None, help="How many.", ge=1, le=9)
    above: float = setting(default=1.0, gt=0)
    """More than
    nothing."""
    free: float = setting(default=0.0, allow_inf_nan=True)
    weight: str = setting(default="entropy", choices="alpha", flag="--weight")
    side: str = setting(default="left", choices=("left", "right"))
    sure: bool = True
    pair: tuple[float, float] = (0.0, 1.0)
    names: dict[str, int] = setting(default_factory=dict)
    carry: str | Any = setting(default=None, must="a name or a carry")

    def __post_init__(self) -> None:
        if self.count == 7:
            raise RCDError("count cannot be 7; take 6 or 8.")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"share": 2}, "share must be in [0, 1], not 2; 1 is everything."),
        ({"share": float("nan")}, "share must be in [0, 1], not nan; 1 is everything."),
        ({"share": True}, "share must be in [0, 1], not True; 1 is everything."),
        ({"share": "0.5"}, "share must be in [0, 1], not '0.5'; 1 is everything."),
        ({"share": None}, "share must be in [0, 1], not None; 1 is everything."),
        ({"count": 0}, "count must be a whole number from 1 to 9, not 0."),
        ({"count": 2.0}, "count must be a whole number from 1 to 9, not 2.0."),
        ({"count": True}, "count must be a whole number from 1 to 9, not True."),
        ({"count": 7}, "count cannot be 7; take 6 or 8."),
        ({"above": 0}, "above must be a number above 0, not 0."),
        ({"above": float("inf")}, "above must be a number above 0, not inf."),
        ({"weight": "entrpy"}, "unknown alpha 'entrpy' (did you mean 'entropy'?); choose from: confidence, entropy, "),
        ({"weight": 3}, "unknown alpha 3; choose from: "),
        ({"side": "up"}, "unknown side 'up'; choose from: left, right."),
        ({"sure": 1}, "sure must be true or false, not 1."),
        ({"pair": (0.0, float("inf"))}, "pair must be "),
        ({"pair": "0.0"}, "pair must be "),
        ({"shar": 1}, "Knobs has no setting 'shar' (did you mean 'share'?); choose from: above, carry, "),
    ],
)
def test_a_bad_value_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    for refuse in (lambda: Knobs(**given), lambda: dataclasses.replace(Knobs(), **given)):
        with pytest.raises(RCDError) as caught:
            refuse()
        assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


@settings
class More(Knobs):
    """Inherits all of them."""

    side: str = setting(default="right", choices=("right", "wrong"))
    more: int = setting(default=0, help="One more.", ge=0)


@settings
class Needed:
    more: int = setting(help="It must be given.", ge=0)


def test_a_subclass_inherits_bounds_and_may_change_them() -> None:
    assert More(more=1).side == "right" and More(more=1).share == 0.5
    cases: list[tuple[dict[str, Any], str]] = [
        ({"share": 2}, r"share must be in \[0, 1\], not 2; 1 is everything"),
        ({"share": True}, r"share must be in \[0, 1\]"),
        ({"count": 10}, "count must be a whole number from 1 to 9"),
        ({"weight": "entrpy"}, "unknown alpha 'entrpy'"),
        ({"side": "left"}, "unknown side 'left'; choose from: right, wrong"),
        ({"more": -1}, "more must be a whole number of 0 or more"),
        ({"count": 7}, "count cannot be 7"),
        ({"shar": 1}, "More has no setting 'shar'"),
    ]
    for given, sentence in cases:
        with pytest.raises(RCDError, match=sentence):
            More(**{"more": 1, **given})
    found = {entry.name: entry for entry in entries(More)}
    assert found["share"] == {entry.name: entry for entry in entries(Knobs)}["share"]
    assert found["more"].default == 0 and found["side"].default == "right"
    assert json.dumps(More(more=1, share=1).share) == "1"


def test_a_setting_without_a_default_must_be_given() -> None:
    assert Needed(more=2).more == 2 and entries(Needed)[0].default is dataclasses.MISSING
    with pytest.raises(RCDError, match="Needed needs the setting 'more'"):
        Needed()  # type: ignore[call-arg]
    with pytest.raises(RCDError, match="more must be a whole number of 0 or more, not -1"):
        Needed(-1)


def test_what_a_value_must_be_can_be_said_in_words() -> None:
    @settings
    class Named:
        carry: str | dict[str, int] | None = setting(default=None, choices="carry", must="a name or a mapping")

    assert Named(carry="none").carry == "none" and Named(carry={"a": 1}).carry == {"a": 1}
    for value, sentence in (
        (3, "carry must be a name or a mapping, not 3"),
        ("residul", r"unknown carry 'residul' \(did you mean 'residual'\?\); choose from: "),
    ):
        with pytest.raises(RCDError, match=sentence):
            Named(carry=value)  # type: ignore[arg-type]


def test_a_value_is_kept_as_it_was_given() -> None:
    """4 and 4.0 are written differently, and files of before have both."""
    assert json.dumps(dataclasses.asdict(Knobs(share=1, above=4.5)))[:24] == '{"share": 1, "count": nu'
    assert Knobs(free=float("inf")).free == float("inf")
    assert Knobs(0.25, 3) == Knobs(share=0.25, count=3)
    with pytest.raises(RCDError, match=r"count must be"):
        Knobs(0.25, 30)


def test_it_is_a_frozen_dataclass() -> None:
    one = Knobs(share=0.25)
    assert {field.name: field.default for field in dataclasses.fields(Knobs)}["share"] == 0.5 == Knobs.share
    assert dataclasses.replace(one, side="right").share == 0.25
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.share = 1.0  # type: ignore[misc]


def test_a_class_without_settings_says_so() -> None:
    @settings
    class Bare:
        pass

    with pytest.raises(RCDError, match=r"Bare has no settings\."):
        Bare(x=1)  # type: ignore[call-arg]


def test_entries_hold_what_flags_and_docs_are_made_of() -> None:
    found = {entry.name: entry for entry in entries(Knobs)}
    share, count, weight = found["share"], found["count"], found["weight"]
    assert (share.type, share.default, share.help, share.ge, share.le) == (float, 0.5, "A share of all.", 0, 1)
    assert next(entry for entry in entries(Knobs) if entry.name == "above").help == "More than nothing."
    assert (count.type, count.default, count.optional, count.bounds) == (int, None, True, "a whole number from 1 to 9")
    assert weight.choices == tuple(registry.names("alpha")) and weight.flag == "--weight"
    assert found["names"].default == {} and found["above"].gt == 0


def test_choices_of_the_registry_are_looked_up_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PARTS["alpha"], "mine", "rcd.residual.alpha:one")
    assert Knobs(weight="mine").weight == "mine"
    assert "mine" in json_schema(Knobs)["properties"]["weight"]["enum"]


def test_pairs_are_read_by_the_settings_kind() -> None:
    given = ["share=1e-1", "count=none", "side=right", "sure=False", "pair=[0.5,1]", "weight=none"]
    assert parse_pairs(Knobs, given) == {
        "share": 0.1, "count": None, "side": "right", "sure": False, "pair": (0.5, 1), "weight": "none",
    }  # fmt: skip
    with pytest.raises(RCDError, match="'share' should be key=value"):
        parse_pairs(Knobs, ["share"])
    with pytest.raises(RCDError, match=r"the run has no setting 'shar' \(did you mean 'share'\?\)"):
        parse_pairs(Knobs, ["shar=1"], owner="the run")


def test_the_json_schema_has_defaults_bounds_and_help() -> None:
    schema = json_schema(Knobs)
    share = schema["properties"]["share"]
    assert (share["default"], share["minimum"], share["maximum"], share["description"]) == (
        0.5,
        0,
        1,
        "A share of all.",
    )
    assert schema["properties"]["side"]["enum"] == ["left", "right"]
    assert json.dumps(schema)
