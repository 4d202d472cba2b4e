"""`rcd export`: a run's checkpoint, sharded or not, as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rcd.errors import RCDError
from rcd.terminal import show


def export(
    run: Annotated[Path, typer.Argument(help="A stage of a run: OUTPUT/reference or OUTPUT/target.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the last by default.")] = None,
) -> None:
    """Write a training checkpoint as a folder that rcd and the model family's own code open."""
    from rcd.train.export import export_checkpoint

    if not (run / "train.json").is_file():
        raise RCDError(f"{run} is no stage of a run: it has no train.json; give OUTPUT/reference or OUTPUT/target.")
    written = export_checkpoint(run, json.loads((run / "train.json").read_text()), output, step)
    show(f"step {written} of {run} is in {output}")
