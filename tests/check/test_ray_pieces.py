"""What the front does where a replica dies, is full or is silent, with replicas that do so at a known place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("ray.serve")
from ray import exceptions
from ray.serve.exceptions import BackPressureError

from rcd.serve.pieces import Accepted, Done, Piece, Refused, Text
from rcd.serve.ray import ATTEMPTS, RayService, total
from rcd.serve.schema import Ask
from rcd.serve.service import Load
from rcd.serve.settings import ServeSettings

ACCEPTED = Accepted("m", 3, 2)
DIES = exceptions.ActorDiedError()
FOREVER = object()
"""A replica that says nothing more."""


def done(index: int, text: str = "yes") -> Done:
    return Done(index, "eos", text, [1], 1, 1, 0, 0.1, 0.0)


class Response:
    """What a handle gives: lists of pieces, an error, or nothing for ever."""

    def __init__(self, script: list[Any]) -> None:
        self.script, self.cancelled = list(script), False

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> list[Piece]:
        if not self.script:
            raise StopAsyncIteration
        found = self.script.pop(0)
        if found is FOREVER:
            await asyncio.get_running_loop().create_future()
        if isinstance(found, BaseException):
            raise found
        return list(found)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """One script for each attempt; the last one for all further ones."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.responses = list(scripts), list[Response]()
        self.pieces = self

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, ask: Ask) -> Response:
        self.responses.append(Response(self.scripts[min(len(self.responses), len(self.scripts) - 1)]))
        return self.responses[-1]


def ask(stream: bool) -> Ask:
    return Ask(False, None, ["one", "two"], stream=stream)


def told(handle: Handle, stream: bool = False, **settings: Any) -> list[list[Piece]]:
    service = RayService(ServeSettings(**settings), lambda: 1).begin(handle)

    async def collected() -> list[list[Piece]]:
        return [found async for found in service.pieces(ask(stream))]

    found = asyncio.run(collected())
    assert all(response.cancelled for response in handle.responses) and not service._open
    return found


def flat(found: list[list[Piece]]) -> list[Piece]:
    return [piece for pieces in found for piece in pieces]


def test_a_plain_request_is_sent_again_and_nothing_is_told_twice() -> None:
    handle = Handle([[ACCEPTED], [done(0)], DIES], [[ACCEPTED], [done(0, "no"), done(1)]])
    assert flat(told(handle)) == [ACCEPTED, done(0), done(1)]
    assert len(handle.responses) == 2


@pytest.mark.parametrize("before", [[DIES], [[ACCEPTED], DIES]])
def test_a_stream_that_has_told_nothing_yet_is_sent_again(before: list[Any]) -> None:
    handle = Handle(before, [[ACCEPTED], [Text(0, "yes")], [done(0), done(1)]])
    assert flat(told(handle, stream=True)) == [ACCEPTED, Text(0, "yes"), done(0), done(1)]


@pytest.mark.parametrize(
    "error", [DIES, exceptions.ActorUnavailableError("gone", None), exceptions.WorkerCrashedError()]
)
def test_a_stream_that_is_cut_says_so(error: Exception) -> None:
    handle = Handle([[ACCEPTED], [Text(0, "ye")], error])
    *_, last = flat(told(handle, stream=True))
    assert isinstance(last, Refused) and (last.status, last.code) == (503, "replica_lost")
    assert len(handle.responses) == 1


def test_a_request_that_kills_every_replica_is_given_up() -> None:
    handle = Handle([[ACCEPTED], DIES])
    *_, last = flat(told(handle))
    assert isinstance(last, Refused) and last.code == "replica_lost" and last.retry_after
    assert len(handle.responses) == ATTEMPTS


def test_a_full_queue_and_a_failing_replica_are_told_as_such() -> None:
    full = told(Handle([BackPressureError(num_queued_requests=1, max_queued_requests=1)]))
    assert [(one.status, one.code) for one in flat(full) if isinstance(one, Refused)] == [(429, "queue_full")]
    failing = exceptions.RayTaskError("pieces", "Traceback", RuntimeError("no"))
    failed = told(Handle([[ACCEPTED], failing]))
    assert [one.status for one in flat(failed) if isinstance(one, Refused)] == [500]


def test_a_request_that_no_replica_takes_ends_at_its_limits() -> None:
    late = flat(told(Handle([FOREVER]), max_wait=0.01))
    assert [one.code for one in late if isinstance(one, Refused)] == ["queue_timeout"]
    late = flat(told(Handle([[ACCEPTED], FOREVER]), timeout=0.01))
    assert [one.code for one in late if isinstance(one, Refused)] == ["timeout"]


def held(service: RayService, act: Callable[[Any], Any]) -> list[Piece]:
    async def run() -> list[Piece]:
        pieces: AsyncIterator[list[Piece]] = service.pieces(ask(True))
        assert await anext(pieces) == [ACCEPTED]
        return await act(pieces)

    return asyncio.run(run())


def test_a_silent_stream_has_heartbeats_once_it_is_accepted() -> None:
    service = RayService(ServeSettings(heartbeat=0.001), lambda: 1).begin(Handle([[ACCEPTED], FOREVER]))
    assert held(service, anext) == []


def test_a_client_that_leaves_cancels_the_request_of_the_replica() -> None:
    handle = Handle([[ACCEPTED], FOREVER])
    service = RayService(ServeSettings(), lambda: 1).begin(handle)

    async def leave(pieces: Any) -> list[Piece]:
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return []

    held(service, leave)
    assert handle.responses[0].cancelled and not service._open


def test_at_the_end_of_the_server_who_waits_is_told() -> None:
    handle = Handle([[ACCEPTED], FOREVER])
    service = RayService(ServeSettings(), lambda: 1).begin(handle)

    async def end(pieces: Any) -> list[Piece]:
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        await service.stop()
        found: list[Piece] = await waiting
        return found

    (last,) = held(service, end)
    assert isinstance(last, Refused) and last.code == "shutting_down"


def test_before_the_replicas_are_there_nobody_is_ready() -> None:
    service = RayService(ServeSettings(), lambda: 1)
    assert asyncio.run(service.ready()) is False and asyncio.run(service.cards()) == []
    assert asyncio.run(service.load()) == {}
    assert asyncio.run(RayService(ServeSettings(), lambda: 0).begin(Handle([])).ready()) is False


def test_loads_are_summed_by_model() -> None:
    one, two = Load(1, 2, 3, 4, 5), Load(10, 20, 30, 40, 50)
    assert total([{"a": one}, {"a": two, "b": one}]) == {"a": Load(11, 22, 33, 44, 55, replicas=2), "b": one}
    assert total([]) == {}


def test_ray_names_the_sentence_of_a_replica_that_cannot_start() -> None:
    from rcd.serve.cluster import cause

    said = "ray::ServeReplica...\n  File x\nrcd.errors.RCDError: there is no folder '/x'; give one.\n more"
    assert cause(said) == "there is no folder '/x'; give one."
    assert "torch.OutOfMemoryError: CUDA" in cause("Traceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.")
