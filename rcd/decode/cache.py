"""Keys and values of tokens that a pass reads and does not compute again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values [B, heads, slots, head dim] of every layer, used in one of two ways.

    Given to a forward pass as it is, the pass writes its window behind the stored slots and attends to both; only
    `advance` makes the window stored. So a denoising pass costs no copy of the past and leaves no trace, and a store is
    the same pass followed by `advance`. Given as a `place`, the pass replaces what stands in any slots of any rows.
    Cache and place have the two methods that transformers' attention layers call on a cache.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key.shape[2]
        keys, values = self.room(key, value, layer, end)
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length

    def advance(self, slots: int) -> None:
        self.length += slots

    def rows(self, index: Tensor) -> None:
        """Keep some rows of the batch, in the given order."""
        self.keys = [key[index] for key in self.keys]
        self.values = [value[index] for value in self.values]

    def place(self, slots_RW: Tensor, written_RW: Tensor, seen: int, rows_R: Tensor | None = None) -> Place:
        """For a pass over these slots of some rows (None: all)."""
        return Place(self, slots_RW, written_RW, seen, rows_R)

    def room(self, key: Tensor, value: Tensor, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, with `end` slots at least. The first pass has every row of the batch."""
        if end > self.capacity:
            raise ValueError(f"{end} slots in a cache of {self.capacity}")
        if layer == len(self.keys):
            self.keys.append(self._zeros(key, end))
            self.values.append(self._zeros(value, end))
        elif end > self.keys[layer].shape[2]:
            self.keys[layer] = self._grown(self.keys[layer], end)
            self.values[layer] = self._grown(self.values[layer], end)
        return self.keys[layer], self.values[layer]

    def _zeros(self, like: Tensor, needed: int) -> Tensor:
        """Twice what is needed now, so that a long limit on a short text costs no memory. Zeros, since a slot that the
        mask hides still enters attention with weight 0, and 0 times a NaN is none."""
        slots = min(self.capacity, max(2 * needed, 256))
        return like.new_zeros(like.shape[0], like.shape[1], slots, like.shape[3])

    def _grown(self, old: Tensor, needed: int) -> Tensor:
        new = self._zeros(old, needed)
        new[:, :, : old.shape[2]] = old
        return new


@dataclass(frozen=True)
class Place:
    """Slots of a cache that one pass reads and writes in place."""

    cache: KVCache
    slots: Tensor
    """[R, W] where the pass's tokens stand, each row's own."""
    written: Tensor
    """[R, W] booleans: the tokens whose keys and values are kept. A token that is not written attends, as all do, to
    what the cache has of it."""
    seen: int
    """The pass attends to the first so many slots, under its mask."""
    rows: Tensor | None = None
    """[R] the cache's rows that the pass is about; None: all."""

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.room(key, value, layer, self.seen)
        token_row, token = self._tokens
        row = token_row if self.rows is None else self.rows[token_row]
        slot = self.slots[token_row, token]
        keys[row, :, slot] = key[token_row, :, token]
        values[row, :, slot] = value[token_row, :, token]
        keys, values = keys[:, :, : self.seen], values[:, :, : self.seen]
        return (keys, values) if self.rows is None else (keys[self.rows], values[self.rows])

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def of(self, index: Tensor) -> Place:
        """The place of some of its rows."""
        rows = index if self.rows is None else self.rows[index]
        return replace(self, slots=self.slots[index], written=self.written[index], rows=rows)

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        """(row, number in the row) of every token that is written."""
        row, token = torch.nonzero(self.written, as_tuple=True)
        return row, token
