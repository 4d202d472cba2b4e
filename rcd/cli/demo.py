"""`rcd demo`: two bundled models, without and with residual context, answer problems that nobody has seen."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.errors import RCDError, number, one_of, whole

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from rcd.api import Generation, Pipeline
    from rcd.cli.live import Canvas
    from rcd.data.tasks.base import Problem
    from rcd.evaluate.points import Point, Sweep

SETS = {"sdar": ("mixed", "arithmetic word problems and 6x6 sudoku"), "llada": ("sudoku", "6x6 sudoku")}
"""Set of bundled models -> (the tasks it was trained for, in words)."""
SIDES = {"seqd": "SeqD", "rcd": "RCD"}
MOST, FEW = 4_000, 30
"""Problems at most (the test has so many puzzles of their own), and how many are too few for an interval."""
OTHERS = (0.6, 0.8, 0.95, 0.99)
"""The picture's thresholds, beside the one that was asked for."""
WIDE, NARROW = 90, 50
"""Columns from which two answers stand side by side: long ones, grids."""


def demo(
    problems: Annotated[int, typer.Option(help=f"How many problems to answer, 1 to {MOST:,}.")] = 128,
    models: Annotated[str, typer.Option("--set", help="The bundled models: sdar or llada.")] = "llada",
    threshold: Annotated[float, typer.Option(help="Commit every token above this confidence.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Of the problems; by default new ones every time.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="The trade-off as PNG or SVG; by default rcd-demo.png, none with --json.")
    ] = None,
    pause: Annotated[float, typer.Option(min=0, help="Seconds to rest after each step of the live view.")] = 0.2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer fresh problems with the bundled SeqD and RCD models, side by side."""
    whole("problems", problems, least=1, most=MOST)
    number("threshold", threshold, least=0, most=1)
    one_of("set", models, SETS)
    if seed is not None:
        whole("seed", seed, least=0)
    if picture is not None and (picture.suffix not in (".png", ".svg") or not picture.parent.is_dir()):
        raise RCDError(f"the picture is a .png or .svg file in a folder that exists, not {str(picture)!r}.")
    seed = secrets.randbelow(10**6) + 1 if seed is None else seed

    import torch

    from rcd.api import load
    from rcd.data.tasks.base import problems as draw

    torch.set_num_threads(1)  # two threads gain a quarter on an idle machine and lose a factor of ten on a busy one
    pipelines = {side: load(f"bundled:{models}-{side}") for side in SIDES}
    given = list(draw(SETS[models][0], "test", problems, seed=seed))
    if as_json:
        _print_json(pipelines, given, threshold, models, seed, picture)
        return

    from rich.console import Console
    from rich.markup import escape

    console = Console()
    console.print(
        f"[bold]Residual Context Diffusion[/bold] on {SETS[models][1]}, with two small models trained on equally many "
        f"tokens: [bold]SeqD[/bold] throws the predictions away that it does not commit, [bold]RCD[/bold] keeps them. "
        f"The problems are new: neither they nor their templates were trained on (--seed {seed} asks them again).\n",
        highlight=False,
    )
    _one_problem(console, pipelines, given[0], threshold, pause if console.is_terminal else 0.0)
    sweeps = _sweeps(console, pipelines, given, threshold)
    console.print(_table(sweeps, threshold))
    console.print(_verdict(sweeps), highlight=False)
    path = _draw(sweeps, picture or Path("rcd-demo.png"), models, len(given))
    drawn = "" if path is None else f"The trade-off is drawn in [bold]{escape(str(path))}[/bold]. "
    console.print(
        f"\n{drawn}Next: [bold]rcd generate[/bold] with a problem of your own; "
        f"[bold]rcd demo --set {next(name for name in SETS if name != models)}[/bold], the other models; "
        "docs/results/bundled.md, the same on thousands of problems.",
        highlight=False,
    )


def _print_json(
    pipelines: dict[str, Pipeline], given: list[Problem], threshold: float, models: str, seed: int, picture: Path | None
) -> None:
    if picture is not None:
        sweeps = _sweeps(None, pipelines, given, threshold)
        _draw(sweeps, picture, models, len(given))
        points = {side: _at(sweep, threshold) for side, sweep in sweeps.items()}
    else:
        points = {side: _sweep(side, pipeline, given, (threshold,)).points[0] for side, pipeline in pipelines.items()}
    out: dict[str, Any] = {side: _figures(point) for side, point in points.items()}
    print(json.dumps({**out, "set": models, "threshold": threshold, "seed": seed}))


def _figures(point: Point) -> dict[str, float | int]:
    return {
        "accuracy": round(point.accuracy / 100, 4),
        "tokens_per_step": round(point.tokens_per_step, 4),
        "problems": len(point.right),
        "seconds": round(point.seconds, 3),
    }


def _sweep(side: str, pipeline: Pipeline, given: list[Problem], thresholds: tuple[float, ...]) -> Sweep:
    from rcd.evaluate.sweep import run_sweep

    return run_sweep(pipeline, given, thresholds, name=SIDES[side], batch=64)


def _sweeps(
    console: Console | None, pipelines: dict[str, Pipeline], given: list[Problem], threshold: float
) -> dict[str, Sweep]:
    """Every threshold of the picture, by both models; a line that moves says how far it is."""
    thresholds = tuple(sorted({threshold, *OTHERS}))
    text = f"answering {len(given)} problems at {len(thresholds)} thresholds ..."
    waiting = console.status(text) if console is not None and console.is_terminal else nullcontext()
    with waiting:
        return {side: _sweep(side, pipeline, given, thresholds) for side, pipeline in pipelines.items()}


def _at(sweep: Sweep, threshold: float) -> Point:
    return next(point for point in sweep.points if point.threshold == threshold)


def _one_problem(
    console: Console, pipelines: dict[str, Pipeline], problem: Problem, threshold: float, rest: float
) -> None:
    """One problem, decoded by both in step with one another."""
    from rich.live import Live

    from rcd.cli.live import SHADES, Canvas
    from rcd.decode.config import DecodeConfig
    from rcd.decode.events import Finished
    from rcd.evaluate.grading import grade

    console.print(f"[bold]One of them:[/bold] {_question(problem)}", highlight=False)
    if console.is_terminal:
        shades = f"{SHADES[0]} a mask, {' '.join(SHADES[1:])} a mask with its last prediction, darker by its weight"
        console.print(shades, style="dim", highlight=False)
    canvases = {side: Canvas(pipeline) for side, pipeline in pipelines.items()}
    streams: dict[str, Iterator[Any]] = {
        side: pipeline.stream(problem.question, DecodeConfig(threshold=threshold))
        for side, pipeline in pipelines.items()
    }
    done: dict[str, Generation] = {}
    moving = console.is_terminal and not console.is_dumb_terminal
    with Live(console=console, auto_refresh=False, transient=True) if moving else nullcontext() as live:
        while len(done) < len(streams):
            for side, stream in streams.items():
                event = next(stream, None)
                if isinstance(event, Finished):
                    done[side] = pipelines[side].generation(event, 0.0)
                    canvases[side].finish(event)
                elif event is not None:
                    canvases[side].see(event)
            if live is not None:
                live.update(_beside(console, {side: _answer(canvas, problem) for side, canvas in canvases.items()}, {}))
                live.refresh()
                time.sleep(rest)
    verdicts = {
        side: f"{'right' if grade(problem, result.text) else 'wrong'}, {result.denoising_steps} steps"
        for side, result in done.items()
    }
    console.print(_beside(console, {side: _answer(canvas, problem) for side, canvas in canvases.items()}, verdicts))
    console.print()


def _question(problem: Problem) -> str:
    """As it is asked; a sudoku's rows in lines."""
    return problem.question.replace(": ", ":\n").replace(" / ", "\n") if problem.task == "sudoku" else problem.question


def _answer(canvas: Canvas, problem: Problem) -> Text:
    """The text so far; a sudoku as a grid."""
    if problem.task != "sudoku":
        return canvas.text()
    from rich.text import Text

    from rcd.cli.live import shade

    out, ends = Text(), set(canvas.pipeline.settings.eos_token_ids)
    for position in range(max([*canvas.tokens, *canvas.masks], default=-1) + 1):
        token = canvas.tokens.get(position)
        if token in ends:
            break
        text = None if token is None else canvas.pipeline.decode([token]).strip()
        if text == "/":
            out.append("\n")
        elif text is None:
            out.append(*shade(canvas.masks.get(position, 0.0)))
            out.append(" ")
        else:
            out.append(f"{text} ", style="bold green" if position in canvas.new else "")
    return out


def _beside(console: Console, texts: dict[str, Text], verdicts: dict[str, str]) -> RenderableType:
    """Both answers in frames: side by side where there is room, else one below the other."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel

    wide = console.width >= (WIDE if any(len(text.plain) > 90 for text in texts.values()) else NARROW)
    panels = [
        Panel(
            text, title=SIDES[side], subtitle=verdicts.get(side), title_align="left", subtitle_align="left",
            width=console.width // 2 - 1 if wide else console.width,
        )
        for side, text in texts.items()
    ]  # fmt: skip
    return Columns(panels) if wide else Group(*panels)


def _table(sweeps: dict[str, Sweep], threshold: float) -> RenderableType:
    from rich.table import Table

    from rcd.evaluate.statistics import wilson

    table = Table(box=None, pad_edge=False, title=f"At threshold {threshold:g}", title_justify="left")
    for column in ("", "right", "95% interval", "tokens/step", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    for side, sweep in sweeps.items():
        point = _at(sweep, threshold)
        low, high = wilson(int(point.right.sum()), len(point.right))
        table.add_row(
            SIDES[side], f"{point.accuracy:.1f}%", f"{100 * low:.0f}-{100 * high:.0f}%",
            f"{point.tokens_per_step:.2f}", f"{point.seconds:.1f}",
        )  # fmt: skip
    return table


def _verdict(sweeps: dict[str, Sweep]) -> str:
    """What these problems say at equal tokens per step, and how sure that is."""
    from rcd.evaluate.statistics import matched

    found = matched(sweeps["seqd"], sweeps["rcd"])
    if found["mean"] is None:
        return "\nThe two models' speeds do not overlap on these problems; ask more of them."
    mean, (low, high) = found["mean"], found["range"]
    sure = "" if mean["low"] > 0 or mean["high"] < 0 else " Too few problems to be sure: --problems asks more."
    if len(sweeps["seqd"].items) < FEW:
        return f"\n{len(sweeps['seqd'].items)} problems say little about which is better: --problems asks more."
    points = mean["difference"]
    return (
        f"\nAt equal tokens per step ({low:.1f} to {high:.1f}), RCD solves {abs(points):.1f} points "
        f"{'more' if points >= 0 else 'fewer'} than SeqD (95%: {mean['low']:+.1f} to {mean['high']:+.1f}).{sure}"
    )


def _draw(sweeps: dict[str, Sweep], path: Path, models: str, count: int) -> Path | None:
    from rcd.evaluate import plots

    try:
        return plots.frontier(list(sweeps.values()), path, f"{models}: {count} fresh problems of {SETS[models][1]}")
    except RCDError as error:  # no matplotlib, no room, no right to write here: the figures are there all the same
        print(f"rcd: note: no picture: {error}", file=sys.stderr)
        return None
