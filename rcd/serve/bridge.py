"""From the thread that decodes to the event loop: one wake-up for all that a turn has told, whoever reads slowly.

What a request tells is kept until its reader comes: settled tokens as they are, of its steps' drafts the last ones, the
others merged into them. The thread that decodes never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from typing import Any

from rcd.decode.events import Event, Failed, Finished, Step, TokenLogprob
from rcd.serve.drafts import Canvas
from rcd.serve.pieces import Draft, Refused


class Bridge:
    """The mailboxes that have something, and the event loop that is told so."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._ready = deque[Mailbox]()
        self._called = False

    def ring(self, mailbox: Mailbox) -> None:
        """From any thread, when something lies in the mailbox."""
        if mailbox.rung:
            return
        mailbox.rung = True
        self._ready.append(mailbox)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads any more
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False
        while self._ready:
            mailbox = self._ready.popleft()
            mailbox.rung = False
            mailbox.wake()


class Mailbox:
    """What the choices of one request have told and its reader has not taken. One reader."""

    def __init__(self, bridge: Bridge, choices: int, canvases: list[Canvas] | None = None, kept: int = 8):
        """`canvases`: of every choice, if drafts are wanted; `kept`: so many of each at most."""
        self._bridge = bridge
        self.rung = False
        self.began = time.perf_counter()
        self.sinks = [
            Sink(self, index, None if canvases is None else canvases[index], kept) for index in range(choices)
        ]
        self.refused: Refused | None = None
        self._waiting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._bridge.ring(self)

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def refuse(self, refused: Refused) -> None:
        """End it, from the event loop; the first reason counts."""
        if self.refused is None:
            self.refused = refused
        self.wake()

    @property
    def told(self) -> bool:
        return self.refused is not None or any(sink.told for sink in self.sinks)

    async def wait(self, seconds: float | None = None) -> None:
        """Until there is something, or so long."""
        if self.told:
            return
        loop = self._bridge.loop
        self._waiting = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self.wake)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()


class Sink:
    """Where one choice's events are put, from the thread that decodes."""

    def __init__(self, mailbox: Mailbox, index: int, canvas: Canvas | None, kept: int):
        self._mailbox, self.index, self.canvas, self._kept = mailbox, index, canvas, kept
        self._lock = threading.Lock()
        self._ids: list[int] = []
        self._steps = deque[Step]()
        self._logprobs: dict[int, TokenLogprob] = {}
        self._end: Finished | Failed | BaseException | None = None
        self.told = False
        self._drawing = False
        """Whether the reader has the canvas."""

    def put(self, event: Event | BaseException) -> None:
        with self._lock:
            if isinstance(event, Step):
                if not self._step(event):
                    return
            else:
                self._end = event
            self.told = True
        self._mailbox.ring()

    def _step(self, event: Step) -> bool:
        """Whether a reader should hear of it."""
        if event.logprobs is not None:
            self._keep(event)
        self._ids += event.settled
        if self.canvas is not None:
            self._steps.append(event)
            if len(self._steps) > self._kept and not self._drawing:
                self.canvas.write(self._steps.popleft())
        return bool(event.settled) or self.canvas is not None

    def _keep(self, event: Step) -> None:
        told = event.logprobs
        assert told is not None
        for j in event.committed.nonzero().flatten().tolist():
            if event.offset + j >= 0:
                best = tuple(zip(told.best_ids[j].tolist(), told.best[j].tolist(), strict=True))
                self._logprobs[event.offset + j] = TokenLogprob(int(event.draft[j]), float(told.token[j]), best)

    def take(self) -> Taken:
        """All that is there, from the event loop."""
        with self._lock:
            taken = Taken(self._ids, self._steps, self._end)
            self._ids, self._steps, self.told = [], deque(), False
            self._drawing = self.canvas is not None
            return taken

    def drafts(self, taken: Taken) -> list[Draft]:
        """Those of the steps that were taken, in the same breath: until then no other step is merged."""
        if self.canvas is None:
            return []
        drawn = [self.canvas.told(step) for step in taken.steps]
        self._drawing = False
        return drawn

    def logprobs(self, places: range, ids: list[int]) -> list[TokenLogprob]:
        """Of settled tokens, which are handed out once."""
        nothing = float("nan")
        with self._lock:
            return [self._logprobs.pop(k, TokenLogprob(ids[k - places.start], nothing)) for k in places]


class Taken:
    """What a sink had."""

    __slots__ = ("end", "ids", "steps")

    def __init__(self, ids: list[int], steps: deque[Step], end: Any):
        self.ids, self.steps, self.end = ids, steps, end
