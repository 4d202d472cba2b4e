"""Command-line options that several verbs share, and the parts that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.errors import RCDError

if TYPE_CHECKING:
    from rcd.carry.base import Carry
    from rcd.decode.config import DecodeConfig

MODEL, CARRY, COMMIT, SAMPLING, LOADING = "Model", "Carry (what travels between steps)", "Commit", "Sampling", "Loading"

Model = Annotated[
    str, typer.Option("--model", "-m", help="A folder, a hub name, a .gguf file or bundled:NAME (rcd list model).")
]
DEFAULT_MODEL = "bundled:words-rcd"
Device = Annotated[str, typer.Option(help="auto (cuda, else mps, else cpu) or a name.", rich_help_panel=LOADING)]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=LOADING)]
Family = Annotated[
    str | None, typer.Option(help="Where config.json does not tell (rcd list family).", rich_help_panel=LOADING)
]
MaskId = Annotated[int | None, typer.Option(help="The mask token's id.", rich_help_panel=LOADING)]
EosId = Annotated[
    list[int] | None, typer.Option("--eos-token-id", help="End token; may be repeated.", rich_help_panel=LOADING)
]
Attention = Annotated[
    str | None, typer.Option(help="block_causal or bidirectional, for a causal start.", rich_help_panel=LOADING)
]
Shift = Annotated[
    int | None, typer.Option(help="1: outputs predict one position to the right.", rich_help_panel=LOADING)
]
Revision = Annotated[str | None, typer.Option(help="Of a hub name: branch or commit.", rich_help_panel=LOADING)]


Carries = Annotated[
    list[str] | None,
    typer.Option(
        "--carry",
        help="trained (what rcd.json says), or NAME or NAME,setting=value,... (rcd list carry).",
        rich_help_panel=CARRY,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value of any other decoding setting (docs/decoding.md).", rich_help_panel=COMMIT),
]
TRAINED = "trained"


class Interrupted(Exception):
    """Ctrl-C, with what is kept."""


@contextmanager
def keeping(what: str) -> Iterator[None]:
    """Around work that leaves something behind when it is interrupted."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(what) from error


@contextmanager
def keeping_answers(folder: Path) -> Iterator[None]:
    """Around evaluations in the folder or below it."""
    from rcd.evaluate.records import answered

    try:
        yield
    except KeyboardInterrupt as error:
        kept = f"the answers so far are in {folder}, and the same command goes on"
        raise Interrupted(kept if answered(folder) else "nothing was answered yet") from error


def values(texts: Iterable[str]) -> dict[str, Any]:
    """key=value, ...: a value is JSON where it can be, else a text."""
    out: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise RCDError(f"{text!r} should be key=value.")
        try:
            out[key.strip()] = json.loads(value)
        except json.JSONDecodeError:
            out[key.strip()] = {"None": None, "True": True, "False": False}.get(value, value)
    return out


def carry_spec(text: str, trained: dict[str, Any] | None) -> Carry:
    """`trained`, NAME or NAME,setting=value,...; over a checkpoint that was trained with the carry of that name only
    what is named changes."""
    from rcd.carry.base import make

    name, *settings = text.split(",")
    own = dict(trained or {"name": "none"})
    base = own.pop("name")
    name = base if name == TRAINED else name
    return make(name, {**(own if name == base else {}), **values(settings)})


def decode_settings(texts: list[str] | None, known: dict[str, Any]) -> DecodeConfig:
    """A configuration from flags (`known`; None: not given) and `--set key=value`."""
    from dataclasses import fields

    from rcd.decode.config import DecodeConfig
    from rcd.errors import unknown_name

    given = {key: value for key, value in known.items() if value is not None} | values(texts or [])
    names = [f.name for f in fields(DecodeConfig) if f.name != "carry"]
    for key in given:
        if key not in names:
            raise unknown_name("decoding setting", key, names)
    return DecodeConfig(**given)


def carry_of(name: str | None, trained: dict[str, Any] | None, given: dict[str, Any]) -> tuple[Carry | None, list[str]]:
    """The carry that the flags mean, and those of them that have no effect with it.

    Settings of the residual carry mean that carry when none is named; over a checkpoint that was trained with one
    they change only what they name.
    """
    from rcd.carry.base import make

    chosen = {key: value for key, value in given.items() if value is not None}
    if name is None and not chosen:
        return None, []
    own = dict(trained or {})
    base = own.pop("name", None)
    name = name or ("residual" if chosen else base)
    assert name is not None
    if name == "none":
        return make("none"), sorted(chosen)
    return make(name, {**(own if base == name else {}), **chosen}), []
