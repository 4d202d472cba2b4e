"""How far a long command has come, on stderr: a bar in a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY, OFTEN = 20.0, 0.2
"""Seconds between two lines of progress where the output is no terminal, and between two states of a bar."""
Show = Callable[[int, int], None]
"""(lines done, of them bad)."""


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def progress(total: int | None, what: str = "lines") -> Iterator[Show]:
    """`total`: None where nobody knows how many lines there are."""
    if not sys.stderr.isatty():
        yield _Sparse(total, what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = [
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[bad]}"),
    ]
    # no refreshing thread: it would still run while the interpreter ends
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task, drawn = bar.add_task("", total=total, bad=""), [0.0]

        def show(done: int, bad: int) -> None:
            bar.update(task, completed=done, bad=f"{bad:,} bad" if bad else "")
            if time.monotonic() - drawn[0] > OFTEN:
                bar.refresh()
                drawn[0] = time.monotonic()

        yield show


class _Sparse:
    def __init__(self, total: int | None, what: str) -> None:
        self.total, self.what = total, what
        self.began = self.last = time.monotonic()

    def __call__(self, done: int, bad: int) -> None:
        now = time.monotonic()
        if now - self.last < EVERY and done != self.total:
            return
        self.last = now
        some = f", {bad:,} bad" if bad else ""
        if self.total is None:
            print(f"{done:,} {self.what}{some}", file=sys.stderr, flush=True)
            return
        left = (now - self.began) / max(1, done) * (self.total - done)
        print(f"{done:,}/{self.total:,} {self.what}{some}  {clock(left)} left", file=sys.stderr, flush=True)
