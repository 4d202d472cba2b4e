"""What a call of `Pipeline.generate` gives back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, overload

from rcd.decode.events import Counted, Counts, TokenLogprob
from rcd.documented import documented
from rcd.errors import RCDError

LONG = 60
"""Characters of a text that `repr` shows."""


def _short(text: str) -> str:
    return text if len(text) <= LONG else f"{text[:LONG]}..."


@documented
@dataclass(frozen=True)
class Generation(Counted):
    """One prompt's answer."""

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
    given: int = 0
    """Of `ids`, those that the canvas gave."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({_short(self.text)!r}, {self.figures})"

    def to_dict(self, text: Callable[[int], str | None] | None = None) -> dict[str, Any]:
        """The object that `rcd generate --json` prints; `text` shows single tokens, those of `logprobs`."""
        found: dict[str, Any] = {
            "text": self.text,
            "ids": self.ids,
            "tokens": self.tokens,
            "denoising_steps": self.denoising_steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "forwards": self.forwards,
            "tokens_per_forward": round(self.tokens_per_forward, 4),
            "counts": {kind: number for kind, number in asdict(self.counts).items() if number},
            "seconds": round(self.seconds, 4),
            "stop_reason": self.stop_reason,
        }

        def shown(token: int, logprob: float) -> dict[str, Any]:
            written = {} if text is None else {"text": text(token)}
            return {"token": token, **written, "logprob": None if math.isnan(logprob) else logprob}

        if self.given:
            found["given"] = self.given
        if self.logprobs is not None:
            found["logprobs"] = [
                {**shown(one.token, one.logprob), "best": [shown(*pair) for pair in one.best]} for one in self.logprobs
            ]
        return found


@documented
@dataclass(frozen=True)
class Output:
    """The answers to a batch, in the order of the prompts: a sequence of them."""

    results: list[Generation]
    """One for every prompt."""

    def __str__(self) -> str:
        return "\n".join(self.texts)

    def __repr__(self) -> str:
        return "Output([\n" + "".join(f"  {result!r},\n" for result in self.results) + "])"

    @overload
    def __getitem__(self, place: int) -> Generation: ...
    @overload
    def __getitem__(self, place: slice) -> list[Generation]: ...
    def __getitem__(self, place: int | slice) -> Generation | list[Generation]:
        return self.results[place]

    def __iter__(self) -> Iterator[Generation]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def text(self) -> str:
        """Of a single prompt."""
        if len(self.results) != 1:
            raise RCDError(f"there are {len(self.results)} answers; take `texts`, or `text` of one of them.")
        return self.results[0].text

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
