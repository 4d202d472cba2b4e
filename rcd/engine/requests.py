"""What the host knows: requests, the rows that serve them, and what the engine did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Size = tuple[int, int]
"""Of a pass; what the two numbers mean is the window's."""


@dataclass(frozen=True)
class Request:
    """One prompt. `number` is what its events are called by; no two of a run have the same."""

    number: int
    prompt: Sequence[int]
    new_tokens: int
    seed: int | None = None
    """What its tokens are drawn by; None: the configuration's seed and the number."""


@dataclass
class Stats:
    """What the engine did, over its life."""

    passes: int = 0
    """Steps launched; each serves many rows."""
    slots: int = 0
    """Slots computed in them, unused ones included."""
    idle: int = 0
    """Passes that had room for a row that had ended, counted for each row: the host did not know yet."""
    prefills: int = 0


@dataclass
class Serving:
    """What the host knows of a row, as it was when last heard of."""

    request: Request
    serial: int
    prefills: int
    left: int
    """Masks left in its first unfinished block."""
    ahead: int
    """Blocks that its next passes may have to compute, that one included."""
    due: bool = False
    """Of a canvas: whether its next pass is a whole one."""
    step: int = 0
    """Of a canvas: steps in its block."""
    last: int = 0
    """Denoising steps."""

    def hear(self, due: int, ahead: int, left: int, step: int, denoised: int) -> None:
        self.due, self.ahead, self.left, self.step, self.last = bool(due), ahead, left, step, denoised


def rounded(count: int, most: int) -> int:
    """Up to the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, ..."""
    power = 1 << (count - 1).bit_length()
    between = 3 * power // 4
    return min(between if power > 16 and between >= count else power, most)
