"""Reading prompts, piece by piece, between the steps of the rows that decode already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rcd.decode.model import SlotModel
from rcd.decode.prefixes import Prefixes
from rcd.decode.requests import Serving, Stats
from rcd.decode.rows import Rows
from rcd.decode.slots import Slots

PIECE_BUDGET = 512
"""Prompt tokens that are read between two steps of the rows that decode (or one piece that cannot be cut)."""


def sent(values: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers on the device, without waiting for it."""
    here: Any = torch.tensor(values, dtype=torch.long)
    moved: Tensor = here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
    return moved


class PromptReader:
    """Stores what stands before the first decoded blocks, in the caches of the `models`."""

    def __init__(self, models: Sequence[SlotModel], rows: Rows, stats: Stats, block: int, prefixes: Prefixes | None):
        self.models, self.rows, self.stats, self.device = models, rows, stats, rows.active.device
        self.block, self.prefixes = block, prefixes
        self.caches = [model.cache for model in models]
        self._weights = tuple((type(model), model.model, model.model.weights_version) for model in models)
        """What keys and values depend on, beside the tokens and the length of a block."""
        self.reading = -1
        """The row whose prompt is read."""

    def read(self, serving: Mapping[int, Serving], budget: int | None) -> None:
        """At most so many tokens, or one piece more; None: all. Where no row waits for its step, there is no bound."""
        reading = [(row, one) for row, one in serving.items() if one.pieces is not None]
        if len(reading) == len(serving):
            budget = None
        for row, one in reading:
            while one.pieces is not None:
                if budget is not None and budget <= 0:
                    return
                self.reading = row
                tokens = self.read_on(row, one)
                budget = None if budget is None else budget - tokens

    def read_on(self, row: int, one: Serving) -> int:
        """Read the next piece of a prompt; returns its tokens. The row takes steps when there is none left."""
        assert one.pieces is not None
        tokens = 0
        if self.prefixes is not None and one.piece is not None and one.piece.start == 0:
            self._reuse(self.prefixes, row, one)
        if one.piece is not None:
            start, end, unit, base = one.piece
            position = torch.arange(start - base, end - base, device=self.device)
            seen = ((position // unit + 1) * unit + base).clamp_max(end).int()[None]
            ids, at = self.rows.text[row, start:end][None], sent([start], self.device).int()
            for model in self.models:
                model.plain(ids, Slots(sent([row], self.device).int(), at, seen))
                self.stats.prefills += 1
            one.prefills, tokens, one.piece = one.prefills + 1, end - start, next(one.pieces, None)
        if one.piece is None:
            self.begin(row, one)
        return tokens

    def _reuse(self, prefixes: Prefixes, row: int, one: Serving) -> None:
        """Copy what is known of the prompt; a pass that is saved is counted as if it had run."""
        assert one.piece is not None
        unit, pieces = one.piece.unit, [one.piece, *(one.pieces or ())]
        end = max(piece.end for piece in pieces if piece.base == 0)
        known = prefixes.copy((unit, self._weights), one.text[:end], unit, self.caches, row)
        left = [piece._replace(start=max(piece.start, known)) for piece in pieces if piece.end > known]
        one.unit, one.answer.reused = unit, known
        one.prefills, one.pieces = len(pieces) - len(left), iter(left)
        one.piece = next(one.pieces, None)

    def keep(self, row: int, one: Serving) -> None:
        """Remember the finished blocks of a row that is about to be free."""
        rows = self.rows
        if self.prefixes is None or not one.unit or one.pieces is not None or int(rows.broken[row]):
            return
        stored = int(rows.start[row] - self.block * torch.maximum(rows.pending, rows.referred)[row])
        if not all(model.reads_prompts for model in self.models):  # there a prompt is masks, and an answer is tokens
            stored = min(stored, len(one.prompt) // self.block * self.block)
        tokens = rows.text[row, : stored if one.unit == self.block else one.unit].tolist()
        self.prefixes.keep((one.unit, self._weights), tokens, one.unit, self.caches, row)

    def begin(self, row: int, one: Serving) -> None:
        """From here on the row takes steps."""
        one.pieces = None
        self.rows.serial[row].fill_(one.serial)
        self.rows.active[row].fill_(True)
