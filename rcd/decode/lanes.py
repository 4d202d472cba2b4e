"""A lane: one model that follows the text, with a KV cache of its own. The target is one, a reference a second; a run
joins them with the rules and the counting.

Shapes: B rows, Q window, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rcd.carry.base import CarryState
from rcd.decode.cache import KVCache, Place
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Counts
from rcd.decode.layout import Grid
from rcd.decode.step import Outcome, Rules, check_finite
from rcd.diffusion.attention import block_causal, visible
from rcd.diffusion.noise import signed, uniform_of
from rcd.errors import RCDError
from rcd.kernels import parts_for
from rcd.models.lm import DiffusionLM, Prediction, View
from rcd.residual.distribution import Distribution, align_vocabulary

PREFILL_SLOTS = 2048
NOTHING = slice(0, 0)


class Ledger:
    """Forward passes of every row, by kind. A pass counts for the rows that needed it, not for those that were only
    in the same batch, so that a row's counts do not depend on its neighbours."""

    def __init__(self, rows: int):
        self._counts = [Counts() for _ in range(rows)]

    def count(self, kind: str, rows: Iterable[int], passes: int = 1) -> None:
        for row in rows:
            old = self._counts[row]
            self._counts[row] = replace(old, **{kind: getattr(old, kind) + passes})

    def __getitem__(self, row: int) -> Counts:
        return self._counts[row]


