"""Command-line options that several verbs share, and the parts that they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

CARRY, COMMIT, SAMPLING = "Carry (what travels between steps)", "Commit", "Sampling"
PASSES, LOADING, SERVER, RAY = "Passes", "Loading", "Server", "Ray"

Model = Annotated[
    str, typer.Option("--model", "-m", help="A folder, a hub name, a .gguf file or bundled:NAME (rcd list model).")
]
DEFAULT_MODEL = "bundled:words-rcd"
BUNDLED_THRESHOLD = 0.95
"""With which bundled models are shown and served: at 0.85, the usual one, they commit too early."""
Device = Annotated[str, typer.Option(help="auto (cuda, else mps, else cpu) or a name.", rich_help_panel=LOADING)]
DType = Annotated[
    str,
    typer.Option(
        help="auto (as stored; on a CPU float32, but bfloat16 as stored where the model is large and the chip computes "
        "in it), float32, bfloat16 or float16.",
        rich_help_panel=LOADING,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="int8 or int4: weights in so many bits; int4,head=exact (or int8, int4) says how the head is kept "
        "(docs/quantise.md).",
        rich_help_panel=LOADING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Of torch, on a CPU; by default OMP_NUM_THREADS, else one for a small model.", rich_help_panel=LOADING
    ),
]
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
    typer.Option("--set", help="key=value of any decoding setting (docs/decoding.md); may be repeated.",
                 rich_help_panel=COMMIT),
]  # fmt: skip
CarryOf = Annotated[
    str,
    typer.Option(
        "--carry", help="trained (what rcd.json says), or NAME or NAME,setting=value,...", rich_help_panel=CARRY
    ),
]
Reference = Annotated[str | None, typer.Option(help="A reference checkpoint.", rich_help_panel=CARRY)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TRAINED = "trained"
TASKS_LENGTH = "the model's or the task's"


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
