"""`rcd reproduce LABEL`: a table or figure of the paper with its settings, on your checkpoints or the bundled ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.evaluate import Batch, progress
from rcd.cli.notes import note
from rcd.errors import RCDError, one_of, whole

STAND_IN = "sudoku"
"""What the bundled models are asked instead of the paper's tasks."""
REFERENCES = ("reference", "reference-large")
NEEDED = {
    "sweep": ("seqd", "rcd"), "throughput": ("seqd", "rcd"), "alpha": ("seqd", "reference"), "recall": ("seqd",),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What is run, and where."""

    checkpoints: dict[str, str]
    bundled: bool
    paths: dict[str, Path]
    limit: int | None
    output: Path
    batch: int
    device: str
    dtype: str
    quantize: str | None


def reproduce(
    label: Annotated[str, typer.Argument(help="Such as tab:init-ablation; `list` shows them all.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The folder; the same one goes on.")] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="ROLE=CHECKPOINT: seqd, rcd, reference, reference-large, chat, base, extended, loopholing; may be "
            "repeated. By default the bundled models, on 6x6 sudoku."
        ),
    ] = None,
    row: Annotated[str | None, typer.Option(help="The paper's model, such as SDAR-8B-b64.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="TASK=FILE.jsonl instead of the hub; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many items of each task.")] = None,
    batch: Batch = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
) -> None:
    """Run a table or figure of the paper; our numbers stand beside the paper's."""
    from rcd.evaluate.paper import EXHIBITS, ROLES

    if label == "list":
        print("\n".join(f"{exhibit.label:<29}{exhibit.about}" for exhibit in EXHIBITS.values()))
        return
    one_of("label", label, EXHIBITS)
    exhibit = EXHIBITS[label]
    if output is None:
        raise RCDError("name the folder of the results with --output.")
    if limit is not None:
        whole("limit", limit, least=1)
    named = _pairs(checkpoint or [], "--checkpoint ROLE=CHECKPOINT")
    for role in named:
        one_of("role", role, (*ROLES, *REFERENCES))
    bundled = not named
    if bundled:
        named = {part: f"bundled:{exhibit.family}-{part}" for part in ("seqd", "rcd", "reference")}
        named["reference-large"] = named["seqd"]
    paths = {task: Path(file) for task, file in _pairs(path or [], "--path TASK=FILE").items()}
    asked = Asked(named, bundled, paths, limit, output, batch, device, dtype, quantize)
    missing = [role for role in NEEDED.get(exhibit.kind, ()) if role not in named]
    if missing:
        raise RCDError(f"{label} needs --checkpoint {missing[0]}=CHECKPOINT beside the others.")
    if exhibit.note:
        note(exhibit.note)
    if exhibit.kind in ("table", "start"):
        with opt.keeping_answers(output):
            found = _table(exhibit, asked, row)
        print(json.dumps(found) if as_json else "\n".join(_lines(found)))
        if found["skipped"]:
            raise typer.Exit(1)
    else:
        {"sweep": _sweep, "throughput": _sweep, "alpha": _alpha, "recall": _recall}[exhibit.kind](
            exhibit, asked, as_json
        )


def _pairs(texts: list[str], form: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise RCDError(f"{text!r} should be {form}.")
        out[key] = value
    return out


def _cells(exhibit: Any, asked: Asked, row: str | None) -> list[Any]:
    """The numbers to make: those of one of the paper's models; with the bundled models one for each row."""
    models = list(dict.fromkeys(cell.model for cell in exhibit.cells))
    if row is not None:
        one_of("row", row, models)
    elif len(models) > 1 and not asked.bundled:
        raise RCDError(f"{exhibit.label} has rows of several models; say which with --row: {', '.join(models)}.")
    cells = [cell for cell in exhibit.cells if cell.model == (row or models[-1])]
    if not asked.bundled:
        return cells
    once = {cell.row: cell for cell in reversed(cells)}
    return [
        replace(
            cell, task=STAND_IN, samples=1, shots=None, paper=None, decode={"threshold": cell.decode["threshold"]},
            carry=_without(cell.carry, "t_res"),
        )
        for cell in reversed(once.values())
    ]  # fmt: skip


def _without(carry: str, setting: str) -> str:
    return ",".join(part for part in carry.split(",") if not part.startswith(f"{setting}="))


def _table(exhibit: Any, asked: Asked, row: str | None) -> dict[str, Any]:
    """Every cell as an evaluation of its own; what cannot be run is told with its reason."""
    from rcd.api import Pipeline, load
    from rcd.carry.parse import parse_carry
    from rcd.decode.config import DecodeConfig
    from rcd.evaluate import tasks
    from rcd.evaluate.evaluation import evaluate

    loaded: dict[str, Pipeline] = {}
    rows, skipped = list[dict[str, Any]](), list[dict[str, str]]()

    def model(name: str) -> Pipeline:
        if name not in loaded:
            loaded[name] = load(name, device=asked.device, dtype=asked.dtype, quantize=asked.quantize)
        return loaded[name]

    for number, cell in enumerate(_cells(exhibit, asked, row)):
        try:
            if cell.role not in asked.checkpoints:
                raise RCDError(f"no checkpoint is named for it (--checkpoint {cell.role}=...)")
            name = asked.checkpoints[cell.role]
            pipeline = model(name)
            carry = parse_carry(cell.carry, pipeline.checkpoint.rcd.carry)
            assert carry is not None
            second = None
            if carry.needs_reference:
                if cell.reference not in asked.checkpoints:
                    raise RCDError(f"its start needs a reference (--checkpoint {cell.reference}=...)")
                second = asked.checkpoints[cell.reference], model(asked.checkpoints[cell.reference])
            problems = tasks.load(cell.task, limit=asked.limit, path=asked.paths.get(cell.task), shots=cell.shots)
            config = DecodeConfig(**cell.decode)
            folder = asked.output / f"{number:02d}-{_folder(cell.row)}-{cell.task}"
            figures = evaluate(
                pipeline, problems, replace(config, carry=carry), folder, model=name, task=cell.task,
                samples=cell.samples, reference=second, batch=asked.batch, say=progress(f"{cell.row}, {cell.task}: "),
            )  # fmt: skip
        except RCDError as error:
            skipped.append({"row": cell.row, "task": cell.task, "reason": str(error).rstrip(".")})
            continue
        rows.append({"row": cell.row, "checkpoint": name, "task": cell.task, "paper": cell.paper, **figures})
    printed = [{"row": cell.row, "task": cell.task, "paper": cell.paper} for cell in exhibit.cells if asked.bundled]
    return {"label": exhibit.label, "about": exhibit.about, "rows": rows, "skipped": skipped, "paper": printed}


def _folder(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text).strip("-").lower()


def _lines(found: dict[str, Any]) -> list[str]:
    out = [f"{found['label']}: {found['about']}", ""]
    if found["paper"]:
        out += [
            f"Bundled models stand in for the paper's, and {STAND_IN} for its tasks; rows are named as in the paper.",
            "",
        ]
    wide = max([len(each["row"]) for each in [*found["rows"], *found["skipped"], *found["paper"]]], default=8)
    out.append(f"{'':<{wide}}  {'task':<13}{'paper':>7}{'ours':>8}  {'95% interval':<16}{'tokens/step':<13}model")
    for each in found["rows"]:
        printed = "" if each["paper"] is None else f"{each['paper']:.2f}"
        ours = f"[{100 * each['low']:.2f}, {100 * each['high']:.2f}]"
        out.append(
            f"{each['row']:<{wide}}  {each['task']:<13}{printed:>7}{100 * each['accuracy']:>8.2f}  {ours:<16}"
            f"{each['tokens_per_step']:<13.2f}{each['checkpoint']}"
        )
    for each in found["skipped"]:
        out.append(f"{each['row']:<{wide}}  {each['task']:<13} not run: {each['reason']}")
    if found["paper"]:
        out += ["", "The paper's own numbers, of its models on its tasks, are not comparable with the bundled models':"]
        for each in found["paper"]:
            printed = "NA" if each["paper"] is None else f"{each['paper']:.2f}"
            out.append(f"{each['row']:<{wide}}  {each['task']:<13}{printed:>7}")
    return out


def _task(exhibit: Any, asked: Asked) -> tuple[str, Path | None, int | None]:
    """(task, its file, max_new_tokens)."""
    task = exhibit.settings.get("task") or exhibit.cells[-1].task
    length = exhibit.settings.get("max_new_tokens") or (
        exhibit.cells[-1].decode["max_new_tokens"] if exhibit.cells else None
    )
    return (STAND_IN, None, None) if asked.bundled else (task, asked.paths.get(task), length)


def _sweep(exhibit: Any, asked: Asked, as_json: bool) -> None:
    """SeqD plainly, RCD with the paper's start."""
    from rcd.cli.flags import Given
    from rcd.cli.sweep import entries_of, execute
    from rcd.evaluate import tasks
    from rcd.evaluate.campaign import Grid
    from rcd.evaluate.paper import COLD, THRESHOLDS, WARM

    task, path, length = _task(exhibit, asked)
    decoding = Given({} if length is None else {"max_new_tokens": length})
    warm = exhibit.family == "llada" and not asked.bundled
    entries = [
        replace(entry, name=role)
        for role, carry in (("seqd", "none"), ("rcd", WARM if warm else COLD))
        for entry in entries_of([(role, asked.checkpoints[role])], [carry], decoding, tasks.new_tokens(task))
    ]
    problems = tasks.load(task, limit=asked.limit, path=path)
    grid = Grid(
        entries, list(exhibit.settings.get("thresholds", THRESHOLDS)), task, problems, asked.output,
        asked.checkpoints.get("reference"), asked.batch, asked.device, asked.dtype,
        asked.quantize,
    )  # fmt: skip
    execute(grid, as_json=as_json)


def _alpha(exhibit: Any, asked: Asked, as_json: bool) -> None:
    from rcd.cli.ablate import ablate

    task, path, length = _task(exhibit, asked)
    ablate(
        what="alpha-reference", model=asked.checkpoints["seqd"], reference=[asked.checkpoints["reference"]], task=task,
        output=asked.output, threshold=exhibit.settings["threshold"], max_new_tokens=length, limit=asked.limit,
        path=path, batch=asked.batch, as_json=as_json, device=asked.device, dtype=asked.dtype, quantize=asked.quantize,
    )  # fmt: skip


def _recall(exhibit: Any, asked: Asked, as_json: bool) -> None:
    from rcd.cli.recall import recall

    task, path, length = _task(exhibit, asked)
    recall(
        task=task, model=asked.checkpoints["seqd"], k=",".join(map(str, exhibit.settings["k"])), output=asked.output,
        threshold=exhibit.settings["threshold"], max_new_tokens=length, limit=asked.limit, path=path,
        as_json=as_json, device=asked.device, dtype=asked.dtype, quantize=asked.quantize,
    )  # fmt: skip
