"""A pass over slots through any transformers backbone as it is: models that no fused pass
knows, MoE and quantised ones.

The backbone asks its cache, layer by layer, to keep the keys and values of its tokens and to give back what they see
(`Place.update`, the one method that transformers' attention layers call). So nothing of a model is rewritten here.
Shapes: N slots, Q tokens, D width, R rows, G key/value heads, T positions, C head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rcd.decode.slots import Cache, Slots
from rcd.kernels.plain import run_of
from rcd.models.lm import DiffusionLM, View


class StockBackbone:
    """`DiffusionLM.encode` over slots. `apart`: slot by slot, so that no sum depends on the batch."""

    def __init__(self, model: DiffusionLM, apart: bool = False):
        self.model, self.apart = model, apart
        self.order: list[int] = []
        """In which order the last pass computed its slots, where it computed them one by one."""

    def __call__(self, embeds_NQD: Tensor, slots: Slots, cache: Cache) -> Tensor:
        """The output after the final norm, [N, Q, D]."""
        rows, starts = slots.row.tolist(), slots.start.tolist()
        if not self.apart or len(rows) == 1:
            return self._pass(embeds_NQD, Place(cache, rows, starts, slots.end, slots.looking))
        # earlier blocks of a row first: later ones see what they write
        self.order = sorted(range(len(rows)), key=lambda n: starts[n])
        out = torch.empty_like(embeds_NQD)
        for n in self.order:
            place = Place(cache, rows[n : n + 1], starts[n : n + 1], slots.end[n : n + 1], slots.looking)
            out[n] = self._pass(embeds_NQD[n : n + 1], place)[0]
        return out

    def _pass(self, embeds_NQD: Tensor, place: Place) -> Tensor:
        position = place.position(embeds_NQD.shape[1], embeds_NQD.device)
        return self.model.encode(embeds_NQD, View(position, place.mask, place))


@dataclass(frozen=True)
class Place:
    """The slots of a cache that one pass writes and reads."""

    cache: Cache
    rows: list[int]
    starts: list[int]
    end: Tensor
    """[N, Q]"""
    looking: int

    def position(self, length: int, device: torch.device) -> Tensor:
        start = torch.tensor(self.starts, device=device)[:, None]
        return (start + torch.arange(length, device=device)).clamp_min(0)

    @cached_property
    def most(self) -> int:
        return int(self.end.max())

    @cached_property
    def mask(self) -> Tensor | None:
        """[N, 1, Q, most] booleans, None where every token sees all."""
        seen = torch.arange(self.most, device=self.end.device) < self.end[:, None, :, None]
        return None if bool(seen.all()) else seen

    def update(self, key_NGQC: Tensor, value_NGQC: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.layer(layer, key_NGQC, value_NGQC)
        for n, (row, start) in enumerate(zip(self.rows, self.starts, strict=True)):
            there = slice(start + self.looking, start + key_NGQC.shape[2])
            keys[row, :, there] = key_NGQC[n, :, self.looking :]
            values[row, :, there] = value_NGQC[n, :, self.looking :]
        rows = run_of(self.rows)
        return keys[rows, :, : self.most], values[rows, :, : self.most]

    def get_seq_length(self, layer: int = 0) -> int:
        return 0
