"""What a client may send beside a body, how long it may take for it, and how long it may leave an answer lying."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from rcd.serve.connection import MOST_HEAD, Connection
from tests.processes import FAILSAFE


class Wire(asyncio.Transport):
    """Keeps what is written; nobody takes any of it."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closing, self.aborted = b"", False, asyncio.Event()

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted.set()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def connected(seconds: float = FAILSAFE) -> tuple[Connection, Wire, list[bytes]]:
    """A connection to an application that reads bodies, its wire, and those bodies."""
    read: list[bytes] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        read.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"taken"})

    config = uvicorn.Config(application, lifespan="off", log_level="critical")
    found = Connection(config, ServerState(), {}, head_seconds=seconds, taking_seconds=seconds)
    wire = Wire()
    found.connection_made(wire)
    return found, wire, read


def test_a_head_that_does_not_end_is_refused_and_none_of_it_is_kept() -> None:
    async def send(begin: bytes, more: bytes) -> Wire:
        connection, wire, _ = connected()
        connection.data_received(begin)
        sent = len(begin)
        while not wire.closing:
            connection.data_received(more)
            sent += len(more)
            assert sent <= MOST_HEAD + len(more)
        return wire

    line = b"x: " + b"a" * 1000 + b"\r\n"
    for begin, more in (
        (b"GET / HTTP/1.1\r\n", line),
        (b"GET /", b"a" * 1000),
        (b"GET / HTTP/1.1\r\nx: ", b"a" * 1000),
    ):
        told = asyncio.run(send(begin, more)).written
        assert told.startswith(b"HTTP/1.1 431 ") and b'"code":"head_too_large"' in told


def test_bodies_in_parts_pass_and_endless_lines_between_them_do_not() -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

    async def whole() -> tuple[Wire, list[bytes]]:
        connection, wire, read = connected()
        for _ in range(2):  # the second one on the same connection
            for part in (head, *[b"1\r\nx\r\n"] * 100_000, b"0\r\n\r\n"):
                connection.data_received(part)
            await asyncio.gather(*connection.tasks)
        return wire, read

    wire, read = asyncio.run(whole())
    assert read == [b"x" * 100_000] * 2 and wire.written.count(b"taken") == 2 and not wire.closing

    async def trailers() -> Wire:
        connection, wire, _ = connected()
        connection.data_received(head + b"1\r\nx\r\n0\r\n")
        for _ in range(MOST_HEAD // 1000 + 2):
            if not wire.closing:
                connection.data_received(b"x: " + b"a" * 1000 + b"\r\n")
        connection.connection_lost(None)
        await asyncio.gather(*connection.tasks)
        return wire

    wire = asyncio.run(trailers())
    assert wire.closing and not wire.written


def test_a_head_that_never_comes_is_given_up(run_server: Any) -> None:
    running = run_server("words-rcd", body_timeout=0.05)
    for begin in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
        with socket.create_connection(("127.0.0.1", running.port), timeout=FAILSAFE) as client:
            client.sendall(begin)
            answer = b""
            while part := client.recv(4096):
                answer += part
            assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"timeout"' in answer


def test_a_client_that_takes_nothing_is_dropped_whatever_state_it_is_in() -> None:
    async def dropped(*steps: str) -> None:
        connection, wire, _ = connected(0.001)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.gather(*connection.tasks)
        for step in steps:
            getattr(connection, step)()
        await wire.aborted.wait()

    async def kept() -> None:
        connection, wire, _ = connected()
        connection.pause_writing()
        connection.resume_writing()
        assert connection._stuck is not None and connection._stuck.cancelled() and not wire.closing

    asyncio.run(dropped("pause_writing"))
    asyncio.run(dropped("timeout_keep_alive_handler"))  # it was closed, and takes no more of the rest
    asyncio.run(kept())
