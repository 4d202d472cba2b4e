"""`rcd ablate`: the paper's ablations on any model and task, and the norms behind its argument against Loopholing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import evaluate as own
from rcd.cli import options as opt
from rcd.cli.flags import Given, decoding
from rcd.cli.notes import note
from rcd.errors import RCDError, number, one_of, unwritable, whole
from rcd.evaluate.wording import counted, too_few
from rcd.terminal import show

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.carry.base import Carry
    from rcd.data.tasks.base import Problem
    from rcd.decode.config import DecodeConfig

NORMS, ALL = "norms", "all"
TABLES = ("alpha", "alpha-reference", "start", "t_res")
TOGETHER = ("alpha", "start", "t_res", NORMS)
"""What `all` means; alpha-reference is about two models that were trained without residuals."""

Shots = Annotated[int | None, typer.Option(help="Worked examples before the question, where the task has them.")]


@decoding("threshold", "max_new_tokens", max_new_tokens=opt.TASKS_LENGTH)
def ablate(
    task: own.Task,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the results; the same one goes on.")],
    what: Annotated[str, typer.Option(help=f"{', '.join((*TABLES, NORMS))} or all.")] = ALL,
    model: opt.Model = opt.DEFAULT_MODEL,
    reference: Annotated[
        list[str] | None,
        typer.Option("--reference", help="A smaller model; of start, may be repeated.", rich_help_panel=opt.CARRY),
    ] = None,
    seqd: Annotated[
        str | None, typer.Option(help="A model trained without residuals, as a further row.", rich_help_panel=opt.CARRY)
    ] = None,
    carry: opt.CarryOf = opt.TRAINED,
    *,
    decoding: Given,
    rows: Annotated[str | None, typer.Option(help="Only these rows, with commas (and the default row).")] = None,
    grid: Annotated[str | None, typer.Option(help="The T_res to try, with commas.")] = None,
    keep_cap: Annotated[
        bool, typer.Option("--keep-cap", help="The model's alpha_most on every weight.", rich_help_panel=opt.CARRY)
    ] = False,
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
    """The weight (fig:ablation-on-alpha), the start (tab:init-ablation), T_res and norms, row by row.

    All settings of the model's rcd.json stay but the one in question. Its alpha_scale and alpha_most belong to its own
    weight (and to top1): the other rows of alpha are the paper's formulas as they stand. alpha-reference: two models
    without residual training, the smaller one's residual at every step.
    """
    one_of("ablation", what, (*TABLES, NORMS, ALL))
    wanted = TOGETHER if what == ALL else (what,)
    chosen = None if rows is None else [name.strip() for name in rows.split(",") if name.strip()]
    if chosen is not None and what in (ALL, NORMS):
        raise RCDError(f"--rows picks rows of one table; take --what {', '.join(TABLES)} with it, not {what}.")
    places = None if grid is None else floats("--grid", grid)
    whole("batch", batch, least=1)
    decoding.config()  # flags are checked before a large model is read

    from rcd.api import load
    from rcd.carry.parse import parse_carry
    from rcd.evaluate import ablation
    from rcd.models.threads import limit_threads

    problems, length = items(task, limit, task_seed, path, shots)
    pipeline = load(model, device=device, dtype=dtype, quantize=quantize)
    config = configured(pipeline, decoding, length)
    base = parse_carry(carry, pipeline.checkpoint.rcd.carry)
    assert base is not None
    names = list(dict.fromkeys(reference or []))
    tables = [
        ablation.table(
            each, base, references=names, seqd=seqd is not None, rows=chosen, keep_cap=keep_cap,
            grid=places or ablation.GRID,
        )
        for each in wanted
        if each != NORMS
    ]  # fmt: skip
    others = {name: beside(pipeline, name, device, dtype, quantize) for name in names}
    plain = None if seqd is None else (seqd, beside(pipeline, seqd, device, dtype, quantize))
    limit_threads([pipeline, *others.values(), plain and plain[1]], threads, rows=min(batch, len(problems)))
    for text in notes(wanted, base, names, model):
        note(text)

    found: dict[str, Any] = {}
    done: dict[str, Path] = {}
    with opt.keeping_answers(output):
        for each in tables:
            found[each.what] = ablation.ablate(
                each, pipeline, problems, config, output, model=model, task=task, references=others, seqd=plain,
                batch=batch, say=listener(each.what), done=done,
            )  # fmt: skip
            draw(found[each.what], output)
            if not as_json:
                print("\n".join([*ablation.lines(found[each.what]), ""]), flush=True)
    if NORMS in wanted:
        first = next(iter(others.values()), None)
        found[NORMS] = measured(pipeline, problems, config, base, first, output, batch, model, task)
        if not as_json:
            print("\n".join([*ablation.norm_lines(found[NORMS]), ""]))
    if as_json:
        print(json.dumps(found))
    else:
        show("\n".join([*(too_few(len(problems)) if tables else []), f"tables and figures: {output}"]))
    if any("error" in row for name, each in found.items() if name != NORMS for row in each["rows"]):
        raise typer.Exit(1)


def items(
    task: str, limit: int | None, seed: int, path: Path | None, shots: int | None
) -> tuple[list[Problem], int | None]:
    """(the task's items, how long their answers may be)."""
    from rcd.evaluate import tasks

    return tasks.load(task, limit=limit, seed=seed, path=path, shots=shots), tasks.new_tokens(task)


def configured(pipeline: Pipeline, decoding: Given, length: int | None) -> DecodeConfig:
    """The flags; where they do not say it, answers are as long as the model's rcd.json says, else as the task's."""
    return decoding.config(max_new_tokens=length if pipeline.settings.max_new_tokens is None else None)


def beside(pipeline: Pipeline, name: str, device: str, dtype: str, quantize: str | None) -> Pipeline:
    """Another model, which must have the same tokens."""
    from rcd.api import load
    from rcd.models.pairing import check_pair

    other = load(name, device=device, dtype=dtype, quantize=quantize)
    try:
        check_pair(pipeline.checkpoint, other.checkpoint)
    except RCDError as error:
        raise RCDError(f"{name} cannot stand beside the model: {error}") from error
    return other


def listener(what: str) -> Any:
    return lambda row: own.progress(f"{what} {row}: ")


def notes(wanted: Sequence[str], base: Carry, references: Sequence[str], model: str) -> list[str]:
    """What a reader should know before the tables."""
    from rcd.carry.base import describe

    out = []
    if "t_res" not in describe(base) and {"alpha", "start", "t_res"} & set(wanted):
        out.append(f"{model} was not trained with residuals, so the rows are the paper's Residual() on a plain model")
    if "start" in wanted and not references:
        out.append("start: no row of a reference without --reference")
    return out


def measured(
    pipeline: Pipeline, problems: Sequence[Problem], config: DecodeConfig, carry: Carry, reference: Pipeline | None,
    output: Path, batch: int, model: str, task: str,
) -> dict[str, Any]:  # fmt: skip
    """Norms, with norms/norms.json and norms.png."""
    from rcd.evaluate import ablation, plots

    prompts = pipeline.encode([problem.question for problem in problems])
    norms = ablation.norms(pipeline, prompts, replace(config, carry=carry), reference=reference, batch=batch)
    found = {"model": model, "task": task, "items": len(problems), "threshold": config.threshold, **norms}
    write(output / NORMS / "norms.json", found)
    steps = [row["step"] for row in found["steps"]]
    series: dict[str, Any] = {}
    for name, words in ablation.NORMS.items():
        values = [row.get(name, found["mean"][name]) for row in found["steps"]]
        points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
        if points:
            series[words] = points
    title = f"{model}, {counted(len(problems), 'item')} of {task}"
    drawn(lambda: plots.curves(series, output / "norms.png", "denoising step", "mean norm", title, log=True))
    return found


def draw(found: dict[str, Any], output: Path) -> None:
    """WHAT.png: accuracy over tokens per step, or over T_res."""
    from rcd.evaluate import plots

    title = f"{found['model']}, {counted(found['items'], 'item')} of {found['task']}, threshold {found['threshold']:g}"
    path, points, curve = output / f"{found['what']}.png", {}, []
    for row in found["rows"]:
        if "error" in row:
            continue
        y, low, high = (100 * row[key] for key in ("accuracy", "low", "high"))
        name = row["row"] + ("*" if row["row"] == found["default"] else "")
        points[name] = (row["tokens_per_target_step"], y, low, high)
        if "t_res" in row["carry"]:
            curve.append((row["carry"]["t_res"], y, low, high))
    label = "tokens per step of the target" if found["what"] == "alpha-reference" else "tokens per step"
    by_value = found["what"] == "t_res"
    drawn(lambda: plots.settings(curve, path, "T_res", title) if by_value else plots.rows(points, path, title, label))


def drawn(make: Any) -> None:
    """A figure that cannot be drawn (no matplotlib) takes nothing from the numbers."""
    try:
        make()
    except RCDError as error:
        note(f"no figure: {error}")


def write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable("the results", path, error) from error


def floats(flag: str, text: str) -> list[float]:
    """Numbers with commas."""
    out = []
    for part in text.split(","):
        try:
            out.append(float(part))
        except ValueError as error:
            raise RCDError(f"{flag} takes numbers with commas, such as 0.5,1,2, not {text!r}.") from error
        number(flag, out[-1], least=1e-3)
    return out