def prefill_piece(block_length: int) -> int:
    """Slots of one prefill pass: whole blocks."""
    return max(1, PREFILL_SLOTS // block_length) * block_length


class Lane:
    def __init__(self, model: DiffusionLM, mask_token_id: int, capacity: int | None = None):
        self.model = model
        self.cache = KVCache(capacity) if capacity else None
        self._mask = mask_token_id

    def view(self, query_BQ: Tensor, key_BK: Tensor, predict: slice = slice(None)) -> View:
        """A window that sees every real position among the keys (positions; padding is negative)."""
        padded = bool((key_BK[:, :1] < 0).any())  # padding is on the left
        attention = visible(key_BK, query_BQ.shape[1]) if padded else None
        return View(query_BQ.clamp_min(0), attention, self.cache, predict)

    def own(self, view: View) -> View:
        """The same view with this lane's cache instead of another's."""
        cache: KVCache | Place | None = self.cache
        if isinstance(view.cache, Place) and self.cache is not None:
            cache = replace(view.cache, cache=self.cache)
        return replace(view, cache=cache)

    def prefill(self, ids_BQ: Tensor, position_BQ: Tensor, block_length: int) -> None:
        """Store the prompt's whole blocks, under the block-causal mask, in pieces that bound the mask's memory."""
        assert self.cache is not None
        piece = prefill_piece(block_length)
        for start in range(0, ids_BQ.shape[1], piece):
            query, key = position_BQ[:, start : start + piece], position_BQ[:, : start + piece]
            view = View(query.clamp_min(0), block_causal(query, key, block_length), self.cache, NOTHING)
            self.forward(ids_BQ[:, start : start + piece], view)
            self.cache.advance(query.shape[1])

    def store(self, ids_BQ: Tensor, view: View) -> None:
        """The finished block's keys and values, computed from its tokens and kept."""
        assert self.cache is not None
        self.forward(ids_BQ, View(view.position_ids, view.attention, self.cache, NOTHING))
        self.cache.advance(ids_BQ.shape[1])

    def forward(self, ids_BQ: Tensor, view: View) -> Prediction:
        """A plain pass, nothing injected. The mask is this model's own, and so is the vocabulary: an id of the other's
        padding, which is no token, is read as the last one."""
        own = self.model.settings.mask_token_id
        ids = ids_BQ if own == self._mask else torch.where(ids_BQ == self._mask, own, ids_BQ)
        ids = ids.clamp_max(self.model.settings.vocab_size - 1)
        prediction: Prediction = self.model(ids, view)
        return prediction

    def rows(self, index: Tensor) -> None:
        if self.cache is not None:
            self.cache.rows(index)


@dataclass(frozen=True)
class WindowPasses:
    """The passes that a carry may ask for before a step (`rcd.residual.start.Passes`), over the current window."""

    shape: tuple[int, int, int]
    device: torch.device
    generators: list[torch.Generator]
    own: Callable[[], Distribution]
    reference: Callable[[], Distribution]


@dataclass(frozen=True)
class Run:
    """What stays the same over a decoding run."""

    rules: Rules
    target: Lane
    reference: Lane | None
    ledger: Ledger
    generators: list[torch.Generator]

    @classmethod
    def of(
        cls,
        target: DiffusionLM,
        reference: DiffusionLM | None,
        config: DecodeConfig,
        generators: list[torch.Generator],
        capacity: int | None = None,
    ) -> Run:
        rules, mask = Rules.of(config, target.settings), target.settings.mask_token_id
        if config.keeps(target.settings.vocab_size) and getattr(rules.carry, "expects", False):
            rules = rules.summarising(target, config, parts_for(target.device))
        needed = reference is not None and rules.carry.needs_reference
        second = Lane(reference, mask, capacity) if needed and reference is not None else None
        return cls(rules, Lane(target, mask, capacity), second, Ledger(len(generators)), generators)

    @property
    def lanes(self) -> Iterator[tuple[Lane, str, str]]:
        """(lane, the kind that its prefill counts as, the kind that its stores count as)."""
        yield self.target, "prefill", "store"
        if self.reference is not None:
            yield self.reference, "reference", "reference"

    def rows(self, index: Tensor) -> None:
        """Every cache keeps some rows of the batch."""
        for lane, _, _ in self.lanes:
            lane.rows(index)

    def refresh(
        self, state: CarryState | None, ids_BQ: Tensor, view: View, rows: Sequence[int], counted: Sequence[int]
    ) -> CarryState:
        """The carry's state for the coming step; passes that it asks for are counted for the rows `counted`."""
        target, codebook = self.target.model, self.target.model.codebook
        length = len(range(*view.predict.indices(ids_BQ.shape[1])))
        passes = WindowPasses(
            shape=(ids_BQ.shape[0], length, target.settings.vocab_size),
            device=ids_BQ.device,
            generators=[self.generators[row] for row in rows],
            own=lambda: self.own(ids_BQ, view, counted),
            reference=lambda: self.refer(ids_BQ, view, counted),
        )
        return self.rules.carry.refresh(state, passes, codebook)

    def noise(self, rows: Sequence[int], view: View) -> Tensor | None:
        """What the coming step draws by, [B, P]: a function of the row's seed, the number of its step and the position
        alone, and not of the window or of who else is there. None where nothing is drawn."""
        if self.rules.sampling.temperature == 0.0:
            return None
        position = view.position_ids[:, view.predict]
        given = [(signed(self.generators[row].initial_seed()), self.ledger[row].denoising) for row in rows]
        seed, step = torch.tensor(given, device=position.device).unsqueeze(-1).unbind(1)
        return uniform_of(seed, step, position)

    def counted(self, outcome: Outcome, rows: Sequence[int], taking: Sequence[int] | None = None) -> list[int]:
        """The number of each row's step, now that those `taking` it (None: all) have taken one more. A step whose
        logits are no numbers stops the run."""
        taking = rows if taking is None else taking
        self.ledger.count("denoising", taking)
        numbers = [self.ledger[row].denoising for row in rows]
        check_finite(outcome, rows, numbers, taking)
        return numbers

    def prefill(self, grid: Grid) -> None:
        """Every lane stores what stands before the first decoded block."""
        ids, position = grid.ids[:, : grid.prefilled], grid.position[:, : grid.prefilled]
        if not grid.prefilled:
            return
        real = (position >= 0).sum(-1).tolist()
        for lane, kind, _ in self.lanes:
            lane.prefill(ids, position, grid.unit)
            for row, slots in enumerate(real):
                self.ledger.count(kind, [row], passes=-(-slots // prefill_piece(grid.unit)))

    def own(self, ids_BQ: Tensor, view: View, counted: Sequence[int]) -> Distribution:
        self.ledger.count("start", counted)
        return self._checked(self.target.forward(ids_BQ, view).logits, "the target's start pass")

    def refer(self, ids_BQ: Tensor, view: View, counted: Sequence[int]) -> Distribution:
        assert self.reference is not None, "a carry that asks for a reference says so in needs_reference"
        self.ledger.count("reference", counted)
        logits = self.reference.forward(ids_BQ, self.reference.own(view)).logits
        return self._checked(align_vocabulary(logits, self.target.model.settings.vocab_size), "the reference")

    def _checked(self, logits: Tensor, whose: str) -> Distribution:
        predicted = self.rules.distribution(logits)
        if not bool(torch.isfinite(predicted.normaliser).all()):
            raise RCDError(f"the logits of {whose} are NaN or inf; try float32, and check it with `rcd info --check`.")
        return predicted
