"""How a batch lies in slots, and which of them a pass computes.

Every row is padded on the left, so that what is decoded begins at one slot in all rows while each keeps its own
positions. Shapes: B rows, T slots, W slots of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rcd.carry.base import CarryState


def lay_out(
    prompts: Sequence[Sequence[int]], pads: Sequence[int], total: int, mask: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(ids [B, T], masks behind the prompts; positions [B, T], negative in the padding)."""
    ids = torch.full((len(prompts), total), mask, dtype=torch.long)
    for row, (pad, prompt) in enumerate(zip(pads, prompts, strict=True)):
        ids[row, :pad] = prompt[0]  # padding: any token but the mask
        ids[row, pad : pad + len(prompt)] = torch.as_tensor(prompt)
    position = torch.arange(total) - torch.tensor(pads)[:, None]
    return ids.to(device), position.to(device)


@dataclass(frozen=True)
class Grid:
    """A batch whose text is decoded in blocks of b slots behind those that are prefilled."""

    ids: Tensor
    """[B, T]"""
    position: Tensor
    """[B, T], negative in the padding."""
    place: Tensor
    """[B, T] place // b is the number of a slot's block, for the block-causal mask; negative in the padding."""
    output: Tensor
    """[B, T] booleans: behind the prompt and within max_new_tokens."""
    prefilled: int
    """Slots before the first decoded block."""
    unit: int
    """The prefilled part is read in pieces of whole such units."""

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], b: int, new_tokens: int, mask: int, device: torch.device) -> Grid:
        """SDAR's: blocks begin at multiples of b counted from the text's first token, so the prompt's remainder sits as
        fixed tokens in the first decoded block. Rows are padded by whole blocks."""
        whole = [len(prompt) // b * b for prompt in prompts]
        pads = [max(whole) - slots for slots in whole]
        total = max(pad + -(-(len(p) + new_tokens) // b) * b for pad, p in zip(pads, prompts, strict=True))
        ids, position = lay_out(prompts, pads, total, mask, device)
        return cls(ids, position, position, _output(position, prompts, new_tokens), max(whole), b)

    @classmethod
    def behind(cls, prompts: Sequence[Sequence[int]], b: int, new_tokens: int, mask: int, device: torch.device) -> Grid:
        """D2F's for LLaDA: the prompt is one block of any length, and blocks of b follow it."""
        width = max(map(len, prompts))
        total = width + -(-new_tokens // b) * b
        ids, position = lay_out(prompts, [width - len(prompt) for prompt in prompts], total, mask, device)
        answer = torch.arange(total, device=device) - width
        place = torch.where(answer >= 0, answer + b, position.clamp_max(0))
        return cls(ids, position, place, _output(position, prompts, new_tokens), width, width)

    def rows(self, index: Tensor) -> Grid:
        ids, position, place, output = (each[index] for each in (self.ids, self.position, self.place, self.output))
        return replace(self, ids=ids, position=position, place=place, output=output)


def _output(position_BT: Tensor, prompts: Sequence[Sequence[int]], new_tokens: int) -> Tensor:
    length = torch.tensor([len(prompt) for prompt in prompts], device=position_BT.device)[:, None]
    return (position_BT >= length) & (position_BT < length + new_tokens)


@dataclass(frozen=True)
class Span:
    """The slots that a pass computes: equally many in every row, each row's wherever it is."""

    slots: Tensor
    """[B, W]"""
    own: Tensor
    """[B, W] booleans: the slots that the pass is about. The others fill up the rectangle; nothing of them is kept."""

    @classmethod
    def of(cls, start_B: Tensor, stop_B: Tensor, total: int, width: int | None = None) -> Span:
        """From `start` to `stop` (both within `total`), in a rectangle as wide as the widest row or as `width`."""
        wide = int((stop_B - start_B).max()) if width is None else width
        offset = torch.arange(wide, device=start_B.device)
        slots = start_B.clamp_max(total - wide)[:, None] + offset
        return cls(slots, (slots >= start_B[:, None]) & (slots < stop_B[:, None]))

    def moved(self, by: int, left: int = 0) -> Span:
        """Counted from another zero, with so many more slots on the left that are not its own."""
        before = self.slots[:, :1] + torch.arange(-left, 0, device=self.slots.device)
        slots = torch.cat((before, self.slots), dim=1) + by
        return Span(slots, torch.cat((torch.zeros_like(before, dtype=torch.bool), self.own), dim=1))

    @property
    def first(self) -> list[int]:
        """Each row's first slot."""
        return [int(slot) for slot in self.slots[:, 0].tolist()]

    def take(self, values_BT: Tensor) -> Tensor:
        return values_BT.gather(1, self.slots)

    def put(self, values_BT: Tensor, new_BW: Tensor) -> Tensor:
        """The values with the span's own replaced."""
        return values_BT.scatter(1, self.slots, torch.where(self.own, new_BW, self.take(values_BT)))

    def of_state(self, state: CarryState) -> CarryState:
        return state.at(self.slots)

    def put_state(self, state: CarryState | None, new: CarryState) -> CarryState:
        """The state with that of the span's own slots replaced; a first state is of all slots."""
        assert state is not None
        return state.put_at(self.slots, new, self.own)


class Whole(Span):
    """All slots of every row: nothing to pick out or to put back."""

    @classmethod
    def all(cls, rows: int, total: int, device: torch.device) -> Whole:
        slots = torch.arange(total, device=device).expand(rows, -1)
        return cls(slots, torch.ones_like(slots, dtype=torch.bool))

    @property
    def first(self) -> list[int]:
        return [0] * len(self.slots)

    def take(self, values_BT: Tensor) -> Tensor:
        return values_BT

    def put(self, values_BT: Tensor, new_BW: Tensor) -> Tensor:
        return new_BW

    def of_state(self, state: CarryState) -> CarryState:
        return state

    def put_state(self, state: CarryState | None, new: CarryState) -> CarryState:
        return new
