"""What a call of `Pipeline.generate` gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rcd.decode.events import Counts, TokenLogprob


@dataclass(frozen=True)
class Generation:
    """One prompt's answer. Every figure states what it counts."""

    text: str
    """The tokens as text, without the end token and what follows a stop string; where the checkpoint has no tokenizer,
    the ids themselves."""
    ids: list[int]
    """The new tokens up to and including the end token."""
    stop_reason: str
    """`eos`, `stop` (a stop token or a stop string) or `length`."""
    counts: Counts
    """Forward passes by kind."""
    seconds: float
    """From the call to the moment at which this answer was complete."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of every token, if they were asked for."""

    @property
    def tokens(self) -> int:
        """New tokens, the end token included; what a block holds behind it is not counted."""
        return len(self.ids)

    @property
    def denoising_steps(self) -> int:
        """Forward passes that could commit a token."""
        return self.counts.denoising

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.denoising_steps if self.denoising_steps else 0.0

    @property
    def forwards(self) -> int:
        """All forward passes: denoising, prefill, start passes, cache stores, and every pass of a reference."""
        return self.counts.forwards

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The object that `rcd generate --json` prints."""
        found: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "denoising_steps": self.denoising_steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "forwards": self.forwards,
            "tokens_per_forward": round(self.tokens_per_forward, 4),
            "seconds": round(self.seconds, 4),
            "stop_reason": self.stop_reason,
        }
        if self.logprobs is not None:
            found["logprobs"] = [
                {"token": one.token, "logprob": one.logprob, "best": [list(pair) for pair in one.best]}
                for one in self.logprobs
            ]
        return found


@dataclass(frozen=True)
class Output:
    """The answers to a batch, in the order of the prompts."""

    results: list[Generation]

    @property
    def texts(self) -> list[str]:
        return [result.text for result in self.results]

    @property
    def sequences(self) -> list[list[int]]:
        """Token ids without the prompts."""
        return [result.ids for result in self.results]

    @property
    def tokens_per_forward(self) -> float:
        forwards = sum(result.forwards for result in self.results)
        return sum(result.tokens for result in self.results) / forwards if forwards else 0.0
