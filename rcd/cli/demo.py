"""`rcd demo`: two bundled models, without and with residual context, answer problems that nobody has seen."""

from __future__ import annotations

import errno
import json
import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.flags import Given, decoding
from rcd.cli.notes import note
from rcd.errors import RCDError, one_of, unwritable, whole
from rcd.evaluate.wording import FEW, counted, signed
from rcd.terminal import neutral

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from rcd.api import Generation, Pipeline
    from rcd.cli.live import Canvas
    from rcd.data.tasks.base import Problem
    from rcd.evaluate.points import Point, Sweep

SETS = {
    "sdar": ("sudoku", "6x6 sudoku"),
    "llada": ("sudoku", "6x6 sudoku"),
    "words": ("words", "arithmetic word problems"),
}
"""Set of bundled models -> (the task it was trained for, in words)."""
UNSEEN = {
    "sudoku": "no puzzle was trained on, not even mirrored or renumbered",
    "words": "neither they nor their templates were trained on",
}
SIDES = {"seqd": "SeqD", "rcd": "RCD"}
MOST = 4_000
"""Problems at most: the test has so many puzzles of their own."""
SURE = "0.99"
"""The threshold of the commands that are shown last."""
OTHERS = (0.8, 0.9, 0.95, 0.99)
"""The thresholds of the comparison and the picture, beside the one that was asked for."""
WIDE, NARROW = 90, 50
"""Columns from which two answers stand side by side: long ones, grids."""
ROW, GRID = 7, 41
"""Tokens of a sudoku's row with the mark behind it, and of a grid, which has none behind its last row."""


@decoding("threshold", pairs=False, threshold=opt.BUNDLED_THRESHOLD)
def demo(
    problems: Annotated[int, typer.Option(help=f"How many problems to answer, 1 to {MOST:,}.")] = 100,
    models: Annotated[str, typer.Option("--set", help=f"The bundled models: {', '.join(SETS)}.")] = "llada",
    *,
    decoding: Given,
    seed: Annotated[int | None, typer.Option(help="Of the problems; by default new ones every time.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="The trade-off as PNG or SVG; by default rcd-demo.png, none with --json.")
    ] = None,
    pause: Annotated[float, typer.Option(min=0, help="Seconds to rest after each step of the live view.")] = 0.2,
    as_json: opt.Json = False,
    web: Annotated[bool, typer.Option("--web", help="Show one problem in the browser instead.")] = False,
) -> None:
    """Answer fresh problems with the bundled SeqD and RCD models, side by side."""
    whole("problems", problems, least=1, most=MOST)
    threshold = decoding.config().threshold
    one_of("set", models, SETS)
    if seed is not None:
        whole("seed", seed, least=0)
    if picture is not None:
        _check_picture(picture)
    seed = secrets.randbelow(10**6) + 1 if seed is None else seed
    if web:
        _show(models, threshold, seed, as_json or picture is not None)
        return

    from rcd.api import load
    from rcd.data.tasks.base import problems as draw
    from rcd.models.threads import limit_threads

    pipelines = {side: load(f"bundled:{models}-{side}") for side in SIDES}
    limit_threads(pipelines.values())
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
        f"The problems are new: {UNSEEN[SETS[models][0]]} (--seed {seed} asks them again).\n",
        highlight=False,
    )
    _one_problem(console, pipelines, given[0], threshold, pause if console.is_terminal else 0.0)
    sweeps = _sweeps(console, pipelines, given, threshold)
    _report(console, sweeps, threshold)
    path = _draw(sweeps, picture or Path("rcd-demo.png"), models, len(given))
    drawn = "" if path is None else f"The trade-off is drawn in [bold]{escape(str(path))}[/bold]. "
    console.print(
        f"\n{drawn}Next: [bold]rcd demo --set {' or '.join(name for name in SETS if name != models)}[/bold] for other "
        "models; docs/results/bundled.md, the same on thousands of problems; or a problem of your own, such as",
        highlight=False,
    )
    for command in _own_problems(models, given[0], seed):
        console.print(command, style="bold", highlight=False, markup=False, soft_wrap=True)  # as it is pasted


def _show(models: str, threshold: float, seed: int, others: bool) -> None:
    """One problem on the page of `rcd serve`."""
    if others:
        raise RCDError("--web shows the page and prints no results; leave --json and --picture out.")
    from rcd.cli.web import show
    from rcd.data.tasks.base import problem

    show(
        {f"{models}-{side}": f"bundled:{models}-{side}" for side in SIDES},
        problem(SETS[models][0], "test", 0, seed),
        threshold,
    )


