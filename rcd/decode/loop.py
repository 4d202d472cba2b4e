"""Many callers, one thread that decodes: requests are submitted and cancelled from anywhere, engines found or made.

A loop drives the engines of one model in turn, each on its own requests, and gives every caller the events of its own.
It starts with the first request and ends when there has been none for a while. What goes wrong with one request is
that request's; a failure of an engine or of the loop reaches everyone who waits for it, and the next call starts anew.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rcd.decode.engine import Engine
from rcd.decode.events import Event, Failed, Step
from rcd.decode.handle import Events, Handle
from rcd.decode.requests import Request
from rcd.errors import RCDError

LINGER, CLOSING = 10.0, 60.0
"""Seconds that a loop without requests stays, and that its end is waited for when it is closed."""
MOST_WAITING = 1024
"""Requests that wait for a row; one more is refused, or waits with its caller."""
MOST_ENGINES = 4
"""Engines that are kept though nobody uses them, the last used ones."""


@dataclass
class _Line:
    """An engine, who waits for it, and whom it serves."""

    engine: Engine
    key: Any
    waiting: deque[Handle] = field(default_factory=deque)
    serving: dict[int, Handle] = field(default_factory=dict)
    """By the numbers that its requests have in the engine."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.serving or self.engine.busy)


class DecodeLoop:
    def __init__(self, most_waiting: int = MOST_WAITING, linger: float = LINGER):
        self.most_waiting, self.linger = most_waiting, linger
        self._closed = False
        self.begin()
        _LOOPS.add(self)

    def begin(self) -> None:
        """As nobody has asked yet: also in a forked process, which has no thread and whose locks may be held by those
        that it does not have."""
        self._lines: list[_Line] = []
        self._changed = threading.Condition()
        self._driving = threading.Lock()
        """Held while engines run, so that one is made only between turns."""
        self._cancelled: list[Handle] = []
        self._thread: threading.Thread | None = None
        self._number = 0
        self._making = set[object]()
        """Callers that make an engine: the loop lets them go first."""

    # -- callers -------------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, key: Any, make: Callable[[], Engine], *, needed: int, rows: int = 1,
        wait: bool = False, events: Events | None = None,
    ) -> Handle:  # fmt: skip
        """Queue a request with the engine of that `key` that has `needed` positions a row, or with a new one; one that
        nobody uses and that has fewer than `rows` is replaced. Where as many wait as may, the call waits for room, or
        is refused."""
        if threading.current_thread() is self._thread:  # it would wait for itself
            raise RCDError("a probe cannot decode with the pipeline that it watches; do it when the call is over.")
        handle = Handle(request, self, events)
        with self._changed:
            line = self._line(key, needed, rows)
        if line is None:
            mine = object()
            try:  # an interrupt may come anywhere, and a loop that is never let go would hang everybody
                self._making.add(mine)
                with self._driving, self._changed:
                    line = self._line(key, needed, rows) or self._made(key, make)
            finally:
                self._making.discard(mine)
                with self._changed:
                    self._changed.notify_all()
        with self._changed:
            while self.waiting >= self.most_waiting and not self._closed:
                if not wait:
                    raise RCDError(
                        f"the queue is full: {self.waiting} requests wait already; try again when some are answered."
                    )
                self._changed.wait(1.0)
            if self._closed:
                raise RCDError("this loop is closed; load the model again.")
            if line not in self._lines:
                self._lines.append(line)
            line.waiting.append(handle)
            self._run()
            self._changed.notify_all()
        return handle

    def cancel(self, handle: Handle) -> None:
        with self._changed:
            self._cancelled.append(handle)
            self._changed.notify_all()

    def close(self) -> None:
        """Tell everyone who waits, and end the thread."""
        with self._changed:
            self._closed, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSING)

    @property
    def waiting(self) -> int:
        """Requests that no row serves yet."""
        return sum(len(line.waiting) for line in self._lines)

    @property
    def serving(self) -> int:
        return sum(len(line.serving) for line in self._lines)

    @property
    def engines(self) -> list[Engine]:
        return [line.engine for line in self._lines]

    def _line(self, key: Any, needed: int, rows: int) -> _Line | None:
        """The engine of that key that has room; the last used one stands last."""
        for line in reversed(self._lines):
            enough = line.engine.rows_most >= rows or not line.idle
            if line.key == key and enough and line.engine.suits(needed):
                self._lines.remove(line)
                self._lines.append(line)
                return line
        return None

    def _made(self, key: Any, make: Callable[[], Engine]) -> _Line:
        """A new engine; those that nobody uses and that are too many, or of the same key and too small, go before, so
        that their memory is free."""
        idle = [line for line in self._lines if line.idle]
        gone = [line for line in idle if line.key == key] + idle[: max(0, len(self._lines) - MOST_ENGINES + 1)]
        self._lines = [line for line in self._lines if line not in gone]
        del idle, gone
        line = _Line(make(), key)
        self._lines.append(line)
        return line

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Start the thread, if there is none."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=_drive, args=(weakref.ref(self), self._changed), name="rcd-decode")
            self._thread.daemon = True
            self._thread.start()

    def turn(self) -> bool:
        """One turn of every engine; False if there was nothing to do."""
        with self._changed:
            while self._making and not self._closed:
                self._changed.wait(0.1)
        with self._driving:
            with self._changed:
                lines, cancelled = list(self._lines), self._cancelled
                self._cancelled = []
            for handle in cancelled:
                self._drop(handle, lines)
            worked = bool(cancelled)
            for line in lines:
                if line.idle:
                    continue
                worked = True
                try:
                    self._admit(line)
                    for event in line.engine.turn():
                        self._tell(line, event)
                except BaseException as error:
                    self._abandon(line, error)
                    if not isinstance(error, Exception):
                        raise
            return worked

    def _admit(self, line: _Line) -> None:
        while line.waiting and line.engine.free:
            with self._changed:
                if not line.waiting:
                    return
                handle = line.waiting.popleft()
                self._changed.notify_all()
            if handle.done:
                continue
            self._number += 1
            handle.row = self._number
            line.serving[handle.row] = handle
            failed = line.engine.admit(handle.request.numbered(handle.row))
            if failed is not None:
                self._tell(line, failed)

    def _tell(self, line: _Line, event: Event) -> None:
        handle = line.serving.get(event.row) if isinstance(event, Step) else line.serving.pop(event.row, None)
        if handle is not None:
            handle.put(event.renamed(handle.request.row))

    def _drop(self, handle: Handle, lines: list[_Line]) -> None:
        if handle.done:
            return
        for line in lines:
            with self._changed:
                if handle in line.waiting:
                    line.waiting.remove(handle)
            if line.serving.get(handle.row) is handle:
                line.engine.cancel(handle.row)
                del line.serving[handle.row]
        handle.put(Failed(handle.request.row, "the request was cancelled.", cancelled=True))

    def _abandon(self, line: _Line, error: BaseException) -> None:
        """The engine is lost, and everyone who waits for it is told."""
        with self._changed:
            if line in self._lines:
                self._lines.remove(line)
            told = [*line.serving.values(), *line.waiting]
            line.serving.clear()
            line.waiting.clear()
        for handle in told:
            handle.put(error)

    def abandon_all(self, error: BaseException) -> None:
        for line in list(self._lines):
            self._abandon(line, error)
        for handle in self._cancelled:
            handle.put(error)

    def rest(self) -> bool:
        """Wait for work; True when the thread should end."""
        with self._changed:
            if self._closed or self._cancelled or any(not line.idle for line in self._lines):
                return False
            self._changed.wait(self.linger)
            if self._closed or self._cancelled or any(not line.idle for line in self._lines):
                return False
            self._thread = None
            return True


_LOOPS: weakref.WeakSet[DecodeLoop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that still computes while the interpreter ends would crash it."""
    for loop in list(_LOOPS):
        loop.close()


def _forked() -> None:
    for loop in list(_LOOPS):
        loop.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _drive(held: weakref.ref[DecodeLoop], changed: threading.Condition) -> None:
    """The thread's work."""
    while True:
        loop = held()
        if loop is None:
            return
        try:
            if loop._closed:
                loop.abandon_all(RCDError("this loop was closed; load the model again."))
                return
            if not loop.turn() and loop.rest():
                return
        except BaseException as error:
            loop.abandon_all(error)
            with changed:
                loop._thread = None
            return
        del loop
