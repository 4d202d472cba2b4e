"""`rcd contamination`: GSM8K beside GSM1K and GSM-Plus (tab:gsm-contamination-study)."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rcd.cli import evaluate as own
from rcd.cli import options as opt
from rcd.errors import RCDError, whole


def contamination(
    model: opt.Model = opt.DEFAULT_MODEL,
    paths: Annotated[
        list[str] | None,
        typer.Option("--path", help="SET=FILE, a JSONL file of gsm8k, gsm1k or gsm-plus instead of the hub; repeat."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the answers there; the same folder goes on.")
    ] = None,
    carry: Annotated[
        str,
        typer.Option(help="trained (what rcd.json says), or NAME or NAME,setting=value,...", rich_help_panel=opt.CARRY),
    ] = opt.TRAINED,
    reference: Annotated[str | None, typer.Option(help="A reference checkpoint.", rich_help_panel=opt.CARRY)] = None,
    threshold: Annotated[float | None, typer.Option(help="In [0, 1].", rich_help_panel=opt.COMMIT)] = None,
    block_length: Annotated[int | None, typer.Option(help="By default its own.", rich_help_panel=opt.COMMIT)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="By default the model's or the task's.")] = None,
    settings: opt.Settings = None,
    limit: own.Limit = None,
    batch: own.Batch = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
) -> None:
    """How much of a GSM8K accuracy is left on new and on changed problems. Exit code 1: a set could not be loaded."""
    whole("batch", batch, least=1)
    files: dict[str, str] = {}
    for text in paths or []:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise RCDError(f"--path {text!r} should be SET=FILE, such as gsm8k=gsm8k.jsonl.")
        files[name] = file
    config = opt.decode_settings(
        settings, dict(threshold=threshold, block_length=block_length, max_new_tokens=max_new_tokens)
    )

    from rcd.api import load
    from rcd.evaluate.contamination import lines, load_sets, study

    sets, skipped = load_sets(files, limit)
    found: dict[str, Any] = {"model": model, "sets": {}, "drops": {}}
    if sets:
        pipeline = load(model, device=device, dtype=dtype)
        second = None if reference is None else (reference, load(reference, device=device, dtype=dtype))
        config = replace(config, carry=opt.carry_spec(carry, pipeline.checkpoint.rcd.carry))
        kept = "" if output is None else f"the answers so far are in {output}, and the same command goes on"
        with opt.keeping(kept), tempfile.TemporaryDirectory() as scratch:
            found = study(
                pipeline, sets, config, output or scratch, model=model, reference=second, batch=batch,
                progress=own.progress,
            )  # fmt: skip
    print(json.dumps({**found, "skipped": skipped}) if as_json else "\n".join(lines(found, skipped)))
    if skipped:
        raise typer.Exit(1)
