"""Classifier-free guidance: a second pass over the same weights, which sees no prompt, and what both predict together.

LLaDA (`generate.py`, cfg_scale) reads the text once as it is and once with the prompt masked, and steps by
un + (s + 1) (cond - un). The head is linear, so the same combination of what it reads gives these logits with one
product, and the hidden states still belong to the logits, as a carry and the short cuts to delta expect.
Shapes: N slots, Q tokens, R rows, P predicted blocks (or n positions), D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rcd.carry.base import Carry
from rcd.decode.model import SlotModel
from rcd.decode.rows import Rows
from rcd.decode.slots import Slots
from rcd.decode.step import Places
from rcd.diffusion.guidance import guided
from rcd.models.lm import ModelSettings, Prediction


class Unconditional(SlotModel):
    """The model over a cache of its own, for texts whose prompts are masks."""

    reads_prompts = False
    rows: Rows | None = None
    """Where each prompt ends; known when the rows are made."""

    def _own(self, ids_NQ: Tensor, slots: Slots) -> Tensor:
        """Two tokens of a prompt of 5, and two of the answer, at 3..6:   [ 7 8 9 4 ] -> [ M M 9 4 ]"""
        assert self.rows is not None
        position = slots.start[:, None] + torch.arange(ids_NQ.shape[1], device=ids_NQ.device)
        return torch.where(position < self.rows.prompt[slots.row][:, None], self.settings.mask_token_id, ids_NQ)


class Guided:
    """The two as one model for `rcd.decode.units`; every row has a scale of its own."""

    def __init__(self, cond: SlotModel, uncond: Unconditional, rows: Rows):
        self.cond, self.uncond, self.rows = cond, uncond, rows
        uncond.rows = rows

    @property
    def settings(self) -> ModelSettings:
        return self.cond.settings

    @property
    def codebook(self) -> Tensor:
        return self.cond.codebook

    @property
    def lanes(self) -> tuple[SlotModel, ...]:
        return self.cond, self.uncond

    def __call__(
        self, ids_NQ: Tensor, slots: Slots, carry: Carry, state: Any, inject: Tensor, places: Places, raw: bool = False
    ) -> Prediction:
        """A step's two passes; the carry enters both. `raw` is of the one that sees the prompt."""
        given = ids_NQ, slots, carry, state, inject, places
        cond, before = self.cond.hidden(*given, raw)
        uncond, _ = self.uncond.hidden(*given)
        hidden = guided(cond, uncond, places.of_rows(self._scale(slots, len(inject)))[..., None])
        return Prediction(self.cond.head(hidden, places.counts), hidden, before)

    def plain(self, ids_NQ: Tensor, slots: Slots, predicted: int = 0) -> Tensor | None:
        """Two passes with nothing injected."""
        cond, uncond = (lane.plain_hidden(ids_NQ, slots, predicted) for lane in self.lanes)
        return self.cond.head(guided(cond, uncond, self._scale(slots, len(cond))[..., None]), None)

    def _scale(self, slots: Slots, count: int) -> Tensor:
        """[P, 1] of the row of each predicted block."""
        row = slots.row[:count] if slots.places is None else slots.row[slots.places[0][:, 0]]
        return self.rows.guidance[row][:, None]
