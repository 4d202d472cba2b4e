"""A closed loop of clients against an OpenAI-compatible server: each asks, reads the whole answer, and asks again.

Written by hand on asyncio's streams, one connection a client: on a machine that also serves, a full HTTP library would
take a large part of the processor that is to be measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rcd.errors import RCDError, reason

PATIENCE = 120.0
"""Seconds without a byte after which an answer counts as lost."""
PAUSE = 0.1
"""Seconds until a client whose request was lost asks again."""


@dataclass
class Answer:
    """What came back to one request."""

    request: int
    """Which of the bodies it was."""
    status: int = 0
    seconds: float = 0.0
    first: float | None = None
    """Seconds until the first text of a stream."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between one text of a stream and the next."""
    text: str = ""
    tokens: int = 0
    error: str | None = None
    ended: float = 0.0
    """When, by `time.perf_counter`."""


@dataclass(frozen=True)
class Server:
    """Where to ask."""

    url: str
    path: str = "/v1/completions"
    key: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise RCDError(f"{self.url!r} is no address such as http://127.0.0.1:8000.")
        return parts.hostname, parts.port or 80

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        host, port = self.address
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", f"Content-Length: {len(body)}"]
        lines += ["Content-Type: application/json"] if body else []
        lines += [f"Authorization: Bearer {self.key}"] if self.key else []
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection:
    """One client's, kept open from request to request."""

    def __init__(self, server: Server):
        self._server = server
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, content: bytes) -> asyncio.StreamReader:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._server.address, limit=1 << 22)
        reader, writer = self._streams
        writer.write(content)
        await writer.drain()
        return reader

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None

    async def ask(self, number: int, body: bytes) -> Answer:
        """Never raises for what the server does: that stands in the answer."""
        answer, began = Answer(number), time.perf_counter()
        try:
            reader = await self.send(self._server.request("POST", self._server.path, body))
            await self._read(reader, answer, began)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
            self.close()
        answer.ended = time.perf_counter()
        answer.seconds = answer.ended - began
        return answer

    async def get(self, path: str) -> str:
        """The content of a plain page."""
        reader = await self.send(self._server.request("GET", path))
        status, headers = await _head(reader)
        content = b"".join([part async for part in _parts(reader, headers)])
        if status != 200:
            raise RCDError(f"{self._server.url}{path} answered {status}: {content[:200].decode(errors='replace')}")
        return content.decode()

    async def _read(self, reader: asyncio.StreamReader, answer: Answer, began: float) -> None:
        answer.status, headers = await _head(reader)
        streamed = headers.get("content-type", "").startswith("text/event-stream")
        rest, last, whole = b"", None, False
        async for part in _parts(reader, headers):
            rest += part
            if not streamed:
                continue
            *events, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
            now, before = time.perf_counter(), len(answer.text)
            for event in events:
                whole = _read_event(event, answer) or whole
            if len(answer.text) > before:  # what arrives together is one text
                if last is None:
                    answer.first = now - began
                else:
                    answer.gaps.append(now - last)
                last = now
        if not streamed:
            _add(json.loads(rest), answer)
        elif not whole and answer.error is None:
            answer.error = "the stream ended without [DONE]"
        if headers.get("connection", "").lower() == "close":
            self.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    async with asyncio.timeout(PATIENCE):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> Any:
    """The body, as it arrives."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        async with asyncio.timeout(PATIENCE):
            yield await reader.readexactly(int(headers.get("content-length", 0)))
        return
    while True:
        async with asyncio.timeout(PATIENCE):
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            part = (await reader.readexactly(size + 2))[:-2]
        if not size:
            return
        yield part


def _read_event(event: bytes, answer: Answer) -> bool:
    """Take one event of a stream; whether it is the last."""
    if not event.startswith(b"data:"):
        return False  # a comment
    data = event[5:].strip()
    if data == b"[DONE]":
        return True
    _add(json.loads(data), answer)
    return False


def _add(found: Any, answer: Answer) -> None:
    """Text, usage or error of a plain answer or of one chunk."""
    if "error" in found:
        answer.error = str(found["error"].get("message", found["error"]))
        return
    for choice in found.get("choices", ()):
        said = choice.get("delta") or choice.get("message")
        answer.text += (choice.get("text") if said is None else said.get("content")) or ""
    if found.get("usage"):
        answer.tokens = int(found["usage"].get("completion_tokens") or 0)


async def closed_loop(
    server: Server, bodies: Sequence[bytes], clients: int, *, seconds: float | None = None,
    requests: int | None = None, every: int = 0, sample: Callable[[int], Awaitable[None]] | None = None,
) -> list[Answer]:  # fmt: skip
    """Until so many seconds have gone or so many requests are asked: the answers as they ended. `sample` is called
    after `every` so many of them."""
    numbers, answers = itertools.count(), list[Answer]()
    until = None if seconds is None else time.perf_counter() + seconds

    async def client() -> None:
        connection = Connection(server)
        try:
            while until is None or time.perf_counter() < until:
                number = next(numbers)
                if requests is not None and number >= requests:
                    return
                answers.append(await connection.ask(number, bodies[number % len(bodies)]))
                if answers[-1].error is not None:
                    await asyncio.sleep(PAUSE)
                if sample is not None and len(answers) % every == 0:
                    await sample(len(answers))
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return answers


async def fetch(server: Server, path: str) -> str:
    connection = Connection(server)
    try:
        return await connection.get(path)
    except OSError as error:
        raise RCDError(f"{server.url} does not answer ({reason(error)}); is a server running there?") from error
    finally:
        connection.close()
