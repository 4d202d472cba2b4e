"""What decoding tells: a Step after every denoising step, a Finished for every row. The command line, a server and a
plain call read the same stream.

Shapes: R rows still being decoded, L window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One denoising step over a window of positions."""

    rows: list[int]
    """The rows that took the step, as numbers in the batch; row k of every tensor below belongs to rows[k]."""
    offsets: list[int]
    """For each row, where the window's first position stands relative to the end of its prompt (negative: the window
    begins inside the prompt)."""
    number: list[int]
    """For each row, how many denoising steps it has taken, this one included."""
    draft: Tensor
    """[R, L] the token predicted (or already there) at every position."""
    committed: Tensor
    """[R, L] booleans: positions that became tokens in this step."""
    masked: Tensor
    """[R, L] booleans: positions that are still masks after it."""
    confidence: Tensor
    """[R, L] the probability of the draft; nan where nothing was predicted."""
    alpha: Tensor | None
    """[R, L] the weight of each position's residual: that with which it enters the next step (with a reference at every
    step, that with which it entered this one); None without a residual."""

    def of(self, keep: list[bool]) -> Step:
        """The event of some of its rows."""
        index = [k for k, on in enumerate(keep) if on]
        return Step(
            rows=[self.rows[k] for k in index],
            offsets=[self.offsets[k] for k in index],
            number=[self.number[k] for k in index],
            draft=self.draft[index],
            committed=self.committed[index],
            masked=self.masked[index],
            confidence=self.confidence[index],
            alpha=None if self.alpha is None else self.alpha[index],
        )


@dataclass(frozen=True)
class Counts:
    """Forward passes of one row. `denoising` could commit; the others could not."""

    denoising: int = 0
    prefill: int = 0
    start: int = 0
    store: int = 0
    reference: int = 0
    """Every pass of a reference model: its prefill, its residuals, its stores."""

    @property
    def forwards(self) -> int:
        return self.denoising + self.prefill + self.start + self.store + self.reference


@dataclass(frozen=True)
class Finished:
    """A row is done."""

    row: int
    ids: list[int]
    """The new tokens, up to and including the end token."""
    stop_reason: str
    """`eos` or `length`."""
    counts: Counts = field(default_factory=Counts)


Event = Step | Finished


@dataclass(frozen=True)
class Failed:
    """A row cannot be decoded, and the others go on. Only an engine tells it so; a window raises instead."""

    row: int
    message: str
    """One sentence with the cause and the way out."""
