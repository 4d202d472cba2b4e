"""The points of a campaign, answered by one process or several."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from rcd.api import Pipeline, load
from rcd.errors import RCDError, first_line, out_of_memory
from rcd.evaluate.campaign import Grid, Place
from rcd.evaluate.evaluation import evaluate

ERROR = "error.txt"


@dataclass(frozen=True)
class Said:
    """What a worker tells: answers so far, or that the point has ended."""

    place: Place
    done: int = 0
    total: int = 0
    right: int = 0
    ended: bool = False
    failure: str | None = None
    figures: dict[str, Any] | None = None
    """Of a point that has ended well: `summary`."""


Say = Callable[[Said], None]


class Worker:
    """Answers points one after another; keeps the last model and the reference."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.held: dict[str, Pipeline] = {}
        if grid.threads is not None:
            torch.set_num_threads(grid.threads)

    def pipeline(self, model: str) -> Pipeline:
        if model not in self.held:
            for other in [name for name in self.held if name != self.grid.reference]:
                del self.held[other]
            self.held[model] = load(model, device=self.grid.device, dtype=self.grid.dtype, quantize=self.grid.quantize)
        return self.held[model]

    def answer(self, place: Place, say: Say) -> Said:
        """Every answer of a point; whatever goes wrong is told, not raised."""
        grid, entry, folder = self.grid, self.grid.entries[place.entry], self.grid.folder(place)
        (folder / ERROR).unlink(missing_ok=True)
        try:
            reference = None
            if grid.reference is not None and entry.carry.needs_reference:
                reference = (grid.reference, self.pipeline(grid.reference))
            figures = evaluate(
                self.pipeline(entry.model), grid.problems, grid.configured(place), folder, model=entry.model,
                task=grid.task, reference=reference, batch=grid.batch,
                say=lambda done, total, right: say(Said(place, done, total, right)),
            )  # fmt: skip
            return Said(place, ended=True, figures=figures)
        except (BrokenPipeError, ConnectionError):  # nobody listens any more
            raise
        except RCDError as error:
            return Said(place, ended=True, failure=str(error))
        except Exception as error:
            self._free()
            return Said(place, ended=True, failure=_told(error, folder))

    def _free(self) -> None:
        self.held.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _told(error: Exception, folder: Path) -> str:
    """One sentence of an error that is not the user's; the rest goes to a file."""
    if out_of_memory(error):
        return f"out of memory ({first_line(error)}); a smaller --batch or --jobs may help."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        where = f"; the whole of it is in {folder / ERROR}"
    except OSError:
        where = ""
    return f"{type(error).__name__}: {first_line(error)}{where}."


def run(grid: Grid, places: Sequence[Place], jobs: int, say: Say) -> dict[Place, str]:
    """Answer these points in up to `jobs` processes (1: in this one); returns what failed, and why."""
    failures: dict[Place, str] = {}

    def hear(said: Said) -> None:
        if said.failure is not None:
            failures[said.place] = said.failure
        say(said)

    if jobs == 1:
        worker = Worker(grid)
        for place in places:
            hear(worker.answer(place, hear))
    else:
        _spread(grid, list(places), min(jobs, len(places)), hear)
    return {place: failures[place] for place in places if place in failures}


@dataclass
class _Hand:
    """A worker process, our end of its pipe, what it is at and the entry that it was at last."""

    process: Any
    pipe: Connection
    place: Place | None = None
    last: int | None = None


def _spread(grid: Grid, pending: list[Place], jobs: int, hear: Say) -> None:
    """A process that dies, as one does that the system ends for want of memory, fails its point and no other."""
    hands: list[_Hand] = []
    try:
        while pending or any(hand.place for hand in hands):
            while len(hands) < jobs and len(hands) < len(pending) + sum(hand.place is not None for hand in hands):
                hands.append(_start(grid))
            for hand in hands:
                if hand.place is None and pending:
                    hand.place = _next(pending, hand.last)
                    hand.last = hand.place.entry
                    pending.remove(hand.place)
                    hand.pipe.send(hand.place)
            ready = wait([hand.pipe for hand in hands if hand.place])
            for hand in [hand for hand in hands if hand.pipe in ready]:
                try:
                    said = hand.pipe.recv()
                except (EOFError, ConnectionError):
                    hand.process.join()
                    hands.remove(hand)
                    assert hand.place is not None
                    why = f"its process ended by itself (exit code {hand.process.exitcode}); was there enough memory?"
                    hear(Said(hand.place, ended=True, failure=why))
                    continue
                if said.ended:
                    hand.place = None
                hear(said)
    finally:
        for hand in hands:
            hand.pipe.close()
            hand.process.terminate()
            hand.process.join()


def _next(pending: Sequence[Place], last: int | None) -> Place:
    """The same model again where there is one, as it need not be loaded; else of the entry with the most to do."""
    own = [place for place in pending if place.entry == last]
    most = max(pending, key=lambda place: sum(other.entry == place.entry for other in pending))
    return own[0] if own else most


def _start(grid: Grid) -> _Hand:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, grid), daemon=True)
    process.start()
    theirs.close()
    return _Hand(process, ours)


def _serve(pipe: Connection, grid: Grid) -> None:
    """A worker process: points come in, what is told goes out; it ends when nobody is there any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    worker = Worker(grid)
    try:
        while True:
            pipe.send(worker.answer(pipe.recv(), pipe.send))
    except (EOFError, ConnectionError):
        return
