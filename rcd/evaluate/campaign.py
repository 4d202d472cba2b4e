"""Models x carries x rules x thresholds over the same problems: what is to be answered, checked, and collected.

Every point is an evaluation of its own in OUTPUT/points/NAME/THRESHOLD: a kill loses nothing, a point that fails stops
no other, and what is there already is not answered again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rcd.carry.base import Carry, describe
from rcd.data.examples import prompt_ids
from rcd.data.tasks.base import Problem
from rcd.decode.config import DecodeConfig
from rcd.decode.stopping import check_prompts
from rcd.errors import RCDError, unwritable
from rcd.evaluate.evaluation import digest_of, point_of, settings_of, summary
from rcd.evaluate.points import Array, Sweep
from rcd.evaluate.records import RUN, Folder, Record, answered, read_records, read_run
from rcd.evaluate.wording import dial, short
from rcd.models.checkpoint import open_checkpoint, pick_device

if TYPE_CHECKING:
    from rcd.models.checkpoint import Opened

POINTS = "points"


@dataclass(frozen=True)
class Entry:
    """One line of the figure: a model with a carry and a commit rule."""

    name: str
    model: str
    config: DecodeConfig
    """With its carry and rule; the setting of the line is replaced."""
    setting: str = "threshold"
    """What differs from point to point."""
    values: tuple[float | None, ...] | None = None
    """Its values; None: the thresholds of the grid."""

    @property
    def carry(self) -> Carry:
        return self.config.travelling


class Place(NamedTuple):
    """One point: the entry's number, and the threshold, or the value of the entry's setting."""

    entry: int
    value: float | None


@dataclass(frozen=True)
class Grid:
    """What is to be answered."""

    entries: list[Entry]
    thresholds: list[float]
    task: str
    problems: list[Problem]
    output: Path
    reference: str | None = None
    batch: int = 32
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    threads: int | None = None
    """Of a process on a CPU; None: as torch likes."""

    @property
    def places(self) -> list[Place]:
        """Slow points (high thresholds) first, so that the last ones to finish are quick."""
        own = [self.thresholds if entry.values is None else entry.values for entry in self.entries]
        return [Place(k, value) for k, values in enumerate(own) for value in sorted(values, reverse=True)]  # type: ignore[type-var]

    def folder(self, place: Place) -> Path:
        return self.output / POINTS / self.entries[place.entry].name / repr(place.value)

    def label(self, place: Place) -> str:
        entry = self.entries[place.entry]
        plain = entry.setting == "threshold" and place.value is not None
        return f"{entry.name} at {short(place.value) if plain else dial(entry.setting, place.value)}"

    def configured(self, place: Place) -> DecodeConfig:
        entry = self.entries[place.entry]
        values: dict[str, Any] = {entry.setting: place.value}
        return replace(entry.config, **values)


def check(grid: Grid) -> list[Place]:
    """Refuse what cannot be done before any work; returns the points that are not finished. Nothing is written but the
    output folder itself."""
    if not grid.problems:
        raise RCDError("there are no problems to decode; ask for at least one.")
    twice = [name for name, count in Counter(problem.name for problem in grid.problems).items() if count > 1]
    if twice:
        raise RCDError(f"two items are named {twice[0]!r}; give every one an id of its own.")
    opened = [_opened(grid, entry) for entry in grid.entries]
    if grid.reference is not None:
        open_checkpoint(grid.reference)
    kind = pick_device(grid.device).type
    dtype = "float32" if (kind, grid.dtype) == ("cpu", "auto") else grid.dtype
    _claim(grid, {"device": kind, "dtype": f"{grid.quantize} in {dtype}" if grid.quantize else dtype})
    return [place for place in grid.places if not _finished(grid, place, *opened[place.entry])]


def _opened(grid: Grid, entry: Entry) -> tuple[Opened, int]:
    """A checkpoint without its tensors, and the longest prompt in its tokens."""
    if entry.carry.needs_reference and grid.reference is None:
        raise RCDError(f"the carry of {entry.name} needs a reference model; name one with --reference.")
    held = open_checkpoint(entry.model)
    if held.tokenizer is None:
        raise RCDError(f"{entry.model} has no tokenizer, and the problems are texts; name another checkpoint.")
    prompts = prompt_ids([problem.question for problem in grid.problems], held.tokenizer, None)
    longest = max(map(len, prompts))
    config = entry.config.resolved(held.settings, held.rcd.carry, longest)
    try:
        check_prompts(prompts, held.settings, config.new_tokens, *config.rounding(held.settings))
    except RCDError as error:
        raise RCDError(f"{entry.model} cannot read the task {grid.task}: {error}") from error
    return held, longest


def _claim(grid: Grid, settings: dict[str, Any]) -> None:
    """The output folder, for this kind of device and these weights: points of two kinds do not compare."""
    folder = grid.output / POINTS
    try:
        for path in folder.glob(f"*/*/{RUN}"):
            if not answered(path.parent):  # claimed, but never answered
                path.unlink()
        if not any(folder.glob(f"*/*/{RUN}")):
            (folder / RUN).unlink(missing_ok=True)
        Folder(folder, settings)
        probe = grid.output / ".writing"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise unwritable("the results", grid.output, error) from error


def _finished(grid: Grid, place: Place, held: Opened, longest: int) -> bool:
    """Whether every answer is there; an answer that was made with other settings is refused."""
    folder, entry = grid.folder(place), grid.entries[place.entry]
    if not (folder / RUN).is_file():
        return False
    config = grid.configured(place).resolved(held.settings, held.rcd.carry, longest)
    reference = grid.reference if entry.carry.needs_reference else None
    settings = settings_of(
        entry.model, grid.task, grid.problems, config, 1, reference, vocabulary=held.settings.vocab_size, dtype=None
    )
    Folder(folder, settings, digest_of(grid.problems))
    return len(read_records(folder)) == len(grid.problems)


@dataclass(frozen=True)
class Line:
    """An entry with the points that were answered."""

    entry: Entry
    sweep: Sweep
    records: list[list[Record]]
    """Of each point, in the order of the problems."""
    figures: list[dict[str, Any]]
    """Of each point: `summary`."""

    @property
    def seconds(self) -> list[Array]:
        """Of each item of each point."""
        return [np.array([record.seconds for record in point]) for point in self.records]


def collect(grid: Grid, failures: dict[Place, str]) -> list[Line]:
    """Every entry that has a point left, and its sweep in OUTPUT/NAME.jsonl."""
    lines = []
    for number, entry in enumerate(grid.entries):
        good = [place for place in grid.places[::-1] if place.entry == number and place not in failures]
        if not good:
            continue
        folders = [grid.folder(place) for place in good]
        held = read_run(folders[0])
        settings = {key: held.get(key) for key in ("model", "model_fingerprint", "task", "reference", "dtype", "delta")}
        decode = {key: value for key, value in held["decode"].items() if key != entry.setting}
        settings |= {"carry": describe(entry.carry), "decode": decode}
        names, tasks = [problem.name for problem in grid.problems], [problem.task for problem in grid.problems]
        points = [point_of(folder, entry.setting) for folder in folders]
        sweep = Sweep(entry.name, names, tasks, points, settings, held["items_digest"])
        sweep.save(grid.output / f"{entry.name}.jsonl")
        records = [read_records(folder) for folder in folders]
        lines.append(Line(entry, sweep, records, [summary(folder) for folder in folders]))
    return lines
