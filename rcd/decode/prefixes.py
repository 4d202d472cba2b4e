"""What was computed of the beginnings of texts, for texts that begin alike: the turns of a chat, answers to one prompt.

Under block-causal attention the keys and values of a block depend on it and on the blocks before it alone. So the
finished blocks of a text that leaves its row are kept, each under its tokens and the block before it, and a prompt that
begins with the same blocks copies them instead of reading them again. The blocks used longest ago go first, and of a
text its last ones.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from rcd.decode.slots import Cache

Key = tuple[Hashable, tuple[int, ...]]
"""The block before (of a text's first one, what the weights are), and the block's tokens."""


@dataclass(frozen=True)
class _Block:
    number: int
    values: list[list[Tensor]]
    """Of each cache (the target's, perhaps a reference's), its layers' keys and values."""

    @property
    def bytes(self) -> int:
        return sum(value.numel() * value.element_size() for each in self.values for value in each)


class Prefixes:
    """Blocks of up to `most_bytes` together. One thread's at a time."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.bytes = most_bytes, 0
        self.asked = self.found = 0
        """Prompt tokens that were looked for, and those that were there, over its life."""
        self._blocks: OrderedDict[Key, _Block] = OrderedDict()
        self._numbers = itertools.count()

    def copy(self, weights: Hashable, tokens: Sequence[int], unit: int, caches: Sequence[Cache], row: int) -> int:
        """Write into the row what is known of these tokens, blocks of `unit`; returns how many it was."""
        keys = self._known(weights, tokens, unit)
        self.asked, self.found = self.asked + len(tokens), self.found + len(keys) * unit
        for start, key in enumerate(keys):
            for cache, values in zip(caches, self._blocks[key].values, strict=True):
                cache.write(row, start * unit, values)
        self._touch(keys)
        return len(keys) * unit

    def keep(self, weights: Hashable, tokens: Sequence[int], unit: int, caches: Sequence[Cache], row: int) -> None:
        """Remember the whole blocks of a row that holds these tokens."""
        keys = self._known(weights, tokens, unit)
        before: Hashable = self._blocks[keys[-1]].number if keys else weights
        for start in range(len(keys) * unit, len(tokens) // unit * unit, unit):
            key = (before, tuple(tokens[start : start + unit]))
            block = _Block(next(self._numbers), [cache.read(row, start, start + unit) for cache in caches])
            self._blocks[key], self.bytes, before = block, self.bytes + block.bytes, block.number
            keys.append(key)
        self._touch(keys)
        while self.bytes > self.most_bytes:
            _, gone = self._blocks.popitem(last=False)
            self.bytes -= gone.bytes

    def _known(self, weights: Hashable, tokens: Sequence[int], unit: int) -> list[Key]:
        keys: list[Key] = []
        before = weights
        for start in range(0, len(tokens) // unit * unit, unit):
            key = (before, tuple(tokens[start : start + unit]))
            if key not in self._blocks:
                break
            keys.append(key)
            before = self._blocks[key].number
        return keys

    def _touch(self, keys: list[Key]) -> None:
        """The first block of a text is the last to go: without it the others are never found."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)
