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
from rcd.cli.flags import Given, decoding
from rcd.errors import RCDError, whole
from rcd.terminal import show


@decoding("threshold", "block_length", "max_new_tokens", max_new_tokens=opt.TASKS_LENGTH)
def contamination(
    model: opt.Model = opt.DEFAULT_MODEL,
    paths: Annotated[
        list[str] | None,
        typer.Option("--path", help="SET=FILE, a JSONL file of gsm8k, gsm1k or gsm-plus instead of the hub; repeat."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the answers there; the same folder goes on.")
    ] = None,
    carry: opt.CarryOf = opt.TRAINED,
    reference: opt.Reference = None,
    *,
    decoding: Given,
    limit: own.Limit = None,
    batch: own.Batch = 32,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
    threads: opt.Threads = None,
) -> None:
    """How much of a GSM8K accuracy is left on new and on changed problems. Exit code 1: a set could not be loaded."""
    whole("batch", batch, least=1)
    files: dict[str, str] = {}
    for text in paths or []:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise RCDError(f"--path {text!r} should be SET=FILE, such as gsm8k=gsm8k.jsonl.")
        files[name] = file
    config = decoding.config()

    from rcd.api import load
    from rcd.carry.parse import parse_carry
    from rcd.evaluate.contamination import lines, load_sets, study
    from rcd.models.threads import limit_threads

    sets, skipped = load_sets(files, limit)
    found: dict[str, Any] = {"model": model, "sets": {}, "drops": {}}
    if sets:
        placed: Any = dict(device=device, dtype=dtype, quantize=quantize)
        pipeline = load(model, **placed)
        second = None if reference is None else (reference, load(reference, **placed))
        limit_threads([pipeline, second and second[1]], threads, rows=batch)
        config = replace(config, carry=parse_carry(carry, pipeline.checkpoint.rcd.carry))
        kept = "" if output is None else f"the answers so far are in {output}, and the same command goes on"
        with opt.keeping(kept), tempfile.TemporaryDirectory() as scratch:
            found = study(
                pipeline, sets, config, output or scratch, model=model, reference=second, batch=batch,
                progress=own.progress,
            )  # fmt: skip
    show(json.dumps({**found, "skipped": skipped}) if as_json else "\n".join(lines(found, skipped)))
    if skipped:
        raise typer.Exit(1)
