"""`rcd sweep`: models x carries x commit rules x thresholds on a task; the frontier, paired differences, one page."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import evaluate as own
from rcd.cli import options as opt
from rcd.cli.flags import Given, decoding
from rcd.cli.notes import note, note_task, note_window
from rcd.cli.rules import RuleLine, rule_lines
from rcd.errors import RCDError, number, one_of, unwritable, whole
from rcd.evaluate.wording import counted, dial, signed
from rcd.terminal import show

if TYPE_CHECKING:
    from rcd.evaluate.campaign import Entry, Grid, Line, Place
    from rcd.evaluate.workers import Said

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
SMALL, MOST = 1 << 29, 8
"""Bytes of weights up to which a CPU is better used by several models of one thread each; and how many at most."""
EVERY = 10.0
"""Seconds between two lines of progress."""


@decoding("block_length", "max_new_tokens", max_new_tokens=opt.TASKS_LENGTH)
def sweep(
    task: own.Task,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the results; the same one goes on.")],
    models: Annotated[
        list[str],
        typer.Option("--model", "-m", help="As in rcd eval; may be repeated. NAME=MODEL gives it a name."),
    ],
    carries: opt.Carries = None,
    commits: Annotated[
        list[str] | None,
        typer.Option(
            "--commit",
            help="Commit rules, each a line: NAME,NAME,... with settings of its own behind it (NAME,setting=value); "
            "several values as 0.1/0.5 are its points. A rule without a threshold is one point (rcd list commit).",
            rich_help_panel=opt.COMMIT,
        ),
    ] = None,
    reference: opt.Reference = None,
    *,
    decoding: Given,
    thresholds: Annotated[
        list[str] | None,
        typer.Option(help="In [0, 1]; several with spaces or commas. By default 0.5 to 1.", rich_help_panel=opt.COMMIT),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="THRESHOLD")] = None,
    base: Annotated[str | None, typer.Option(help="The entry that others are compared with; else the first.")] = None,
    limit: own.Limit = None,
    path: own.TaskPath = None,
    shots: Annotated[
        int | None, typer.Option(help="Worked examples before the question, where the task has them.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", "--task-seed", help="Of generated problems (words, sudoku, mixed).")
    ] = 0,
    batch: own.Batch = 32,
    jobs: Annotated[
        int | None, typer.Option(help="Worker processes; by default one a core for small models on a CPU, else 1.")
    ] = None,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
) -> None:
    """Answer a task with every model, carry and commit rule at every threshold; writes OUTPUT/report.html."""
    wanted = parsed_thresholds(thresholds, more or [])
    whole("batch", batch, least=1)
    if jobs is not None:
        whole("jobs", jobs, least=1)
    if "threshold" in decoding.values:
        raise RCDError("the threshold is what is swept; name the values with --thresholds.")
    common = decoding.config()
    if commits and "commit" in decoding.values:
        raise RCDError("commit is given twice, by --commit and by --set; leave one of them out.")
    rules = rule_lines(commits, common) if commits else [RuleLine("")]
    named = [name_of(text) for text in models]

    from rcd.evaluate import tasks
    from rcd.evaluate.campaign import Grid

    problems = tasks.load(task, limit=limit, seed=seed, path=path, shots=shots)
    entries = entries_of(named, carries or [opt.TRAINED], decoding, tasks.new_tokens(task), rules)
    if base is not None:
        one_of("--base", base, [entry.name for entry in entries])
    grid = Grid(entries, wanted, str(task), problems, output, reference, batch, device, dtype, quantize)
    execute(grid, jobs=jobs, base=base, seed=seed, as_json=as_json)


def execute(
    grid: Grid, *, jobs: int | None = None, base: str | None = None, seed: int = 0, as_json: bool = False
) -> None:
    """Answer what is not there yet, write the results, print them."""
    from rcd.evaluate.campaign import check, collect
    from rcd.evaluate.findings import findings
    from rcd.evaluate.workers import run

    places = check(grid)
    jobs, threads = processes(grid, jobs, len(places))
    grid = replace(grid, threads=threads)
    began = time.monotonic()
    note_models(grid)
    with opt.keeping_answers(grid.output):
        failures = run(grid, places, jobs, Progress(grid, places, jobs))
    lines = collect(grid, failures)
    found = findings(grid, lines, failures, base or grid.entries[0].name)
    found |= {"seed": seed, "command": shlex.join(["rcd", *sys.argv[1:]]), "made": made(grid, jobs, began)}
    found["files"] = written(grid, found, lines)
    show(json.dumps(found) if as_json else "\n".join(told(found, lines)))
    if failures:
        raise typer.Exit(1)


def note_models(grid: Grid) -> None:
    """Models that are asked what they cannot know, or in a way that they do not know."""
    from rcd.models.checkpoint import open_checkpoint

    for model, window in {entry.model: entry.config.window for entry in grid.entries}.items():
        held = open_checkpoint(model)
        note_window(model, window, held.settings.attention, held.rcd.provenance)
        note_task(model, held.rcd.provenance, grid.task, grid.problems, held.tokenizer)


def parsed_thresholds(given: list[str] | None, more: list[str]) -> list[float]:
    """Sorted, each once; what follows `--thresholds` behind a space comes as `more`."""
    if more and not given:
        raise RCDError(f"unexpected {more[0]!r}; every option has a name (rcd sweep --help).")
    out = set()
    for text in re.split(r"[,\s]+", " ".join([*(given or []), *more]).strip()) if given else THRESHOLDS:
        try:
            value = float(text)
        except ValueError as error:
            raise RCDError(f"--thresholds takes numbers in [0, 1], not {text!r}.") from error
        number("--thresholds", value, least=0, most=1)
        out.add(value)
    return sorted(out)


def name_of(text: str) -> tuple[str, str]:
    """(name, model) of MODEL or NAME=MODEL."""
    name, equals, model = text.partition("=")
    if equals and not Path(text).expanduser().exists():
        if not (model and re.fullmatch(r"[\w+-][\w.,+-]*", name)):
            raise RCDError(f"{text!r} should be MODEL or NAME=MODEL with a plain name.")
        return name, model
    if not text.strip():
        raise RCDError("--model is empty; name a folder, a hub name, a .gguf file or bundled:NAME.")
    last = Path(text.removeprefix("bundled:")).expanduser().resolve().name.removesuffix(".gguf")
    return _plain(last) or "model", text


def _plain(text: str) -> str:
    """As part of a file's name."""
    return re.sub(r"[^\w.,=+-]+", "_", text).lstrip(".")


