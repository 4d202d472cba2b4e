"""A service whose models live in replicas on a Ray cluster: requests go to them, pieces come back.

Placement, restarts, routing, scaling and health checks are Ray Serve's. What is done here is what Ray leaves to its
users: a request whose replica died is sent again where nothing of its answer was told, and clients hear why one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from ray import exceptions, serve
from ray.serve import exceptions as serving

from rcd.errors import first_line
from rcd.serve.guard import LOG
from rcd.serve.pieces import Accepted, Done, Piece, Refusal, Refused
from rcd.serve.replica import DEPLOYMENT
from rcd.serve.requests import DEADLINE, LEAVING
from rcd.serve.schema import Ask
from rcd.serve.service import Load
from rcd.serve.settings import ServeSettings

ATTEMPTS = 5
"""Replicas that may die under one request: more, and it may be the request that kills them."""
ASKING = 30.0
"""Seconds for a question about the models."""
TELLING = 2.0
"""Seconds in which replicas tell their load; those that do not are left out."""
LOST = Refused(503, "the replicas that had the request died; try again soon.", None, "replica_lost", 5)
CUT = Refused(503, "the replica that answered died in the midst of it; send the request again.", None, "replica_lost")
NONE = Refused(503, "no replica of the models runs; try again soon.", None, "no_replica", 5)
FULL = Refused(429, "the queue is full; try again when some requests are answered.", None, "queue_full", 1)
FAILED = Refused(500, "the replica failed; the server's log says why.", None, "decoding_failed")


class Lost(Exception):
    """The replica that had a request has died."""


class RayService:
    """The `Service` over the replicas of one application."""

    def __init__(self, settings: ServeSettings, running: Callable[[], int]) -> None:
        """`running`: how many replicas run, as Ray Serve sees it; it may block."""
        self._settings, self._running = settings, running
        self._handle: Any = None
        self._cards: list[dict[str, Any]] | None = None
        self._open = set[asyncio.Future[None]]()

    def begin(self, handle: Any) -> RayService:
        """Send requests by this handle."""
        self._handle = handle
        return self

    async def cards(self) -> list[dict[str, Any]]:
        if self._handle is None:
            return []
        if self._cards is None:
            self._cards = await self._asked("cards")
        return self._cards

    async def example(self, model: str | None, seed: int) -> dict[str, Any]:
        found = await self._asked("example", model, seed)
        if isinstance(found, Refused):
            raise _refusal(found)
        return dict(found)

    async def _asked(self, method: str, *args: Any) -> Any:
        """A question that any replica can answer."""
        if self._handle is None:
            raise _refusal(NONE)
        for _ in range(ATTEMPTS):
            try:
                with _as_lost():
                    return await asyncio.wait_for(getattr(self._handle, method).remote(*args), ASKING)
            except Lost:
                continue
            except (TimeoutError, serving.DeploymentUnavailableError):
                break
            except serving.BackPressureError:
                raise _refusal(FULL) from None
        raise _refusal(NONE)

    async def load(self) -> dict[str, Load]:
        """Summed over the replicas that answer."""
        if self._handle is None:
            return {}
        try:
            told = await self._handle.broadcast("load").results_async(timeout_s=TELLING, return_exceptions=True)
        except (TimeoutError, exceptions.RayError, serving.RayServeException):
            return {}
        return total([loads for loads in told if isinstance(loads, dict)])

    async def ready(self) -> bool:
        return self._handle is not None and await asyncio.to_thread(self._running) > 0

    async def stop(self) -> None:
        for leaving in list(self._open):
            if not leaving.done():
                leaving.set_result(None)

    async def pieces(self, ask: Ask) -> AsyncIterator[list[Piece]]:
        leaving = asyncio.get_running_loop().create_future()
        self._open.add(leaving)
        accepted, told, done = False, False, set[int]()
        began = time.monotonic()
        try:
            for _ in range(ATTEMPTS):
                attempt = self._attempt(ask, leaving, began, accepted)
                async with contextlib.aclosing(attempt):  # type: ignore[type-var]
                    try:
                        async for found in attempt:
                            if accepted:  # of an attempt before this one, too
                                found = [piece for piece in found if not _again(piece, done)]
                            accepted = accepted or any(isinstance(piece, Accepted) for piece in found)
                            done.update(piece.index for piece in found if isinstance(piece, Done))
                            told = told or (ask.stream and any(not isinstance(piece, Accepted) for piece in found))
                            yield found
                        return
                    except Lost:
                        LOG.info(
                            "the replica of a request died; %s", "its stream is cut" if told else "it is sent again"
                        )
                        if told:
                            yield [CUT]
                            return
            yield [LOST]
        finally:
            self._open.discard(leaving)

    async def _attempt(
        self, ask: Ask, leaving: asyncio.Future[None], began: float, accepted: bool
    ) -> AsyncIterator[list[Piece]]:
        """What one replica tells; Lost if it dies. Closing it cancels the request there."""
        response: Any = self._handle.options(stream=True).pieces.remote(ask)
        coming: asyncio.Task[Any] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(_next(response))
                while not coming.done():
                    left = self._left(began, accepted)
                    beat = min(left, self._settings.heartbeat) if ask.stream and accepted else left
                    await asyncio.wait({coming, leaving}, timeout=max(beat, 0), return_when=asyncio.FIRST_COMPLETED)
                    if coming.done():
                        break
                    if leaving.done():
                        yield [LEAVING]
                        return
                    if self._left(began, accepted) <= 0:
                        yield [self._late(accepted)]
                        return
                    if ask.stream and accepted:
                        yield []
                try:
                    with _as_lost():
                        found = coming.result()
                except serving.BackPressureError:
                    found = [FULL]
                except serving.DeploymentUnavailableError:
                    found = [NONE]
                except exceptions.RayTaskError as error:
                    LOG.error("a replica failed: %s", first_line(error), exc_info=error)
                    found = [FAILED]
                if found is None:
                    return
                accepted = accepted or bool(found)
                yield found
                if any(isinstance(piece, Refused) for piece in found):
                    return
        finally:
            if coming is not None:
                coming.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody asks it again
                coming.cancel()
            response.cancel()

    def _left(self, began: float, accepted: bool) -> float:
        """Seconds until the request is given up."""
        asked = self._settings
        most = asked.timeout if accepted or asked.max_wait is None else min(asked.timeout, asked.max_wait)
        return began + most - time.monotonic()

    def _late(self, accepted: bool) -> Refused:
        asked = self._settings
        if accepted or asked.max_wait is None or asked.max_wait >= asked.timeout:
            return DEADLINE("timeout", f"it took longer than {asked.timeout:g} seconds")
        return DEADLINE("queue_timeout", f"no row was free for {asked.max_wait:g} seconds")


async def _next(response: Any) -> Any:
    """None at the end: a task cannot give a StopAsyncIteration away."""
    return await anext(response, None)


@contextlib.contextmanager
def _as_lost() -> Any:
    """The ways in which Ray says that a replica, its worker or its machine has gone."""
    try:
        yield
    except (exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.ObjectLostError) as error:
        raise Lost from error
    except (serving.ReplicaUnavailableError, serving.RequestCancelledError) as error:
        raise Lost from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # by whoever waits for us
            raise
        raise Lost from error


def _again(piece: Piece, done: set[int]) -> bool:
    """Whether it was told by an attempt before."""
    return isinstance(piece, Accepted) or (isinstance(piece, Done) and piece.index in done)


def _refusal(refused: Refused) -> Refusal:
    found = Refusal(refused.message, refused.param, refused.code, refused.status)
    found.refused = refused
    return found


def total(told: list[dict[str, Load]]) -> dict[str, Load]:
    """By model, over replicas."""
    found: dict[str, Load] = {}
    for loads in told:
        for model, load in loads.items():
            before = vars(found.get(model, Load(replicas=0)))
            found[model] = replace(load, **{name: value + before[name] for name, value in vars(load).items()})
    return found


def replicas_running(app: str) -> int:
    """As Ray Serve's own checks have it; it asks the controller, and blocks."""
    try:
        found = serve.status().applications.get(app)
    except (exceptions.RayError, serving.RayServeException):
        return 0
    deployment = None if found is None else found.deployments.get(DEPLOYMENT)
    return 0 if deployment is None else int(deployment.replica_states.get("RUNNING", 0))


def app(args: dict[str, Any]) -> Any:
    """An application for `serve deploy`: the replicas, and in front of them the API and the page behind Ray's proxy.

    `args`: `models` (as `--model`, a list), `decode` (settings of decoding, and `carry`), `device`, `dtype`,
    `revision`, `threads`, and any setting of the server. Keys come from the environment, or from the file that
    `api_key_file` names, of the machine of the front.
    """
    from rcd.serve.deployed import build

    return build(args)