def _own_problems(models: str, shown: Problem, seed: int) -> list[str]:
    """Commands that work as they stand: the problem that was shown, and one of the other task."""
    from rcd.data.tasks.base import problem

    other = "words" if shown.task == "sudoku" else "sudoku"
    questions = {shown.task: shown.question, other: problem(other, "test", 0, seed).question}
    grids = f"bundled:{models if SETS[models][0] == 'sudoku' else 'llada'}-rcd"
    return [
        shlex.join(["rcd", "generate", "--model", grids, "--threshold", SURE, questions["sudoku"]]),
        shlex.join(["rcd", "generate", "--threshold", SURE, questions["words"]]),  # the default model's task
    ]


def _check_picture(path: Path) -> None:
    """Whether the picture can be written, before any work is done for it."""
    try:
        if path.suffix not in (".png", ".svg") or not path.parent.is_dir():
            raise RCDError(f"the picture is a .png or .svg file in a folder that exists, not {str(path)!r}.")
        new = not path.exists()
        if not new and not path.is_file():
            raise OSError(errno.EISDIR, "it is there and no file")
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise unwritable("the picture", repr(str(path)), error, "name another place with --picture") from error


def _print_json(
    pipelines: dict[str, Pipeline], given: list[Problem], threshold: float, models: str, seed: int, picture: Path | None
) -> None:
    from rcd.evaluate.statistics import paired

    if picture is not None:
        sweeps = _sweeps(None, pipelines, given, threshold)
        _draw(sweeps, picture, models, len(given))
        points = {side: _at(sweep, threshold) for side, sweep in sweeps.items()}
    else:
        points = {side: _sweep(side, pipeline, given, (threshold,)).points[0] for side, pipeline in pipelines.items()}
    out: dict[str, Any] = {side: _figures(point) for side, point in points.items()}
    found = paired(points["seqd"].right, points["rcd"].right)
    difference = {"points": found["difference"], "low": found["low"], "high": found["high"]}
    out["difference"] = {key: round(value, 2) for key, value in difference.items()}
    print(json.dumps({**out, "set": models, "threshold": threshold, "seed": seed}))


