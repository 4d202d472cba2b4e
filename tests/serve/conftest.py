"""Small models behind the server: in process for most tests, behind a socket for what a network shows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

import rcd
from rcd.api import Pipeline
from rcd.serve.app import create_app
from rcd.serve.server import Server, listen, make
from rcd.serve.service import LocalService
from rcd.serve.settings import ServeSettings
from tests.processes import FAILSAFE

QUESTION = "Leo has 40 marbles. He loses 15 of them at the park. How many marbles does he have now?"
OTHER = "Mia has 12 pens. She gives 5 of them away. How many pens does she have now?"


class Api:
    """An app without a network. Every call has an event loop of its own."""

    def __init__(self, service: LocalService, settings: ServeSettings, keys: tuple[str, ...] = ()):
        self.service = service
        self.app = create_app(service, settings, keys)

    def run(self, ask: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        async def asked() -> Any:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=FAILSAFE) as client:
                return await ask(client)

        return asyncio.run(asked())

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.run(lambda client: client.get(path, **more))

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        given = {"json": body} if body is not None else {}
        return self.run(lambda client: client.post(path, **given, **more))

    def complete(self, **body: Any) -> Any:
        answer = self.post("/v1/completions", {"prompt": QUESTION, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        given = {"prompt": QUESTION} if path == "/v1/completions" else {}
        answer = self.post(path, {**given, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        return chunks(answer.text)

    def refused(self, path: str = "/v1/completions", status: int = 400, **body: Any) -> Any:
        given = {"prompt": QUESTION} if path == "/v1/completions" else {}
        answer = self.post(path, {**given, **body})
        assert answer.status_code == status, answer.text
        return answer.json()["error"]


def chunks(text: str) -> list[Any]:
    """The events of a whole stream, its end checked."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def said(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    found = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in found)


@pytest.fixture(scope="session")
def pipelines() -> dict[str, Pipeline]:
    return {name: rcd.load(f"bundled:{name}") for name in ("words-rcd", "words-seqd", "llada-rcd")}


@pytest.fixture(scope="session")
def make_api(pipelines: dict[str, Pipeline]) -> Callable[..., Api]:
    def made(*names: str, keys: tuple[str, ...] = (), config: Any = None, **settings: Any) -> Api:
        asked = ServeSettings(**settings)
        models = {name: Pipeline(pipelines[name].checkpoint) for name in names or pipelines}
        return Api(LocalService(models, asked, config), asked, keys)

    return made


@pytest.fixture(scope="session")
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()


class Running:
    """A server behind a socket, in a thread of this process."""

    def __init__(self, service: LocalService, settings: ServeSettings, keys: tuple[str, ...] = ()):
        self.socket = listen(settings)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.service = service
        self.server: Server = make(service, settings, keys)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self._thread.start()

    def end(self) -> None:
        loop = self.server.loop
        if loop is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(self.server.end)
        self._thread.join(FAILSAFE)


@pytest.fixture(scope="session")
def run_server(pipelines: dict[str, Pipeline]) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def run(*names: str, keys: tuple[str, ...] = (), **settings: Any) -> Running:
        asked = ServeSettings(port=0, **settings)
        models = {name: Pipeline(pipelines[name].checkpoint) for name in names or pipelines}
        started.append(Running(LocalService(models, asked), asked, keys))
        return started[-1]

    yield run
    for one in started:
        one.end()


@pytest.fixture(scope="session")
def running(run_server: Callable[..., Running]) -> Running:
    return run_server()
