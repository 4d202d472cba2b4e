"""What a pass computes, and the cache that it reads and writes.

A slot is a run of Q consecutive tokens of one row of the cache, and a pass is any number of slots. In every layer the
keys and values of all slots are written first, each at its position in its row; then every token sees the cache from 0
to its `end`. So one pass can denoise a block, store the one before it, refresh a canvas and prefill a prompt, each of
another row, and attention reads nothing but what is there.
Shapes: N slots, Q tokens, R rows, G key/value heads, T positions, C head dimension.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rcd.errors import RCDError, out_of_memory
from rcd.models.lm import DiffusionLM

CACHE_SHARE = 0.85
"""Of the memory that is free, the part that a cache may take; the rest is for the passes."""
COUNTS = 4096
"""Counters of a product's parts: as many as a width has tiles, and more."""


@dataclass(frozen=True)
class Slots:
    row: Tensor
    """[N] the row of the cache."""
    start: Tensor
    """[N] the position of the slot's first token; -1 where that one only looks, and there is none left of the text."""
    end: Tensor
    """[N, Q] how much of its row each token sees."""
    order: Tensor | None = None
    """[N] the slots row by row, where some rows have several."""
    places: tuple[Tensor, Tensor] | None = None
    """[P, 1] and [P, b]: the slot of each predicted block, and where in it its positions are. None: the first P slots
    are the blocks."""
    sources: tuple[Tensor, Tensor] | None = None
    """The same of the outputs that predict them, if they are not their own (the shift of Dream and Fast-dLLM v2)."""
    looking: int = 0
    """Tokens at the beginning of every slot that only look: their keys and values stay as they are."""

    def ordered(self) -> Slots:
        return replace(self, order=self.row.argsort(stable=True).int())


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class Cache:
    """Keys and values [layer][2, R + 1, G, T, C]. The last row is no text's: unused slots write there. Where every pass
    writes all that it reads (`shared`: a canvas computed whole at every step), the layers share one."""

    def __init__(self, model: DiffusionLM, rows: int, capacity: int, shared: bool = False):
        config: Any = model.backbone.config
        layers = 1 if shared else config.num_hidden_layers
        shape = (layers, 2, rows + 1, config.num_key_value_heads, capacity, head_dim(config))
        self.rows, self.capacity = rows, capacity
        store = torch.zeros(shape, dtype=model.codebook.dtype, device=model.device)
        self.store = store.expand(config.num_hidden_layers, *shape[1:])
        self.counts = torch.zeros(COUNTS, dtype=torch.int32, device=model.device)

    def layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, values) [R + 1, G, T, C] of one layer; `key` and `value` are some that are to be kept."""
        return self.store[number, 0], self.store[number, 1]

    def clear(self, row: int) -> None:
        """Forget what a row holds. Only where it is no numbers does that matter: what a token does not see has the
        weight 0 in its attention, and 0 times NaN is NaN."""
        for layer in self.store:
            layer[:, row].zero_()

    def read(self, row: int, start: int, end: int) -> list[Tensor]:
        """A copy of what a row holds there, for `write`."""
        return [self.store[:, :, row, :, start:end].clone()]

    def write(self, row: int, start: int, values: list[Tensor]) -> None:
        self.store[:, :, row, :, start : start + values[0].shape[-2]].copy_(values[0])


class OwnCache(Cache):
    """The same for a backbone of any kind: a layer's shape is that of the first keys and values that it keeps."""

    def __init__(self, model: DiffusionLM, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if number not in self._layers:
            self._layers[number] = self._zeros(key), self._zeros(value)
        return self._layers[number]

    def clear(self, row: int) -> None:
        for layer in self._layers.values():
            for each in layer:
                each[row].zero_()

    def read(self, row: int, start: int, end: int) -> list[Tensor]:
        return [each[row, :, start:end].clone() for _, layer in sorted(self._layers.items()) for each in layer]

    def write(self, row: int, start: int, values: list[Tensor]) -> None:
        for number, pair in enumerate(zip(values[::2], values[1::2], strict=True)):
            for each, value in zip(self.layer(number, pair[0][None], pair[1][None]), pair, strict=True):
                each[row, :, start : start + value.shape[-2]].copy_(value)

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.rows + 1, like.shape[1], self.capacity, like.shape[3])


def position_bytes(model: DiffusionLM, shared: bool = False) -> int:
    """Keys and values of one position, of all layers."""
    config: Any = model.backbone.config
    heads = (1 if shared else config.num_hidden_layers) * config.num_key_value_heads
    return int(2 * heads * head_dim(config) * model.codebook.element_size())


def cache_bytes(model: DiffusionLM, rows: int, capacity: int, shared: bool = False) -> int:
    return position_bytes(model, shared) * (rows + 1) * capacity


def made_cache(model: DiffusionLM, rows: int, capacity: int, shared: bool = False, own: bool = False) -> Cache:
    """`own`: of whatever shape the backbone's layers have."""
    try:
        return OwnCache(model, rows, capacity) if own else Cache(model, rows, capacity, shared)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise RCDError(
            f"the cache of {rows} rows of {capacity} positions ran out of memory; take fewer or shorter rows."
        ) from error


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all of it: other programs may give some back


def check_room(model: DiffusionLM, rows: int, capacity: int, shared: bool = False) -> None:
    """Refuse a cache that cannot fit, and say what would."""
    free = free_bytes(model.device)
    room, needed = int(CACHE_SHARE * free), cache_bytes(model, rows, capacity, shared)
    if needed <= room:
        return
    fewer = room // cache_bytes(model, 0, capacity, shared) - 1
    shorter = room // cache_bytes(model, rows, 1, shared) // 64 * 64
    ways = [f"{fewer} rows of that length"] if fewer > 0 else []
    ways += [f"{rows} rows of {shorter}"] if shorter > 0 else []
    where = "free" if model.device.type == "cuda" else "in this machine"
    fitting_ones = " or ".join(ways) + " would fit" if ways else "no cache fits beside this model"
    raise RCDError(
        f"the cache of {rows} rows of {capacity} positions needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are "
        f"{where}; {fitting_ones}."
    )
