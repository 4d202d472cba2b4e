"""Many callers, one thread that decodes: requests are submitted and cancelled from anywhere, engines found or made.

A loop drives engines in turn, each on its own requests, and gives every caller the events of its own. Its thread starts
with the first request and ends when there has been none for a while. Engines are made by the thread as well, in the
order in which requests came that need them, and as memory allows. What goes wrong with one request is that request's; a
failure of an engine or of the loop reaches everyone who waits for it, and the next call starts anew.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rcd.decode.engine import Engine
from rcd.decode.events import Event, Failed, Step
from rcd.decode.handle import Handle, Sink
from rcd.decode.loop_thread import LOOPS, closed_error, drive
from rcd.decode.prefixes import Prefixes
from rcd.decode.queues import EngineQueue, Plan
from rcd.decode.requests import Request
from rcd.errors import QueueFull, RCDError

LINGER, CLOSING = 10.0, 60.0
"""Seconds that a loop without requests stays, and that its end is waited for when it is closed."""
MOST_WAITING = 1024
"""Requests that wait for a row; one more is refused, or waits with its caller."""
MOST_ENGINES, MOST_UNUSED = 8, 4
"""Engines at once. One that nobody uses makes room for another; where all are used, the next one waits."""


class DecodeLoop:
    """`most_rows` bounds the rows of an engine, `memory` the bytes of all caches together (None: what the machine
    has), `prefix_bytes` what is kept of prompts that have been read, for others that begin alike. `prepare` is called
    with every new engine, by the thread that decodes."""

    def __init__(
        self, most_waiting: int = MOST_WAITING, linger: float = LINGER, *, most_rows: int | None = None,
        memory: int | None = None, prefix_bytes: int = 0, prepare: Callable[[Engine], None] | None = None,
    ):  # fmt: skip
        self.most_waiting, self.linger, self.most_rows, self.memory = most_waiting, linger, most_rows, memory
        self._prefix_bytes, self._prepare = prefix_bytes, prepare
        self.closed = False
        self.begin()
        LOOPS.add(self)

    def begin(self) -> None:
        """As nobody has asked yet: also in a forked process, which has no thread and whose locks may be held by those
        that it does not have."""
        self._queues: list[EngineQueue] = []
        self._changed = threading.Condition()
        self._cancelled: list[Handle] = []
        self._thread: threading.Thread | None = None
        self._number = self.made = 0
        self.prefixes = Prefixes(self._prefix_bytes) if self._prefix_bytes else None

    # -- callers -------------------------------------------------------------------------------------------------

    def submit(self, request: Request, plan: Plan, *, wait: bool = False, events: Sink | None = None) -> Handle:
        """Queue a request with an engine that suits it, or with one that is still to be made, and return at once.
        Where as many wait as may, the call waits for room, or is refused."""
        if threading.current_thread() is self._thread:  # it would wait for itself
            raise RCDError("a probe cannot decode with the pipeline that it watches; do it when the call is over.")
        if not self._allowed(plan, 1, plan.capacity):  # told before it stands in a line with those that fit
            needed, most = plan.size(1, plan.capacity) / 2**20, (self.memory or 0) / 2**20
            raise RCDError(
                f"a text of {plan.capacity} positions needs {needed:.2f} MiB of cache and {most:.2f} may be used; "
                "shorten it."
            )
        handle = Handle(request, self.cancel, events)
        with self._changed:
            while self.waiting >= self.most_waiting and not self.closed:
                if not wait:
                    raise QueueFull(
                        f"the queue is full: {self.waiting} requests wait already; try again when some are answered."
                    )
                self._changed.wait(1.0)
            if self.closed:
                raise closed_error()
            self._number += 1
            handle.number = self._number
            self._queue(plan).waiting.append(handle)
            self._run()
            self._changed.notify_all()
        return handle

    def cancel(self, handle: Handle) -> None:
        with self._changed:
            self._cancelled.append(handle)
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While this is open no request is taken; it is refused while any is served or waits. Engines are gone."""
        with self._changed:
            if any(not queue.idle for queue in self._queues):
                raise RCDError("requests are being decoded with this model; wait for them, or cancel them.")
            self._queues = []
            yield

    def close(self) -> None:
        """Tell everyone who waits, and end the thread."""
        with self._changed:
            self.closed, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSING)

    @property
    def waiting(self) -> int:
        """Requests that no row serves yet."""
        return sum(len(queue.waiting) for queue in list(self._queues))

    @property
    def serving(self) -> int:
        return sum(len(queue.serving) for queue in list(self._queues))

    @property
    def engines(self) -> list[Engine]:
        return [queue.engine for queue in list(self._queues) if queue.engine is not None]

    def _queue(self, plan: Plan) -> EngineQueue:
        """The roomiest that suits, so that smaller ones of its kind run empty. A new one is twice as roomy as they, so
        that texts that grow longer and longer need few engines. The last used one stands last."""
        suiting = [queue for queue in self._queues if queue.suits(plan)]
        if suiting:
            queue = max(suiting, key=lambda queue: queue.plan.capacity)
        else:
            alike = [queue.plan.capacity for queue in self._queues if queue.plan.key == plan.key]
            roomy = max([plan.capacity, *(2 * capacity for capacity in alike if capacity < plan.capacity)])
            queue = EngineQueue(replace(plan, capacity=roomy if self._allowed(plan, 1, roomy) else plan.capacity))
        self._queues = [*(other for other in self._queues if other is not queue), queue]
        return queue

    def _allowed(self, plan: Plan, rows: int, capacity: int) -> bool:
        return self.memory is None or plan.size(rows, capacity) <= self.memory

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Start the thread, if there is none."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=drive, args=(weakref.ref(self),), name="rcd-decode")
            self._thread.daemon = True
            self._thread.start()

    def turn(self) -> bool:
        """One turn of every engine; False if there was nothing to do."""
        with self._changed:
            queues, cancelled = list(self._queues), self._cancelled
            self._cancelled = []
        for handle in cancelled:
            self._drop(handle, queues)
        worked, before = bool(cancelled), math.inf
        for queue in sorted(queues, key=lambda queue: (queue.engine is not None, queue.first)):
            if queue.idle:
                continue
            worked = True
            try:
                engine = queue.engine or (self._make(queue) if queue.first < before else None)
                if engine is None:
                    before = min(before, queue.first)
                    continue
                self._admit(queue, engine, before)
                for event in engine.turn():
                    self._tell(queue, event)
            except BaseException as error:
                self._abandon(queue, error)
                if not isinstance(error, Exception):
                    raise
        return worked

    def _make(self, queue: EngineQueue) -> Engine | None:
        """The engine of a queue, if there is room for it. None: it waits until another one has run empty."""
        plan = queue.plan
        rows = plan.rows if self.most_rows is None else min(plan.rows, self.most_rows)
        while rows > 1 and not self._allowed(plan, rows, plan.capacity):
            rows -= 1
        needed = plan.size(rows, plan.capacity)
        if not self._cleared(queue, needed):
            return None
        self.made += 1
        queue.engine, queue.bytes = plan.make(rows, plan.capacity, self.prefixes), needed
        if self._prepare is not None:
            self._prepare(queue.engine)
        return queue.engine

    def _cleared(self, queue: EngineQueue, needed: int) -> bool:
        """Whether there is room, after engines that nobody uses have gone: of the same key, and as many as need be."""
        with self._changed:
            spare = [other for other in self._queues if other.spare(queue.first)]
            for other in [other for other in spare if other.idle and other.plan.key == queue.plan.key]:
                spare.remove(other)
                self._queues.remove(other)
            while spare and not self._room(needed):
                other = spare.pop(0)
                other.engine = None  # whoever waits for it waits for another one
                if other.idle:
                    self._queues.remove(other)
            return self._room(needed)

    def _room(self, needed: int) -> bool:
        made = [queue for queue in self._queues if queue.engine is not None]
        if not made:
            return True
        few = len(made) < MOST_ENGINES and sum(queue.idle for queue in made) < MOST_UNUSED
        return few and (self.memory is None or needed + sum(queue.bytes for queue in made) <= self.memory)

    def _admit(self, queue: EngineQueue, engine: Engine, before: float) -> None:
        """Give free rows to those who wait; where another engine waits for room, only to those who came before its
        first, so that its turn comes."""
        while queue.waiting and engine.free:
            with self._changed:
                if queue.first > before or not queue.waiting:
                    return
                handle = queue.waiting.popleft()
                self._changed.notify_all()
            if handle.done:
                continue
            queue.serving[handle.number] = handle
            handle.admitted = time.perf_counter()
            failed = engine.admit(handle.request.numbered(handle.number))
            if failed is not None:
                self._tell(queue, failed)

    def _tell(self, queue: EngineQueue, event: Event) -> None:
        handle = queue.serving.get(event.row) if isinstance(event, Step) else queue.serving.pop(event.row, None)
        if handle is not None:
            handle.put(event.renamed(handle.request.row))

    def _drop(self, handle: Handle, queues: list[EngineQueue]) -> None:
        if handle.done:
            return
        for queue in queues:
            with self._changed:
                if handle in queue.waiting:
                    queue.waiting.remove(handle)
                    self._changed.notify_all()
                if queue.engine is None and not queue.waiting and queue in self._queues:
                    self._queues.remove(queue)
            if queue.serving.pop(handle.number, None) is not None and queue.engine is not None:
                queue.engine.cancel(handle.number)
        handle.put(Failed(handle.request.row, "the request was cancelled.", cancelled=True))

    def _abandon(self, queue: EngineQueue, error: BaseException) -> None:
        """The engine is lost, and everyone who waits for it is told."""
        with self._changed:
            if queue in self._queues:
                self._queues.remove(queue)
            told = [*queue.serving.values(), *queue.waiting]
            queue.serving.clear()
            queue.waiting.clear()
            self._changed.notify_all()
        for handle in told:
            handle.put(error)

    def abandon_all(self, error: BaseException) -> None:
        """Tell everyone who waits; the thread ends."""
        for queue in list(self._queues):
            self._abandon(queue, error)
        for handle in self._cancelled:
            handle.put(error)
        with self._changed:
            self._thread = None

    def rest(self) -> bool:
        """Wait for work; True when the thread should end."""
        with self._changed:
            if self._changed.wait_for(self._wanted, self.linger):
                return False
            self._thread = None
            return True

    def _wanted(self) -> bool:
        return self.closed or bool(self._cancelled) or any(not queue.idle for queue in self._queues)
