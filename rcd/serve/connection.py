"""A client's connection: what uvicorn leaves unbounded of it. Heads of requests, what else stands beside a body, and
the time in which a client takes what it is sent."""

from __future__ import annotations

import asyncio
import http
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rcd.serve import openai
from rcd.serve.pieces import Refused

MOST_HEAD = 1 << 16
"""Bytes of a request's head, and of the lines between the parts of its body."""
FRAMING = 8
"""So many more for every byte of a body that comes in parts."""
LATE = Refused(408, "the request's head did not arrive in time; send it again.", None, "timeout")
LONG = Refused(431, f"the request's head has more than {MOST_HEAD} bytes; send less.", None, "head_too_large")


class Connection(HttpToolsProtocol):
    """`head_seconds`: in which a head must arrive, and `taking_seconds`: in which a client must have made room for more
    of its answer. Without them, clients that do neither hold their connection, and memory, for ever."""

    def __init__(self, *args: Any, head_seconds: float, taking_seconds: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_seconds, self._taking_seconds = head_seconds, taking_seconds
        self._left = MOST_HEAD
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    # -- what comes ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._late)
        _stop(self._stuck)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._left -= len(data)
        super().data_received(data)
        if self._left < 0 and not self.transport.is_closing():
            self._refuse(LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        _stop(self._late)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._left += FRAMING * len(body)
        super().on_body(body)

    def _expect_head(self) -> None:
        self._left = MOST_HEAD
        _stop(self._late)
        self._late = self.loop.call_later(self._head_seconds, self._refuse, LATE)

    def _refuse(self, refused: Refused) -> None:
        """Said only where no other answer is under way."""
        if self.cycle is None or self.cycle.response_complete:
            body = openai.to_json(openai.error(refused))
            head = f"HTTP/1.1 {refused.status} {http.HTTPStatus(refused.status).phrase}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
        self._taken_in_time()

    # -- what goes -----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taken_in_time()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            _stop(self._stuck)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._taken_in_time()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._taken_in_time()

    def _taken_in_time(self) -> None:
        """A closed connection lives on until its client has taken the rest."""
        _stop(self._stuck)
        self._stuck = self.loop.call_later(self._taking_seconds, self.transport.abort)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
