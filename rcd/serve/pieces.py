"""What a service tells of a request while it is answered: plain values that may travel between processes.

Of a request: one Accepted or one Refused; then any number of Text and Draft; one Done a choice; or a Refused instead of
what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rcd.errors import RCDError


@dataclass(frozen=True)
class Accepted:
    """The request waits for a row, or has one."""

    model: str
    prompt_tokens: int
    """Of all prompts and what their canvases give, each counted once."""
    choices: int


@dataclass(frozen=True)
class TokenText:
    """A token of an answer with its log probabilities."""

    text: str
    raw: bytes | None
    """What it writes, also where that is no whole character."""
    offset: int
    """Where it begins in the answer's text."""
    logprob: float | None
    """None for a token that no step committed."""
    best: tuple[tuple[str, bytes | None, float], ...] = ()
    """The most probable tokens when it was committed, best first."""


@dataclass(frozen=True)
class Text:
    """Committed text of a choice; all of them joined are its answer."""

    index: int
    text: str
    logprobs: tuple[TokenText, ...] = ()


@dataclass(frozen=True)
class Draft:
    """The canvas of a choice after a step, from `offset` on; what is before has not changed since an earlier draft."""

    index: int
    step: int
    length: int
    """The most new tokens."""
    final: int
    offset: int
    canvas: list[dict[str, Any]]


@dataclass(frozen=True)
class Done:
    """A choice is answered."""

    index: int
    reason: str
    """`eos`, `stop` or `length`."""
    text: str
    ids: list[int]
    denoising_steps: int
    forwards: int
    cached: int
    """Tokens of its prompt that were taken from the cache."""
    seconds: float
    queued_seconds: float
    """Until it had a row."""
    logprobs: tuple[TokenText, ...] | None = None
    given: int = 0
    """Of `ids`, those that a canvas gave."""

    @property
    def tokens(self) -> int:
        """New ones."""
        return len(self.ids) - self.given

    @property
    def tokens_per_step(self) -> float:
        return round(self.tokens / self.denoising_steps, 4) if self.denoising_steps else 0.0


@dataclass(frozen=True)
class Refused:
    """The request is not answered, or not to its end."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None


Piece = Accepted | Text | Draft | Done | Refused


class Refusal(RCDError):
    """A request that cannot be answered."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.refused = Refused(status, message, param, code)


@dataclass
class Usage:
    """What a request has taken."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: int = 0
    denoising_steps: int = 0
    forwards: int = 0
    done: dict[int, Done] = field(default_factory=dict)

    def add(self, done: Done) -> None:
        self.done[done.index] = done
        self.completion_tokens += done.tokens
        self.cached += done.cached
        self.denoising_steps += done.denoising_steps
        self.forwards += done.forwards

    def to_dict(self) -> dict[str, Any]:
        steps = self.denoising_steps
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "denoising_steps": steps,
            "forwards": self.forwards,
            "tokens_per_step": round(self.completion_tokens / steps, 4) if steps else 0.0,
        }
