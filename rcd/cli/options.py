"""Command-line options that several verbs share, and the parts that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rcd.carry.base import Carry

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
