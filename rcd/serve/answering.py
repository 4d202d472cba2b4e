"""One request of /v1/completions or /v1/chat/completions, from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rcd.serve import openai
from rcd.serve.guard import Call, State, refuse
from rcd.serve.metrics import Metrics
from rcd.serve.openai import Reply
from rcd.serve.parse import parse
from rcd.serve.pieces import Accepted, Done, Piece, Refusal, Refused, Text
from rcd.serve.schema import Ask
from rcd.serve.service import Service
from rcd.serve.settings import ServeSettings

STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Gone(Exception):
    """The client has left."""


async def body(scope: Any, receive: Any, settings: ServeSettings) -> bytes:
    """All of it, within its bounds."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise Refusal("the body is sent as application/json; say so in Content-Type.", status=415)
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise Refusal("the body is compressed, which is not read here; send it without Content-Encoding.", status=415)
    most = settings.max_body
    length = headers.get(b"content-length", b"0")
    too_long = Refusal(f"the body has more than {most} bytes; send less.", status=413, code="body_too_large")
    if length.isdigit() and len(length) < 20 and int(length) > most:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(settings.body_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_long
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise Refusal("the body did not arrive in time; send it again.", status=408, code="timeout") from None


class Answering:
    """The endpoint of one of the two paths, as an ASGI application."""

    def __init__(self, service: Service, settings: ServeSettings, metrics: Metrics, state: State, chat: bool):
        self._service, self._settings, self._metrics = service, settings, metrics
        self._state, self._chat = state, chat

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        call: Call = scope["rcd"]
        try:
            content = await body(scope, receive, self._settings)
            if self._settings.log_prompts:
                call.prompt = content.decode(errors="replace")
            asked = self._settings
            ask = parse(
                content, self._chat, max_n=asked.max_n, max_prompts=asked.max_prompts, max_messages=asked.max_messages,
                most_tokens=asked.most_tokens,
            )  # fmt: skip
        except Refusal as error:
            call.outcome = "refused"
            self._metrics.requests.labels("-", "refused").inc()
            await refuse(error.refused, send)
            return
        except Gone:
            call.outcome = "left"
            return
        await self._answered(ask, call, receive, send)

    async def _answered(self, ask: Ask, call: Call, receive: Any, send: Any) -> None:
        """A client that leaves cancels the task, and with it the request's rows."""
        began, task = time.perf_counter(), asyncio.current_task()
        assert task is not None
        gone = asyncio.ensure_future(receive())
        leave = lambda _: task.cancel()  # noqa: E731
        gone.add_done_callback(leave)
        self._state.running += 1
        pieces = self._service.pieces(ask)
        try:
            call.outcome = await self._tell(ask, call, pieces, send, began)
        except asyncio.CancelledError:
            if not gone.done():  # the server ends
                call.outcome = "cancelled"
                raise
            task.uncancel()
            call.outcome = "left"
        except Exception:
            call.outcome = "failed"
            raise
        finally:
            gone.remove_done_callback(leave)
            gone.cancel()
            await pieces.aclose()  # type: ignore[attr-defined]
            self._state.running -= 1
            self._metrics.requests.labels(call.model, call.outcome or "failed").inc()
            self._metrics.seconds.labels(call.model).observe(time.perf_counter() - began)

    async def _tell(self, ask: Ask, call: Call, pieces: Any, send: Any, began: float) -> str:
        """Send what is told; how it ended."""
        reply: Reply | None = None
        seen = False
        async for found in pieces:
            refused = next((piece for piece in found if isinstance(piece, Refused)), None)
            if reply is None:
                if refused is not None:
                    await refuse(refused, send)
                    return "refused"
                reply = await self._begun(ask, call, found, send)
                continue
            self._count(reply, call, found)
            if ask.stream:
                if not seen and any(isinstance(piece, Text) for piece in found):
                    seen = True
                    self._metrics.first.labels(call.model).observe(time.perf_counter() - began)
                await send(_part(reply.told(found) if found else openai.BEAT))
            if refused is not None:
                if not ask.stream:
                    await refuse(refused, send)
                else:
                    await send(_part(b"", more=False))
                return refused.code or "failed"
        assert reply is not None
        if ask.stream:
            await send(_part(reply.last(), more=False))
        else:
            await _whole(openai.to_json(reply.whole(), inf_nan_mode="null"), send)
        return "done"

    async def _begun(self, ask: Ask, call: Call, found: list[Piece], send: Any) -> Reply:
        accepted = found[0]
        assert isinstance(accepted, Accepted)
        call.model = accepted.model
        reply = Reply(ask, call.number, accepted.model)
        reply.usage.prompt_tokens = accepted.prompt_tokens
        self._metrics.prompt.labels(call.model).inc(accepted.prompt_tokens)
        if ask.stream:
            await send({"type": "http.response.start", "status": 200, "headers": list(STREAM)})
            await send(_part(reply.first(accepted.choices) or b": accepted\n\n"))
        return reply

    def _count(self, reply: Reply, call: Call, found: list[Piece]) -> None:
        for piece in found:
            if isinstance(piece, Done):
                reply.usage.add(piece)
                call.tokens += piece.tokens
                call.steps += piece.denoising_steps
                self._metrics.done(call.model, piece)


def _part(content: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _whole(content: bytes, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})
