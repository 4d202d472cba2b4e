"""What the host knows: requests, the rows that serve them, and what the engine did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rcd.decode.config import RequestSettings
from rcd.decode.rows import Features
from rcd.decode.step import Probe

Size = tuple[int, ...]
"""Of a pass; what the numbers mean is the window's."""


@dataclass(frozen=True)
class Request:
    """One prompt. `row` is what its events are called by."""

    prompt: Sequence[int]
    settings: RequestSettings
    row: int = 0
    watch: bool = False
    """Whether a Step is wanted after every step."""
    probe: Probe | None = None
    """What is shown every step of the request, as a batch of one."""

    @property
    def features(self) -> Features:
        asked = self.settings
        drawn = asked.temperature > 0
        return Features(
            draws=drawn, top_k=asked.top_k if drawn else 0, top_p=drawn and asked.top_p < 1,
            scaled=asked.residual_scale != 1, logprobs=asked.logprobs,
            watched=self.watch or bool(asked.stop) or asked.logprobs is not None, probed=self.probe is not None,
        )  # fmt: skip


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
    starts: int = 0
    """Passes for carries to start from, of the target or a reference."""
    exact_deltas: int = 0
    """Predictions whose delta no short cut could serve."""


@dataclass
class Serving:
    """What the host knows of a row, as it was when last heard of."""

    request: Request
    serial: int
    left: int
    """Masks left in its first unfinished block."""
    ahead: int
    """Blocks that its next passes may have to compute, that one included."""
    due: int = 0
    """Of a canvas: whether its next pass is a whole one. Of blocks: finished ones that are still to be stored."""
    step: int = 0
    """Of a canvas: steps in its block."""
    flying: int = 1
    """Blocks in flight."""
    last: int = 0
    """Denoising steps."""
    fresh: bool = False
    """Whether its newest block's carry has still to start."""
    blocks: int = 0
    """Of a canvas: those of its answer."""
    length: int = 0
    """Of a canvas: positions that a whole pass reads."""
    prefills: int = 0
    starts: int = 0
    references: int = 0
    pieces: Iterator[tuple[int, int, int]] | None = None
    """Of its prefill, those that are still to come; None when it takes steps."""
    generator: Any = None
    """What a start draws by."""
    ids: list[int] = field(default_factory=list)
    """The answer up to its first mask, where someone reads it."""
    logprobs: dict[int, Any] = field(default_factory=dict)
    """Place in the answer -> TokenLogprob."""
    searched: int = 0
    """How much of its text has been looked through for stop strings."""

    tick: int = 0
    """The last pass that was launched for it."""

    def hear(self, due: int, ahead: int, left: int, step: int, flying: int, denoised: int, fresh: int) -> None:
        self.due, self.ahead, self.left, self.step, self.flying = due, ahead, left, step, flying
        self.last, self.fresh = denoised, bool(fresh)


def rounded(count: int, most: int) -> int:
    """Up to the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, ..."""
    power = 1 << (count - 1).bit_length()
    between = 3 * power // 4
    return min(between if power > 16 and between >= count else power, most)
