"""The process: a socket, uvicorn, models that load while it listens, and an end of which everybody is told."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import uvicorn

from rcd.errors import RCDError, reason
from rcd.serve.app import State, create_app
from rcd.serve.connection import Connection
from rcd.serve.guard import LOG, loopback
from rcd.serve.service import SWITCH, Service
from rcd.serve.settings import ServeSettings

TELLING = 5.0
"""Seconds for those who are told that the server ends."""
BACKLOG = 2048


def listen(settings: ServeSettings) -> socket.socket:
    """The socket, before anything is loaded."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(found[0], found[1])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(found[4])
        made.listen(BACKLOG)
    except OSError as error:
        raise RCDError(
            f"the server cannot listen on {settings.host} port {settings.port} ({reason(error)}); name another with "
            "--host or --port."
        ) from error
    return made


def address(made: socket.socket) -> str:
    host, port = made.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def warn_open(settings: ServeSettings, keys: Sequence[str]) -> None:
    if not keys and not loopback(settings.host):
        print(
            f"rcd: warning: anyone who reaches {settings.host} can use this server; set a key with RCD_API_KEY or "
            "--api-key-file, or take --host 127.0.0.1",
            file=sys.stderr,
        )


class Server(uvicorn.Server):
    """uvicorn, with an end of its own: the first signal lets requests finish, the second does not."""

    def __init__(self, config: uvicorn.Config, service: Service, state: State, drain: float):
        super().__init__(config)
        self._service, self._state, self._drain = service, state, drain
        self.loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self.begin: Callable[[], None] = lambda: None
        """Called when it listens, and signals are heard."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.begin()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does it, but that a signal which was answered is not raised once more at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Let what runs finish, then end; when called again, tell the others and end at once."""
        if self._draining is not None:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # no traceback for everyone who is cut off
            self._telling = asyncio.ensure_future(self._service.stop())
            self.should_exit = self.force_exit = True
            return
        self._state.draining = True
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        if not await self._empty(self._drain):
            await self._service.stop()
            await self._empty(TELLING)
        self.should_exit = True

    async def _empty(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._state.running and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self._state.running


def make(service: Service, settings: ServeSettings, keys: Sequence[str] = (), state: State | None = None) -> Server:
    """A server that is not running yet."""
    state = state or State()
    app = create_app(service, settings, keys, state)
    connection: Any = functools.partial(Connection, head_seconds=settings.body_timeout, taking_seconds=settings.timeout)
    config = uvicorn.Config(
        app, http=connection, lifespan="off", ws="none", access_log=False, log_level="error", server_header=False,
        timeout_keep_alive=75, timeout_graceful_shutdown=int(TELLING), backlog=BACKLOG,
    )  # fmt: skip
    return Server(config, service, state, settings.drain)


def log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


def run(
    service: Service,
    settings: ServeSettings,
    keys: Sequence[str] = (),
    load: Callable[[], None] | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until a signal. `load` brings the models, in a thread of its own, while the server says that it is loading;
    then `ready` is told its address. An error of either ends the server."""
    made, state = listen(settings), State(ready=load is None)
    warn_open(settings, keys)
    server = make(service, settings, keys, state)
    failed: list[BaseException] = []

    def loading() -> None:
        assert load is not None
        try:
            load()
            state.ready = True
            print(f"rcd: ready on {address(made)} (Ctrl-C ends)", file=sys.stderr, flush=True)
            ready(address(made))
        except BaseException as error:
            failed.append(error)
            server.should_exit = True

    sys.setswitchinterval(SWITCH)
    if settings.access_log:
        log_to_stderr()
    loader = threading.Thread(target=loading, name="rcd-load", daemon=True)
    if load is not None:
        server.begin = loader.start
    with made:
        server.run(sockets=[made])
    if failed:
        raise failed[0]
    if loader.is_alive():  # the end of the interpreter would find it in the midst of torch, and abort
        sys.stderr.flush()
        os._exit(0)
