"""A real server for the browser, whose answers a test may take over: then it says what is sent, and when."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rcd.api import load

MODELS = ("words-rcd", "words-seqd", "llada-rcd", "llada-seqd")
HEADERS = [(b"content-type", b"text/event-stream")]
END, CUT = object(), object()


class Script:
    """One answer, told by the test piece by piece."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()
        self.status, self.headers = 200, HEADERS
        self.body: dict[str, Any] = {}
        """What was asked."""
        self.left = threading.Event()
        """The client went away."""

    def draft(self, step: int, canvas: list[dict[str, Any]], offset: int = 0, length: int = 8) -> None:
        told = {"type": "draft", "index": 0, "step": step, "length": length, "final": 0, "offset": offset}
        self.send({"choices": [], "rcd": {**told, "canvas": canvas}})

    def text(self, text: str) -> None:
        self.send({"choices": [{"index": 0, "text": text, "finish_reason": None}]})

    def done(self, steps: int, tokens: int) -> None:
        told = {"type": "done", "index": 0, "denoising_steps": steps, "forwards": steps + 1, "tokens": tokens}
        told |= {"tokens_per_step": tokens / steps, "seconds": 0.5, "queued_seconds": 0.0, "stop_reason": "eos"}
        self.send({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "rcd": told})
        self.queue.put(b"data: [DONE]\n\n")
        self.queue.put(END)

    def send(self, event: dict[str, Any]) -> None:
        self.queue.put(f"data: {json.dumps(event)}\n\n".encode())

    def end(self) -> None:
        """The answer ends as it stands, without saying that it is complete."""
        self.queue.put(END)

    def cut(self) -> None:
        """The connection breaks, as when the server is killed."""
        self.queue.put(CUT)

    def refuse(self, status: int, message: str, param: str | None = None, wait: int | None = None) -> None:
        self.status, self.headers = status, [(b"content-type", b"application/json")]
        if wait is not None:
            self.headers.append((b"retry-after", str(wait).encode()))
        self.queue.put(json.dumps({"error": {"message": message, "type": "x", "param": param, "code": None}}).encode())
        self.queue.put(END)

    async def play(self, receive: Any, send: Any) -> None:
        listening = asyncio.ensure_future(self._listen(receive))
        first = await asyncio.to_thread(self.queue.get)
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        item = first
        while item is not END and item is not CUT:
            await send({"type": "http.response.body", "body": item, "more_body": True})
            item = await asyncio.to_thread(self.queue.get)
        listening.cancel()
        if item is END:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _listen(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


def cell(text: str, state: str = "committed", **more: Any) -> dict[str, Any]:
    """A place of a draft."""
    plain = {"new": state == "committed", "revised": False, "alpha": None, "confidence": 0.5, "best": [[text, 0.5]]}
    return {"text": text, "state": state, **plain, **more}


class Stage:
    """The application, and the scripts that answer in its place, by model."""

    def __init__(self, app: Any):
        self.app = app
        self.scripts: dict[str, list[Script]] = {}
        self.given: list[Script] = []

    def script(self, model: str) -> Script:
        """The next answer of a model is the test's."""
        made = Script()
        self.given.append(made)
        self.scripts.setdefault(model, []).append(made)
        return made

    def clear(self) -> None:
        for script in self.given:
            script.queue.put(END)
        self.given, self.scripts = [], {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not self.scripts:
            return await self.app(scope, receive, send)
        message = await receive()
        while message.get("more_body"):
            more = await receive()
            message = {**more, "body": message["body"] + more["body"]}
        body = json.loads(message["body"])
        waiting = self.scripts.get(body["model"])
        if waiting:
            script = waiting.pop(0)
            script.body = body
            return await script.play(receive, send)
        first: list[Any] = [message]

        async def again() -> Any:
            return first.pop() if first else await receive()

        await self.app(scope, again, send)


class Site:
    """Where the page is."""

    def __init__(self, url: str, stage: Stage):
        self.url, self.stage = url, stage

    def script(self, model: str) -> Script:
        return self.stage.script(model)

    def ask(self, model: str, prompt: str, **body: Any) -> str:
        """The API's plain answer."""
        content = json.dumps({"model": model, "prompt": prompt, **body}).encode()
        request = urllib.request.Request(f"{self.url}v1/completions", content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return str(json.load(response)["choices"][0]["text"])

    def drafts(self, model: str, prompt: str, **rcd: Any) -> list[dict[str, Any]]:
        """The drafts that the API streams."""
        asked = {"model": model, "prompt": prompt, "stream": True, "rcd": {"drafts": True, **rcd}}
        content = json.dumps(asked).encode()
        request = urllib.request.Request(f"{self.url}v1/completions", content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            lines = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: {")]
        told = [json.loads(line).get("rcd") for line in lines]
        return [one for one in told if one and one["type"] == "draft"]


def models() -> Any:
    """However slow the machine is, no draft is merged into the next."""
    from rcd.serve.service import LocalService
    from rcd.serve.settings import ServeSettings

    return LocalService({name: load(f"bundled:{name}") for name in MODELS}, ServeSettings(drafts_kept=4096))


@contextmanager
def serving(service: Any, keys: Sequence[str] = ()) -> Iterator[Site]:
    import uvicorn  # of the extra `serve`, as the app is: without it these tests are skipped, with the reason

    from rcd.serve.app import create_app

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # whoever connects from now on is served
    stage = Stage(create_app(service, keys=keys))
    config = uvicorn.Config(stage, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield Site(f"http://127.0.0.1:{listening.getsockname()[1]}/", stage)
    finally:
        stage.clear()
        server.should_exit = True
        thread.join()
        listening.close()