def entries_of(
    named: list[tuple[str, str]], carries: list[str], decoding: Given, new_tokens: int | None,
    rules: Sequence[RuleLine] = (RuleLine(""),),
) -> list[Entry]:  # fmt: skip
    """Every model with every carry and rule; a carry that comes twice (`none` and what a model was trained with) is
    taken once."""
    from rcd.carry.base import describe
    from rcd.carry.parse import parse_carry
    from rcd.evaluate.campaign import Entry
    from rcd.models.checkpoint import open_checkpoint

    entries, seen = list[Entry](), dict[tuple[str, str], str]()
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    twice += [text for text, count in Counter(carries).items() if count > 1]
    if twice:
        raise RCDError(f"{twice[0]!r} is there twice; leave one out, or give one a name (--model NAME=MODEL).")
    for name, model in named:
        held = open_checkpoint(model)
        config = decoding.config(max_new_tokens=new_tokens if held.settings.max_new_tokens is None else None)
        for text in carries:
            carry = parse_carry(text, held.rcd.carry)
            assert carry is not None
            whole_name = name if text == opt.TRAINED else f"{name}+{_plain(text)}"
            same = seen.setdefault((model, json.dumps(describe(carry), sort_keys=True)), whole_name)
            if same != whole_name:
                note(f"{whole_name} is the same as {same}, and left out")
                continue
            for rule in rules:
                rule_name = f"{whole_name}+{_plain(rule.text)}" if rule.text else whole_name
                own: dict[str, Any] = {"carry": carry, **rule.settings}
                entries.append(Entry(rule_name, model, replace(config, **own), rule.setting, rule.values))
    clash = [name for name, count in Counter(entry.name.lower() for entry in entries).items() if count > 1]
    if clash:
        raise RCDError(f"two entries are named {clash[0]!r}; give one model a name (--model NAME=MODEL).")
    return entries


