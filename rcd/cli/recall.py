"""`rcd recall`: how early the final tokens are among a step's most probable ones (fig:recall)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rcd.cli import evaluate as own
from rcd.cli import options as opt
from rcd.cli.ablate import Shots, beside, configured, drawn, items, write
from rcd.cli.flags import Given, decoding
from rcd.errors import RCDError, whole
from rcd.evaluate.wording import counted
from rcd.terminal import show


@decoding("threshold", "max_new_tokens", max_new_tokens=opt.TASKS_LENGTH)
def recall(
    task: own.Task,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of recall.json and the figures.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    k: Annotated[str, typer.Option("--k", help="With commas.")] = "1,2,5,10",
    carry: opt.CarryOf = opt.TRAINED,
    reference: opt.Reference = None,
    *,
    decoding: Given,
    limit: own.Limit = None,
    path: own.TaskPath = None,
    shots: Shots = None,
    task_seed: own.TaskSeed = 0,
    batch: own.Batch = 32,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
    threads: opt.Threads = None,
) -> None:
    """Recall@k of the final tokens over denoising steps, at the positions that are still masked."""
    ks = wholes(k)
    whole("batch", batch, least=1)
    decoding.config()

    from rcd.api import load
    from rcd.carry.parse import parse_carry
    from rcd.evaluate import recall as measure
    from rcd.models.threads import limit_threads

    problems, length = items(task, limit, task_seed, path, shots)
    pipeline = load(model, device=device, dtype=dtype, quantize=quantize)
    ks = measure.checked(ks, pipeline.settings.vocab_size)
    config = configured(pipeline, decoding, length)
    config = replace(config, carry=parse_carry(carry, pipeline.checkpoint.rcd.carry))
    second = None if reference is None else beside(pipeline, reference, device, dtype, quantize)
    limit_threads([pipeline, second], threads, rows=min(batch, len(problems)))
    prompts = pipeline.encode([problem.question for problem in problems])
    found: dict[str, Any] = {
        "model": model, "task": task, "items": len(problems), "threshold": config.threshold,
        **measure.recall(pipeline, prompts, config, ks, reference=second, batch=batch),
    }  # fmt: skip
    write(output / "recall.json", found)
    figures(found, output, pipeline.settings.window == "blockwise")
    if as_json:
        print(json.dumps(found))
        return
    show(f"recall@k of {model}: {counted(len(problems), 'item')} of {task}, threshold {config.threshold:g}, at masks")
    print("\n".join(measure.lines(found)))
    show(f"figures: {output}")


def figures(found: dict[str, Any], output: Path, blocks: bool) -> None:
    """recall.png over the masks of each step, recall-all.png over all tokens of the text."""
    from rcd.evaluate import plots

    title = f"{found['model']}, {counted(found['items'], 'item')} of {found['task']}, threshold {found['threshold']:g}"
    label = "denoising step" + (" of a block" if blocks else "")
    for key, of, file in (
        ("recall", "final tokens at masks", "recall"),
        ("recall_all", "all final tokens", "recall-all"),
    ):
        series: dict[str, Any] = {
            f"recall@{k}": [(row["step"], 100 * row[key][str(k)]) for row in found["steps"]] for k in found["ks"]
        }
        drawn(
            lambda series=series, of=of, file=file: plots.curves(
                series, output / f"{file}.png", label, f"recall of {of} (%)", title
            )
        )


def wholes(text: str) -> list[int]:
    """Whole numbers with commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise RCDError(f"--k takes whole numbers with commas, such as 1,5,10, not {text!r}.") from error
