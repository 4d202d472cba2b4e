"""What every request passes: its number, the key, the host, draining, headers of the answer, one line in the log."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rcd.serve import openai
from rcd.serve.pieces import Refused
from rcd.serve.settings import ServeSettings

LOG = logging.getLogger("rcd.access")
OPEN = ("/health", "/ready")
"""Asked by machines that have no key."""
PAGE = ("/", "/page/")
"""The page asks its reader for the key."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NUMBER = re.compile(rb"[A-Za-z0-9._-]{1,64}")


@dataclass
class Call:
    """What is known of a request, for its log line."""

    number: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    model: str = "-"
    tokens: int = 0
    steps: int = 0
    prompt: str | None = None
    outcome: str = ""


@dataclass
class State:
    """What the server tells the app."""

    ready: bool = True
    draining: bool = False
    running: int = 0
    """Requests that are being answered."""


def loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """A plain ASGI layer around the app."""

    def __init__(self, app: Any, settings: ServeSettings, keys: Sequence[str], state: State):
        self._app, self._settings, self._state = app, settings, state
        self._keys = [key.encode() for key in keys]
        self._hosts: set[str] | None = None
        if not keys and loopback(settings.host) and "*" not in settings.allow_host:
            self._hosts = {"localhost", "127.0.0.1", "[::1]", settings.host, *map(str.lower, settings.allow_host)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        call = Call(given.decode() if NUMBER.fullmatch(given) else f"{random.getrandbits(64):016x}")
        scope["rcd"] = call
        more = [*HEADERS, (b"x-request-id", call.number.encode())]

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            refused = self._refused(scope, headers)
            if refused is None:
                await self._app(scope, receive, answer)
            else:
                await refuse(refused, answer)
        except Exception:
            LOG.error("request %s failed", call.number, exc_info=True)
            if not call.status:
                await refuse(Refused(500, f"the server failed; its log says why (request {call.number})."), answer)
            else:
                raise
        finally:
            self._log(scope, call)

    def _refused(self, scope: Any, headers: dict[bytes, bytes]) -> Refused | None:
        path = scope["path"]
        if self._hosts is not None:
            given = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
            if not {re.sub(r":\d+$", "", host) for host in given} <= self._hosts:
                return Refused(
                    403, "this server is not called by that name; use localhost, or allow it with --allow-host.", None,
                    "unknown_host",
                )  # fmt: skip
        open_ = path in OPEN or path == PAGE[0] or path.startswith(PAGE[1]) or scope["method"] == "OPTIONS"
        if self._keys and not open_ and not self._known(headers.get(b"authorization", b"")):
            return Refused(
                401, "the key is missing or wrong; send it as `Authorization: Bearer KEY`.", None, "invalid_api_key"
            )
        if path.startswith("/v1/") and scope["method"] == "POST":
            if self._state.draining:
                return Refused(503, "the server is shutting down; ask another one.", None, "shutting_down", 5)
            if not self._state.ready:
                return Refused(503, "the models are being loaded; try again soon.", None, "loading", 5)
        return None

    def _known(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else b""
        found = [hmac.compare_digest(given, known) for known in self._keys]  # every one, so that none is told by time
        return any(found)

    def _log(self, scope: Any, call: Call) -> None:
        if not LOG.isEnabledFor(logging.INFO):
            return
        took = (time.perf_counter() - call.began) * 1000
        path = json.dumps(scope["path"])[1:-1][:200].replace(" ", "\\u0020")
        line = f"{scope['method'][:16]} {path} {call.status or 499} {took:.1f}ms id={call.number}"
        if call.model != "-":
            line += f" model={json.dumps(call.model)} tokens={call.tokens} steps={call.steps}"
        if call.outcome and call.outcome != "done":
            line += f" {call.outcome}"
        if call.prompt is not None:
            line += f" body={json.dumps(call.prompt)}"
        LOG.info("%s", line)


async def refuse(refused: Refused, send: Any) -> None:
    """A refusal as a whole answer."""
    body = openai.to_json(openai.error(refused))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.retry_after is not None:
        headers.append((b"retry-after", str(refused.retry_after).encode()))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
