"""What a window is: which slots a pass computes, and how rows move on.

The host's part speaks of what the host knows of the rows (`Serving`), and may lag by a step; the device's part is
tensors alone, so that it runs without host syncs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rcd.carry.base import CarryState
from rcd.decode.filling import Filling, Piece, Segment
from rcd.decode.flight import turn
from rcd.decode.requests import Serving, Size
from rcd.decode.rows import Pass, Region, Rows, candidates_of, picked
from rcd.decode.slots import Slots
from rcd.decode.step import Outcome
from rcd.decode.terms import Terms


@dataclass(frozen=True)
class Window(Protocol):
    """`rcd.decode.blocks.Blocks` and `rcd.decode.canvas.Canvas`. What has no body here, each has to say."""

    terms: Terms
    capacity: int
    """Positions of a row."""

    @property
    def states(self) -> int:
        """Blocks of a row that have a step and a carry of their own."""

    @property
    def unit(self) -> int:
        """Positions of each of them."""
        return self.terms.b

    @property
    def shared(self) -> bool:
        """Whether no pass reads what another one wrote, so that all layers may share a cache."""
        return False

    @property
    def stores(self) -> bool:
        """Whether a finished block is counted as stored by a pass of its own, as the families' own loops do."""
        return False

    @property
    def spare(self) -> int:
        """Positions of the cache beside those that texts need."""
        return 0

    # -- the host's part -----------------------------------------------------------------------------------------

    def needs(self, prompt: int, new: int) -> int:
        """Positions that a request takes."""

    def span(self, prompt: int, new: int) -> int:
        """Positions behind the prompt that events tell of."""
        return new

    def segments(self, prompt: int, new: int, filling: Filling) -> Iterator[Segment]:
        """The parts of the text that are decoded one after another; one, where nothing is given."""

    def begin(self, prompt: int, new: int, segment: Segment, filling: Filling) -> tuple[dict[str, int], dict[str, int]]:
        """(what a row is that begins a segment, what its first report would say)."""

    def prefill(self, prompt: int, begin: int, end: int) -> Iterator[Piece]:
        """The passes over tokens that stand before a segment."""
        return iter(())

    def must_wait(self, serving: Mapping[int, Serving], rate: float) -> bool:
        """Whether the host must know what the last step did before it can choose the next."""
        return False

    def next(self, serving: Mapping[int, Serving]) -> tuple[int, ...]:
        """The rows that the next pass is for."""
        return tuple(serving)

    def size(self, serving: Sequence[Serving], rows: int, rate: float) -> Size:
        """Its size where the host lags, rounded up so that few sizes are captured. It changes no token."""

    def exact_size(self, serving: Sequence[Serving]) -> Size:
        """Its size where the host knows all."""

    def start(self, fresh: Mapping[int, Serving]) -> tuple[tuple[int, ...], Size]:
        """The fresh rows that start together, the first for certain, and the size of the pass from which they do."""

    def slots(self, size: Size) -> int:
        """All slots of a pass."""

    def several(self, size: Size) -> bool:
        """Whether so many slots are of the same rows that their order matters."""
        return False

    # -- the device's part ---------------------------------------------------------------------------------------

    def prepared(self, rows: Rows, *size: Any, **_: Any) -> Pass:
        """The next pass."""

    def starting(self, rows: Rows, *size: Any, **_: Any) -> tuple[Tensor, Slots, Tensor, Tensor]:
        """(ids, slots, rows [P], states [P]) of a plain pass from which the carry of fresh rows starts; the last of
        `size` says whether the reference takes it."""

    @property
    def stores_at_start(self) -> bool:
        """Whether such a pass also stores the finished blocks."""
        return False

    def drawn_start(self, prompt: int, new: int) -> int:
        """Positions for which a start is drawn."""

    def drawn_states(self, rows: Rows, row: int, state: CarryState) -> tuple[Tensor, CarryState]:
        """(states, what they are) of a start [1, so many] that was drawn for a row."""

    def settled(self, rows: Rows, made: Pass, outcome: Outcome) -> Tensor:
        """Commit, and move the rows on; in place. Returns the report."""

    def refreshed(self, rows: Rows, made: Pass) -> None:
        """The reference has read what this pass reads; in place. A canvas's is as fresh as the target's."""
        return None

    def candidates(self, rows: Rows, seen: Region, row: Tensor, block: Tensor) -> Tensor:
        """[P, b] what may be committed of the blocks."""
        b, config = self.terms.b, self.terms.config
        found = picked(candidates_of(rows, seen, self.terms), row, block, b)
        if config.sub_block_length is None and not config.first_token_alone:
            return found
        return found & turn(picked(seen.needed, row, block, b), config)
