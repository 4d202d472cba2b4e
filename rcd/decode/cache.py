"""Keys and values of the tokens already decided."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class KVCache:
    """Preallocated keys and values [B, heads, slots, head dim] of every layer.

    A forward pass always writes its window behind the stored slots and attends to both; only `advance` makes the
    window stored. So a denoising pass costs no copy of the past and leaves no trace, and a store is the same pass
    followed by `advance`. It has the two methods that transformers' attention layers call on a cache.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} slots in a cache of {self.capacity}")
        if layer == len(self.keys):
            self.keys.append(key.new_empty(self._size(key, end)))
            self.values.append(value.new_empty(self._size(value, end)))
        elif end > self.keys[layer].shape[2]:
            self.keys[layer] = self._grown(self.keys[layer], end)
            self.values[layer] = self._grown(self.values[layer], end)
        keys, values = self.keys[layer], self.values[layer]
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

    def _slots(self, needed: int) -> int:
        """Twice what is needed now, so that a long limit on a short text costs no memory."""
        return min(self.capacity, max(2 * needed, 256))

    def _size(self, like: Tensor, needed: int) -> tuple[int, int, int, int]:
        return like.shape[0], like.shape[1], self._slots(needed), like.shape[3]

    def _grown(self, old: Tensor, needed: int) -> Tensor:
        new = old.new_empty(self._size(old, needed))
        new[:, :, : self.length] = old[:, :, : self.length]
        return new
