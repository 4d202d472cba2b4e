"""What the host knows: requests, the rows that serve them, and what the engine did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rcd.decode.answers import Answer
from rcd.decode.filling import Piece, Segment
from rcd.decode.request_settings import RequestSettings
from rcd.decode.terms import Features

if TYPE_CHECKING:
    from rcd.decode.probe import Look

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
    probe: Callable[[Look], None] | None = None
    """What is shown every step of the request."""
    canvas: Sequence[int] = ()
    """The answer's first tokens, with masks: what is no mask is given."""

    def numbered(self, row: int) -> Request:
        """The same under another number; its probe is told its own."""
        probe, own = self.probe, self.row
        renamed = None if probe is None else lambda look: probe(replace(look, row=own))
        return replace(self, row=row, probe=renamed)

    @cached_property
    def features(self) -> Features:
        settings = self.settings
        drawn = settings.temperature > 0
        return Features(
            draws=drawn, top_k=settings.top_k, top_p=settings.top_p < 1,
            sorts=settings.top_p < 1 and not settings.top_k,
            scaled=settings.residual_scale != 1, logprobs=-1 if settings.logprobs is None else settings.logprobs,
            watched=self.watch or bool(settings.stop) or settings.logprobs is not None, probed=self.probe is not None,
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
    """Passes over prompts."""
    starts: int = 0
    """Passes for carries to start from, of the target or a reference."""


class RowReport(NamedTuple):
    """What the device tells the host of a row after every step."""

    serial: int = -1
    """Which request it serves."""
    active: int = 0
    due: int = 0
    """Of a canvas: whether its next pass is a whole one. Of blocks: finished ones that are still to be stored."""
    ahead: int = 1
    """Blocks that its next passes may have to compute, the first unfinished one included."""
    masks: int = 0
    """Left in that one."""
    step: int = 0
    """Of a canvas: steps in its block."""
    flying: int = 1
    """Blocks in flight."""
    denoised: int = 0
    """Denoising steps."""
    stored: int = 0
    broken: int = 0
    """The step whose logits were no numbers."""
    fresh: int = 0
    """Whether its newest block's carry has still to start."""
    part: int = 0
    """Whether its next pass computes the current sub-block alone."""


@dataclass
class Serving:
    """What the host knows of a row."""

    request: Request
    serial: int
    answer: Answer
    prompt: list[int]
    last: RowReport
    """Its last report."""
    length: int
    """Positions that it takes; of a canvas, those that a whole pass reads."""
    prefills: int = 0
    starts: int = 0
    references: int = 0
    pieces: Iterator[Piece] | None = None
    """Of its prefill, those behind the next one; None when it takes steps."""
    piece: Piece | None = None
    """The next one."""
    segments: list[Segment] = field(default_factory=list)
    """The parts of its text that are still to come."""
    unit: int = 0
    """Tokens of a block of its prompt, if what is stored of it may be another's."""
    generator: Any = None
    """What a start draws by."""
    tick: int = 0
    """The last pass that was launched for it."""
    mistake: Exception | None = None
    """What its probe raised."""

    def __post_init__(self) -> None:
        if self.pieces is not None:
            self.read(self.pieces)

    def read(self, pieces: Iterator[Piece]) -> None:
        """Read these before the next step."""
        self.pieces, self.piece = pieces, next(pieces, None)

    @property
    def text(self) -> list[int]:
        """Prompt and canvas."""
        return [*self.prompt, *self.answer.filling.ids]
