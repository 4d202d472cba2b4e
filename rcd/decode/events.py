"""What decoding tells of a request: a Step after every denoising step, if it is wanted, and at the end one Finished or
one Failed. The command line, a server and a plain call read the same events.

Shapes: L window, K alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from rcd.documented import documented

SHOWN = 8
"""Committed tokens that `print` names."""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class _OfARow:
    """What Step, Finished and Failed share: the request that they are of."""

    row: int

    def renamed(self, row: int) -> Self:
        return self if row == self.row else replace(self, row=row)  # type: ignore[type-var]


@documented
@dataclass(frozen=True)
class Step(_OfARow):
    """One denoising step of one request, over a window of positions."""

    row: int
    """The request: its place among the prompts of a call."""
    offset: int
    """Where the window's first position stands relative to the end of the prompt (negative: inside the prompt)."""
    number: int
    """How many denoising steps the request has taken, this one included."""
    final: int
    """So many tokens of the answer, from its first, can no longer change. Only these count as told."""
    draft: Tensor
    """[L] the token predicted (or already there) at every position."""
    committed: Tensor
    """[L] booleans: positions that became tokens in this step."""
    revised: Tensor
    """[L] booleans: those of them that were another token before."""
    masked: Tensor
    """[L] booleans: positions that are still masks after it."""
    confidence: Tensor
    """[L] the probability of the draft; nan where nothing was predicted."""
    alpha: Tensor | None = None
    """[L] the weight of each position's residual: that with which it enters the next step (with a reference at every
    step, that with which it entered this one); None without a residual."""
    logprobs: Logprobs | None = None
    settled: tuple[int, ...] = ()
    """The tokens of the answer that are final now and were not before. Those of all steps, joined, begin the answer,
    also where a canvas gives blocks that no window shows."""
    end: int | None = None
    """The place of the answer's end token among the answer's tokens, where the window has one; what stands behind it is
    filler."""

    @property
    def shown(self) -> int:
        """So many positions of the window are not filler."""
        return len(self.draft) if self.end is None else self.end + 1 - self.offset

    def __str__(self) -> str:
        here = slice(self.shown)
        new, left = self.draft[here][self.committed[here]].tolist(), int(self.masked[here].sum())
        shown = " ".join(map(str, new[:SHOWN])) + (" ..." if len(new) > SHOWN else "")
        told = f" ({shown})" if new else ""
        return f"prompt {self.row}, step {self.number}: {_count(len(new), 'token')} committed{told}, " + (
            f"{_count(left, 'mask')} in sight, {self.final} settled"
        )

    def __repr__(self) -> str:
        where = f"offset={self.offset}, positions={len(self.draft)}, final={self.final}"
        return f"Step(row={self.row}, number={self.number}, {where}, committed={int(self.committed.sum())}, ...)"


@documented
@dataclass(frozen=True)
class Logprobs:
    """Log probabilities at the step that predicted a token, before temperature, filters and exclusions."""

    token: Tensor
    """[L] of the draft."""
    best_ids: Tensor
    """[L, K] the most probable tokens, best first."""
    best: Tensor
    """[L, K] their log probabilities."""


@documented
@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer as it was committed."""

    token: int
    logprob: float
    """nan for a token that no step committed: the filler behind an end token."""
    best: tuple[tuple[int, float], ...] = ()
    """(token, log probability) of the most probable ones at that step."""


@documented
@dataclass(frozen=True)
class Counts:
    """Forward passes of one request, by kind. They depend on the request alone: what shares a pass with a step or with
    other requests is counted as if it were a pass of its own, which it is in the families' own loops."""

    denoising: int = 0
    """Passes that could commit."""
    prefill: int = 0
    start: int = 0
    """Passes of the target over plain masks, for a carry to start from."""
    store: int = 0
    """Finished blocks whose keys and values were computed from their tokens (window `blockwise`). The engine does it
    in the pass of the next block's first step."""
    reference: int = 0
    """The same of a reference model: its prefill, its residuals, its stores."""
    guidance: int = 0
    """Second passes of the target, with the prompt masked (`guidance`): one for each of its own."""

    @property
    def target(self) -> int:
        """The target's passes over the text as it is."""
        return self.denoising + self.prefill + self.start + self.store

    def guided(self) -> Counts:
        """The same where every pass of the target is two."""
        return replace(self, guidance=self.target)

    @property
    def forwards(self) -> int:
        return self.target + self.reference + self.guidance


class Counted:
    """What follows from the tokens of an answer and its passes. Every figure states what it counts."""

    ids: list[int]
    counts: Counts
    given: int
    stop_reason: str

    @property
    def tokens(self) -> int:
        """New tokens, the end token included; what a block holds behind it is not counted, nor what a canvas gave."""
        return len(self.ids) - self.given

    @property
    def denoising_steps(self) -> int:
        """Forward passes that could commit a token."""
        return self.counts.denoising

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.denoising_steps if self.denoising_steps else 0.0

    @property
    def forwards(self) -> int:
        """All forward passes: denoising, prefill, start passes, cache stores, those of a reference and of guidance."""
        return self.counts.forwards

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def figures(self) -> str:
        """What `print` tells beside the text."""
        steps = f"{_count(self.tokens, 'token')} in {_count(self.denoising_steps, 'step')}"
        given = f", {self.given} given" if self.given else ""
        return f"{steps}, {self.tokens_per_step:.2f} a step{given}, {self.stop_reason}"


@documented
@dataclass(frozen=True)
class Finished(_OfARow, Counted):
    """A request is answered."""

    row: int
    ids: list[int]
    """The new tokens, up to and including the end token or the stop token; with a stop string, all that were settled
    when it was found."""
    stop_reason: str
    """`eos`, `stop` (a stop token or a stop string) or `length`."""
    counts: Counts = field(default_factory=Counts)
    text: str | None = None
    """The same as text, without the end token, and cut before a stop string; None of an engine that knows no text."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of `ids`, if they were asked for."""
    at: float = 0.0
    """When, by `time.perf_counter`."""
    reused: int = 0
    """Prompt tokens whose keys and values were there already."""
    given: int = 0
    """Of `ids`, those that the canvas gave."""

    def __str__(self) -> str:
        return f"prompt {self.row}: {' '.join(map(str, self.ids)) if self.text is None else self.text} [{self.figures}]"


@documented
@dataclass(frozen=True)
class Failed(_OfARow):
    """A request cannot be answered, or was cancelled; the others go on."""

    row: int
    message: str
    """One sentence with the cause and the way out."""
    cancelled: bool = False
    cause: Exception | None = field(default=None, compare=False, repr=False)
    """What a probe raised, if that was why."""

    def __str__(self) -> str:
        return f"prompt {self.row} failed: {self.message}"


Event = Step | Finished | Failed