def processes(grid: Grid, jobs: int | None, points: int) -> tuple[int, int | None]:
    """(worker processes, threads of each or None): small models on a CPU gain nothing from threads, and lose much where
    other processes run."""
    from rcd.models.checkpoint import pick_device
    from rcd.models.source import locate

    if pick_device(grid.device).type != "cpu":
        return max(1, min(jobs or 1, points)), None
    paths = [locate(model) for model in {entry.model for entry in grid.entries}]
    sizes = [sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
             for path in paths]  # fmt: skip
    small, cores = max(sizes) <= SMALL, usable_cores()
    chosen = max(1, min(jobs or (min(cores, MOST) if small else 1), points))
    return chosen, 1 if small else max(1, cores // chosen)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """Lines on stderr: the point with its running accuracy, then all points with the time left. A point that has not
    begun is taken to be as slow as the nearest threshold that has."""

    def __init__(self, grid: Grid, places: list[Place], jobs: int) -> None:
        self.grid, self.jobs, self.items = grid, jobs, len(grid.problems)
        self.left = dict.fromkeys(places, self.items)
        self.points = len(places)
        self.began: dict[Place, tuple[float, int]] = {}
        self.pace: dict[Place, float] = {}
        self.last = time.monotonic()
        finished = len(grid.places) - len(places)
        if finished:
            verb = "is" if len(grid.places) == 1 else "are"
            self.print(f"{finished} of {counted(len(grid.places), 'point')} {verb} there already")

    def __call__(self, said: Said) -> None:
        place, now = said.place, time.monotonic()
        if said.ended:
            del self.left[place]
            count = f"{self.points - len(self.left)} of {counted(self.points, 'point')}"
            if said.failure is not None:
                self.print(f"{self.grid.label(place)}: FAILED: {said.failure} ({count})")
            elif said.figures is not None:
                accuracy, rho = 100 * said.figures["accuracy"], said.figures["tokens_per_step"]
                rest = f", {self.time_left()}" if self.left and self.pace else ""
                self.print(
                    f"{self.grid.label(place)}: {accuracy:.1f}% right, {rho:.2f} tokens per step ({count}{rest})"
                )
            return
        since, held = self.began.setdefault(place, (now, said.done))  # what was there before costs nothing
        self.left[place] = self.items - said.done
        if said.done > held:
            self.pace[place] = (now - since) / (said.done - held)
        if now - self.last >= EVERY:
            rest = f"; {self.time_left()}" if self.pace else ""
            self.print(
                f"{self.grid.label(place)}: {said.done} of {said.total}, {100 * said.right / said.done:.1f}% right so "
                f"far{rest}"
            )

    def time_left(self) -> str:
        def pace(place: Place) -> float:
            near = min(self.pace, key=lambda known: _apart(known, place))
            return self.pace.get(place, self.pace[near])

        seconds = sum(left * pace(place) for place, left in self.left.items())
        return f"about {spelt(seconds / max(1, min(self.jobs, len(self.left))))} left"

    def print(self, text: str) -> None:
        self.last = time.monotonic()
        show(f"rcd: {text}", sys.stderr)


def _apart(known: Place, place: Place) -> tuple[bool, float]:
    """How far a point that has begun is from another: those of the same line first."""
    near = abs(known.value - place.value) if known.value is not None and place.value is not None else 0.0
    return known.entry != place.entry, near


def spelt(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def made(grid: Grid, jobs: int, began: float) -> dict[str, str]:
    """How and where: for the reader of the report."""
    import torch

    from rcd import __version__
    from rcd.models.checkpoint import pick_device
    from rcd.models.dtypes import native_bf16

    device = pick_device(grid.device)
    mixed = "float32, bfloat16 as stored for large models" if native_bf16() else "float32"
    auto = mixed if device.type == "cpu" else "own dtype"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": f"{name}, {auto if grid.dtype == 'auto' else grid.dtype}",
        **({"weights": grid.quantize} if grid.quantize else {}),
        "processes": f"{jobs}, {spelt(time.monotonic() - began)} (this time)",
        "versions": f"rcd {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}, {usable_cores()} cores",
    }


def written(grid: Grid, found: dict[str, Any], lines: list[Line]) -> dict[str, str]:
    """The figure, the page and the figures as JSON; a figure that cannot be drawn costs nothing else."""
    from rcd.evaluate import plots, report

    output = grid.output
    files = {"report": report.write(output / "report.html", found, lines)}
    files |= {line.entry.name: output / f"{line.entry.name}.jsonl" for line in lines}
    try:
        if lines:
            title = f"{found['task']}: {counted(found['items'], 'item')}"
            for suffix in ("png", "svg"):
                sweeps = [line.sweep for line in lines]
                files[suffix] = plots.frontier(sweeps, output / f"frontier.{suffix}", title)
    except RCDError as error:
        note(f"no figure: {error}")
    files["json"] = output / "sweep.json"
    out = {name: str(path) for name, path in files.items()}
    try:
        files["json"].write_text(json.dumps({**found, "files": out}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable("the results", files["json"], error, "make room and go on") from error
    return out


def told(found: dict[str, Any], lines: list[Line]) -> list[str]:
    """For a terminal: the verdict, every point, every comparison, what failed, and where the page is."""
    from rcd.evaluate.findings import failed, steps_told
    from rcd.evaluate.sweep import lines as compared

    out = [*found["summary"], ""]
    for entry in found["entries"]:
        out.append(f"{entry['name']}: {entry['model']}, carry {entry['carry']['name']}")
        for point in entry["points"]:
            out.append(
                f"  {dial(point['setting'], point['threshold']):<15} {point['accuracy']:5.1f}% [{point['low']:.1f}, "
                f"{point['high']:.1f}]  {point['tokens_per_step']:6.2f} tokens per step"
            )
    for each in found["comparisons"]:
        out += ["", *compared({**each, "tasks": {}}), f"  {steps_told(each)}"]
        speed = each["throughput"]
        if speed["mean"] is not None:
            low, high = speed["range"]
            out.append(
                f"  At equal tokens per second ({low:.0f} to {high:.0f}, noisy): {signed(speed['mean']['difference'])} "
                f"points on average [{signed(speed['mean']['low'])}, {signed(speed['mean']['high'])}]."
            )
        for task, part in each["tasks"].items() if len(each["tasks"]) > 1 else ():
            mean = part["matched"]["mean"]
            told = (
                "no common range"
                if mean is None
                else (f"{signed(mean['difference'])} points [{signed(mean['low'])}, {signed(mean['high'])}]")
            )
            out.append(f"  {task} ({counted(part['items'], 'item')}), mean at equal tokens per step: {told}")
    if found["failures"]:
        out += ["", "Failed (the same command tries again; everything else is kept):"]
        out += [f"  {line}" for line in failed(found["failures"])]
    return [*out, "", f"The report: {found['files']['report']}"]
