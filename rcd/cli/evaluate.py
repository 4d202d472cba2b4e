"""`rcd eval`: a model's accuracy on a task, recorded answer by answer; `rcd compare`: two such runs, item by item."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.flags import Given, decoding
from rcd.cli.notes import note, note_task, note_window
from rcd.cli.progress import EVERY, clock
from rcd.errors import whole
from rcd.evaluate.wording import counted, too_few
from rcd.terminal import neutral, show

if TYPE_CHECKING:
    from rcd.evaluate.evaluation import Say

Task = Annotated[str, typer.Option("--task", "-t", help="A task (rcd list task) or a JSONL file.")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many items.")]
TaskSeed = Annotated[int, typer.Option(help="Of generated problems (words, sudoku, mixed).")]
TaskPath = Annotated[Path | None, typer.Option(help="A JSONL file of the task's items, instead of the hub.")]
Batch = Annotated[int, typer.Option(help="Rows at once, on a GPU.")]


@decoding("threshold", "block_length", "max_new_tokens", "temperature", "seed", max_new_tokens=opt.TASKS_LENGTH)
def evaluate(
    task: Task,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the results; the same one goes on.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    carry: opt.CarryOf = opt.TRAINED,
    reference: opt.Reference = None,
    *,
    decoding: Given,
    samples: Annotated[int, typer.Option(help="Answers to each item; accuracy is Pass@1 over them.")] = 1,
    limit: Limit = None,
    path: TaskPath = None,
    shots: Annotated[
        int | None, typer.Option(help="Worked examples before the question, where the task has them.")
    ] = None,
    task_seed: TaskSeed = 0,
    batch: Batch = 32,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
    threads: opt.Threads = None,
) -> None:
    """Answer a task's items and grade them. Several GPUs: accelerate launch -m rcd eval ..."""
    whole("samples", samples, least=1)
    whole("batch", batch, least=1)
    decoding.config()  # flags are checked before a large model is read

    from accelerate import PartialState

    from rcd.api import load
    from rcd.carry.parse import parse_carry
    from rcd.evaluate import tasks
    from rcd.evaluate.evaluation import evaluate as run
    from rcd.models.threads import limit_threads

    problems = tasks.load(task, limit=limit, seed=task_seed, path=path, shots=shots)
    state = PartialState(cpu=device == "cpu")
    place = state.device if state.num_processes > 1 and device == "auto" else device
    pipeline = load(model, device=place, dtype=dtype, quantize=quantize)
    if state.is_main_process:
        note_task(model, pipeline.checkpoint.rcd.provenance, task, problems, pipeline.tokenizer)
    config = decoding.config(
        max_new_tokens=tasks.new_tokens(task) if pipeline.settings.max_new_tokens is None else None
    )
    if state.is_main_process:
        note_window(model, config.window, pipeline.settings.attention, pipeline.checkpoint.rcd.provenance)
    chosen = parse_carry(carry, pipeline.checkpoint.rcd.carry)
    second = None if reference is None else (reference, load(reference, device=place, dtype=dtype, quantize=quantize))
    limit_threads([pipeline, second and second[1]], threads, rows=min(batch, len(problems)))
    with opt.keeping_answers(output):
        figures = run(
            pipeline, problems, replace(config, carry=chosen), output, model=model, task=str(task), samples=samples,
            reference=second, batch=batch, process=state.process_index, processes=state.num_processes,
            wait=state.wait_for_everyone, say=progress() if state.is_main_process else None,
        )  # fmt: skip
    if state.is_main_process:
        note_places(figures)
        show(json.dumps(figures) if as_json else "\n".join(told(figures, output)))


def compare(
    base: Annotated[Path, typer.Argument(help="A folder that rcd eval wrote.")],
    other: Annotated[Path, typer.Argument(help="Another, over the same items.")],
    as_json: opt.Json = False,
) -> None:
    """Two evaluations on the same items: the paired difference with its 95% interval."""
    from rcd.evaluate.evaluation import compare_runs

    found = compare_runs(base, other)
    for name in ("base", "other"):
        note_places(found[name])
    if as_json:
        print(json.dumps(found))
        return
    for name, folder in (("base", base), ("other", other)):
        show("\n".join(told(found[name], folder)))
    print(
        f"difference  {found['difference']:+.2f} points [{found['low']:+.2f}, {found['high']:+.2f}], "
        f"{found['gained']} gained, {found['lost']} lost, p {found['p']:.3g}"
    )
    for line in too_few(found["base"]["items"]):
        print(line)


def told(figures: dict[str, Any], folder: Path) -> list[str]:
    """The figures of one evaluation in two lines."""
    several = f" ({figures['samples']} samples each)" if figures["samples"] > 1 else ""
    return [
        f"{figures['task']}: {100 * figures['accuracy']:.2f}% right [{100 * figures['low']:.2f}, "
        f"{100 * figures['high']:.2f}] of {counted(figures['items'], 'item')}{several}; "
        f"{figures['model']}, carry {figures['carry']['name']}, threshold {figures['threshold']:g}",
        f"  {figures['tokens_per_step']:.2f} tokens a step, {figures['tokens_per_forward']:.2f} a forward; "
        f"{figures['tokens']:.0f} tokens an answer, {100 * figures['cut_off']:.1f}% cut off; in {folder}",
    ]


def note_places(figures: dict[str, Any]) -> None:
    """Answers of one run that were made in several places: near ties may fall either way between them."""
    places = [f"{place['device']} ({place['dtype']})" for place in figures["made_on"]]
    if len(places) > 1:
        note(f"some answers of {figures['model']} on {figures['task']} were made on {' and others on '.join(places)}")


def progress(prefix: str = "") -> Say:
    """Lines on stderr: how far, running accuracy, time left; one line that moves in a terminal."""
    began, last, first = time.monotonic(), [0.0], [-1]

    def say(done: int, total: int, right: int) -> None:
        now = time.monotonic()
        if first[0] < 0:
            first[0] = done - 1
        moving = sys.stderr.isatty()
        name = neutral(prefix) if moving else prefix
        if done < total and now - last[0] < (0.5 if moving else EVERY):
            return
        last[0] = now
        fresh = max(1, done - first[0])
        left = (now - began) / fresh * (total - done)
        text = f"{name}{done}/{total}  {100 * right / max(1, done):.1f}% right  {clock(left)} left"
        end = "\n" if done >= total or not moving else ""
        print(
            f"\r\033[K{text}" if moving else text, end=end or ("\n" if not moving else ""), file=sys.stderr, flush=True
        )

    return say