def _figures(point: Point) -> dict[str, float | int]:
    """What `--json` says of one side; low and high are those of the accuracy (Wilson, 95%)."""
    low, high = _interval(point)
    return {
        "accuracy": round(point.accuracy / 100, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "tokens_per_step": round(point.tokens_per_step, 4),
        "problems": len(point.right),
        "seconds": round(point.seconds, 3),
    }


def _interval(point: Point) -> tuple[float, float]:
    from rcd.evaluate.statistics import wilson

    return wilson(int(point.right.sum()), len(point.right))


def _sweep(side: str, pipeline: Pipeline, given: list[Problem], thresholds: tuple[float, ...]) -> Sweep:
    from rcd.evaluate.sweep import run_sweep

    return run_sweep(pipeline, given, thresholds, name=SIDES[side], batch=16, exact=False)


def _sweeps(
    console: Console | None, pipelines: dict[str, Pipeline], given: list[Problem], threshold: float
) -> dict[str, Sweep]:
    """Every threshold of the comparison, by both models; in a terminal a line says what is going on."""
    thresholds = tuple(sorted({threshold, *OTHERS}))
    text = f"answering {counted(len(given), 'problem')} at {len(thresholds)} thresholds ..."
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

    from rcd.cli.live import Canvas, legend
    from rcd.decode.config import DecodeConfig
    from rcd.decode.events import Finished, Step
    from rcd.evaluate.grading import grade

    console.print(f"[bold]One of them:[/bold] {_question(problem)}", highlight=False)
    if console.is_terminal:
        console.print(legend(1.0))
    config = DecodeConfig(threshold=threshold)
    canvases = {
        side: Canvas(pipeline, pipeline.resolve(config).travelling.strongest) for side, pipeline in pipelines.items()
    }
    streams: dict[str, Iterator[Any]] = {
        side: pipeline.stream(problem.question, config) for side, pipeline in pipelines.items()
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
                elif isinstance(event, Step):
                    canvases[side].see(event)
                elif event is not None:
                    raise RCDError(event.message)
            if live is not None:
                live.update(_beside(console, canvases, problem))
                live.refresh()
                time.sleep(rest)
    verdicts = {
        side: f"{'right' if grade(problem, result.text) else 'wrong'}, {counted(result.denoising_steps, 'step')}"
        for side, result in done.items()
    }
    console.print(_beside(console, canvases, problem, verdicts))
    console.print()


def _question(problem: Problem) -> str:
    """As it is asked; a sudoku as a grid under its rule."""
    if problem.task != "sudoku":
        return problem.question
    grid = problem.question.rpartition(":")[2].strip().replace(" / ", "\n")
    return f"each row, column and 2x3 box holds 1 to 6\n{grid}"


def _answer(canvas: Canvas, problem: Problem) -> Text:
    """The text so far; a sudoku as a grid."""
    if problem.task != "sudoku":
        return canvas.text()
    from rich.text import Text

    from rcd.cli.live import NEW

    out, ends = Text(), set(canvas.pipeline.settings.eos_token_ids)
    for position in range(max([*canvas.tokens, *canvas.masks], default=-1) + 1):
        token = canvas.tokens.get(position)
        if token in ends or (token is None and position >= GRID):
            break
        text = None if token is None else canvas.pipeline.decode([token]).strip()
        if text == "/" or (text is None and position % ROW == ROW - 1):
            out.append("\n")
        elif text is None:
            out.append(*canvas.shade(position))
            out.append(" ")
        else:
            out.append(f"{neutral(text)} ", style=NEW if position in canvas.new else "")
    return out


def _beside(
    console: Console, canvases: dict[str, Canvas], problem: Problem, verdicts: dict[str, str] | None = None
) -> RenderableType:
    """Both answers in frames: side by side where there is room, else one below the other."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel

    wide = console.width >= (NARROW if problem.task == "sudoku" else WIDE)
    panels = [
        Panel(
            _answer(canvas, problem), title=SIDES[side], subtitle=(verdicts or {}).get(side), title_align="left",
            subtitle_align="left", width=console.width // 2 - 1 if wide else console.width,
        )
        for side, canvas in canvases.items()
    ]  # fmt: skip
    return Columns(panels) if wide else Group(*panels)


def _report(console: Console, sweeps: dict[str, Sweep], threshold: float) -> None:
    """Both models at the threshold asked for, then at equal tokens per step, then in a sentence."""
    from rcd.evaluate.statistics import matched

    found, few = matched(sweeps["seqd"], sweeps["rcd"]), len(sweeps["seqd"].items) < FEW
    console.print(f"[bold]At threshold {threshold:g}[/bold]", highlight=False)
    console.print(_table(sweeps, threshold))
    if found["mean"] is not None:
        console.print("\n[bold]At equal tokens per step[/bold] (difference in points)", highlight=False)
        console.print(_matched_table(found, few))
    console.print(f"\n{_verdict(found, len(sweeps['seqd'].items))}", highlight=False)


def _table(sweeps: dict[str, Sweep], threshold: float) -> RenderableType:
    table = _columns("", "right", "95% interval", "tokens/step", "seconds")
    for side, sweep in sweeps.items():
        point = _at(sweep, threshold)
        low, high = _interval(point)
        table.add_row(
            SIDES[side], f"{point.accuracy:.1f}%", f"{100 * low:.0f}-{100 * high:.0f}%",
            f"{point.tokens_per_step:.2f}", f"{point.seconds:.1f}",
        )  # fmt: skip
    return table


def _matched_table(found: dict[str, Any], few: bool) -> RenderableType:
    """Four places inside the useful range; few problems have no interval worth showing."""
    table = _columns("tokens/step", *SIDES.values(), "difference", *(() if few else ("95% interval",)))
    for at, row in {f"{row['tokens_per_step']:.2f}": row for row in found["points"][1::2]}.items():
        interval = () if few else (f"{signed(row['low'])} to {signed(row['high'])}",)
        table.add_row(at, f"{row['base']:.1f}%", f"{row['other']:.1f}%", signed(row["difference"]), *interval)
    return table


def _columns(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="none")
    for name in names:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    return table


def _verdict(found: dict[str, Any], count: int) -> str:
    """What these problems say at equal tokens per step, and how sure that is."""
    if count < FEW:
        return f"{counted(count, 'problem')} can hardly tell which is better: --problems asks more."
    if found["mean"] is None:
        return "The two models' speeds do not overlap on these problems: --problems asks more."
    mean, (low, high) = found["mean"], found["range"]
    sure = "" if mean["low"] > 0 or mean["high"] < 0 else " Too few problems to be sure: --problems asks more."
    points, interval = mean["difference"], f"{signed(mean['low'])} to {signed(mean['high'])}"
    return (
        f"On average over {low:.1f} to {high:.1f} tokens per step, RCD solves {abs(points):.1f} points "
        f"{'more' if points >= 0 else 'fewer'} than SeqD (95%: {interval}).{sure}"
    )


def _draw(sweeps: dict[str, Sweep], path: Path, models: str, count: int) -> Path | None:
    from rcd.evaluate import plots

    title = f"{models}: {counted(count, 'fresh problem')}, {SETS[models][1]}"
    try:
        return plots.frontier(list(sweeps.values()), path, title)
    except RCDError as error:  # no matplotlib, no room, no right to write here: the figures are there all the same
        note(f"no picture: {error}")
        return None
