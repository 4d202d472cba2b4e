"""Pieces as OpenAI's objects: completions and chats, plain and streamed, with usage, log probabilities and errors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from pydantic_core import to_json

from rcd.serve.pieces import Done, Draft, Piece, Refused, Text, TokenText, Usage
from rcd.serve.schema import Ask

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    429: "rate_limit_error", 431: "invalid_request_error", 500: "server_error", 503: "server_error",
    504: "timeout_error",
}  # fmt: skip
REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
END = b"data: [DONE]\n\n"
BEAT = b": still here\n\n"


def error(refused: Refused) -> dict[str, Any]:
    kind = TYPES.get(refused.status, "server_error")
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + to_json(value, inf_nan_mode="null") + b"\n\n"


class Reply:
    """The answer to one request, as it is told."""

    def __init__(self, ask: Ask, number: str, model: str):
        self._ask, self.usage = ask, Usage()
        kind = ("chat.completion.chunk" if ask.stream else "chat.completion") if ask.chat else "text_completion"
        prefix = "chatcmpl" if ask.chat else "cmpl"
        self._head = {"id": f"{prefix}-{number}", "object": kind, "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """All choices at once."""
        choices = [self._choice(self.usage.done[index]) for index in sorted(self.usage.done)]
        return {**self._head, "choices": choices, "usage": self.usage.to_dict()}

    def _choice(self, done: Done) -> dict[str, Any]:
        reason = REASONS[done.reason]
        if self._ask.chat:
            said = {"role": "assistant", "content": done.text, "refusal": None}
            logprobs = None if done.logprobs is None else self._logprobs(done.logprobs)
            return {"index": done.index, "message": said, "logprobs": logprobs, "finish_reason": reason}
        logprobs = None if done.logprobs is None else self._logprobs(done.logprobs)
        return {"index": done.index, "text": done.text, "logprobs": logprobs, "finish_reason": reason}

    def first(self, choices: int) -> bytes:
        """What a stream of a chat begins with."""
        if not self._ask.chat:
            return b""
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(choices))

    def told(self, pieces: Iterable[Piece]) -> bytes:
        """Pieces of a stream as server-sent events."""
        return b"".join(self._event(piece) for piece in pieces)

    def _event(self, piece: Piece) -> bytes:
        if isinstance(piece, Text):
            logprobs = self._logprobs(piece.logprobs) if self._ask.logprobs is not None else None
            if self._ask.chat:
                return self._chunk(piece.index, {"content": piece.text}, logprobs)
            return self._chunk(piece.index, piece.text, logprobs)
        if isinstance(piece, Draft):
            return event({**self._head, "choices": [], "rcd": {"type": "draft", **vars(piece)}})
        if isinstance(piece, Done):
            more = {"rcd": self._done(piece)} if self._ask.drafts else {}
            return self._chunk(piece.index, {} if self._ask.chat else "", None, REASONS[piece.reason], **more)
        if isinstance(piece, Refused):
            return event(error(piece))
        return b""

    def last(self) -> bytes:
        if not self._ask.include_usage:
            return END
        return event({**self._head, "choices": [], "usage": self.usage.to_dict()}) + END

    def _chunk(self, index: int, said: Any, logprobs: Any = None, reason: str | None = None, **more: Any) -> bytes:
        choice = {
            "index": index, "delta" if self._ask.chat else "text": said, "logprobs": logprobs, "finish_reason": reason
        }  # fmt: skip
        usage = {"usage": None} if self._ask.include_usage else {}
        return event({**self._head, "choices": [choice], **usage, **more})

    @staticmethod
    def _done(done: Done) -> dict[str, Any]:
        return {
            "type": "done", "index": done.index, "denoising_steps": done.denoising_steps, "forwards": done.forwards,
            "tokens": done.tokens, "tokens_per_step": done.tokens_per_step, "seconds": done.seconds,
            "queued_seconds": done.queued_seconds, "stop_reason": done.reason,
        }  # fmt: skip

    def _logprobs(self, tokens: Iterable[TokenText]) -> dict[str, Any]:
        if self._ask.chat:
            return {"content": [self._chat_token(one) for one in tokens], "refusal": None}
        tokens = list(tokens)
        best: Any = [{text: p for text, _, p in reversed(one.best)} for one in tokens] if self._ask.logprobs else None
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": best,
            "text_offset": [one.offset for one in tokens],
        }

    @staticmethod
    def _chat_token(one: TokenText) -> dict[str, Any]:
        def shown(text: str, raw: bytes | None, logprob: float | None) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": None if raw is None else list(raw)}

        return {**shown(one.text, one.raw, one.logprob), "top_logprobs": [shown(*pair) for pair in one.best]}
