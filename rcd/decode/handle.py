"""A submitted request as its caller has it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from rcd.decode.events import Event, Failed, Finished, Step
from rcd.decode.requests import Request
from rcd.errors import RCDError, first_line


class Sink(Protocol):
    """Where events are put, by the thread that decodes: what it does there must be quick."""

    def put(self, item: Event | BaseException) -> None: ...


Events = queue.SimpleQueue[Event | BaseException]


class Handle:
    """One submitted request: its events, in order; its answer; its cancellation. Safe from any thread."""

    def __init__(self, request: Request, cancel: Callable[[Handle], None], events: Sink | None = None):
        """`events`: what hears of them instead, such as a queue that several requests share."""
        self.request, self._cancel = request, cancel
        self._own: Events = queue.SimpleQueue()
        self._events: Sink = self._own if events is None else events
        self.number = -1
        """Its place among the loop's requests."""
        self.admitted: float | None = None
        """When it got a row, by `time.perf_counter`."""
        self.done = False
        """Whether its last event is there."""

    def __repr__(self) -> str:
        state = "done" if self.done else "waiting" if self.admitted is None else "decoding"
        return f"Handle(request {self.number}, {len(self.request.prompt)} prompt tokens, {state})"

    def __iter__(self) -> Iterator[Event]:
        """Steps, if the request wants them, and last a Finished or a Failed, which is told again to whoever asks again.
        Leaving the iteration cancels."""
        if self._events is not self._own:
            raise RCDError("the events of this request go to the queue that `submit` was given; read them there.")
        return follow([self], self._own, again=True)

    def result(self) -> Finished:
        """The answer; a failure is raised."""
        for event in self:
            if isinstance(event, Failed):
                raise RCDError(event.message) from event.cause
            if isinstance(event, Finished):
                return event
        raise RCDError("the request was cancelled.")

    def cancel(self) -> None:
        """Free its row at the next step. A request that is done stays so."""
        if not self.done:
            self._cancel(self)

    def put(self, event: Event | BaseException) -> None:
        if not self.done:
            self.done = not isinstance(event, Step)
            self._events.put(event)


def follow(handles: Sequence[Handle], events: Events, again: bool = False) -> Iterator[Event]:
    """What requests with one queue tell, until the last one is done. Leaving the iteration cancels what is left.
    `again`: the end stays in the queue, for others who wait and for a second call."""
    left = len(handles)
    try:
        while left:
            event = events.get()
            if again and not isinstance(event, Step):
                events.put(event)
            if isinstance(event, BaseException):
                raise lost(event)
            yield event
            left -= not isinstance(event, Step)
    finally:
        for handle in handles:
            handle.cancel()


def lost(error: BaseException) -> BaseException:
    """What a caller hears of a failure that is not the request's."""
    if isinstance(error, RCDError | SystemExit):
        return error
    found = RCDError(
        f"decoding stopped ({type(error).__name__}: {first_line(error)}) and this request was lost; try it again, and "
        "please report it if it stops again."
    )
    found.__cause__ = error
    return found
