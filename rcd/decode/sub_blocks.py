"""The window `sub_blocks`: `blockwise`, and inside a block a cache of the block (Fast-dLLM v2's `use_block_cache`).

A block of b is decoded in sub-blocks of s, from left to right. A step that enters one computes the whole block; the
steps after it compute the sub-block alone, against keys and values of the rest of the block as that pass left them.
Where outputs predict the next position, the whole block is computed as long as the sub-block's first position is a
mask, since the output that predicts it lies left of the sub-block; and after a step that committed the block's first
position alone, which nothing in the block has seen yet.
What is predicted are sub-blocks, each with a carry of its own: all of a block's in a whole pass, else the current one.
A pass is of one kind; rows whose next pass is of the same kind go together.
Shapes: as in `rcd.decode.rows`; n sub-blocks of a block, J = 1, K = n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rcd.carry.base import CarryState, places
from rcd.decode.blocks import Blocks, source
from rcd.decode.config import rounded
from rcd.decode.filling import Filling, Segment
from rcd.decode.flight import least, turn
from rcd.decode.requests import Serving, Size
from rcd.decode.rows import (
    Pass,
    Region,
    Rows,
    broken,
    candidates_of,
    finish,
    hand_on,
    in_blocks,
    move,
    picked,
    report,
    write,
)
from rcd.decode.slots import Slots
from rcd.decode.step import Outcome
from rcd.decode.stopping import is_end
from rcd.decode.terms import Terms


def sub_blocks(terms: Terms, capacity: int) -> SubBlocks:
    """One cached block at a time, of which the current sub-block is computed, and the rest once a sub-block (Fast-dLLM
    v2's block cache)."""
    return SubBlocks(terms, capacity)


@dataclass(frozen=True)
class SubBlocks(Blocks):
    @property
    def flying(self) -> int:
        return 1

    @property
    def unit(self) -> int:
        """Positions of a sub-block, s."""
        length = self.terms.config.sub_block_length
        assert length is not None, "resolve the configuration first"
        return length

    @property
    def states(self) -> int:
        """Sub-blocks of a block, n."""
        return self.terms.b // self.unit

    # -- the host's part -----------------------------------------------------------------------------------------

    def begin(self, prompt: int, new: int, segment: Segment, filling: Filling) -> tuple[dict[str, int], dict[str, int]]:
        own, known = super().begin(prompt, new, segment, filling)
        return {**own, "part": 0}, {**known, "masks": self.unit}

    def must_wait(self, serving: Mapping[int, Serving], rate: float) -> bool:
        """Whether a step that is still unheard of may have changed the kind of a row's next pass."""
        return any(not one.last.part or one.last.masks <= math.ceil(rate) for one in serving.values())

    def next(self, serving: Mapping[int, Serving]) -> tuple[int, ...]:
        """The rows that go with the one that has waited longest."""
        first = min(serving, key=lambda row: serving[row].tick)
        kind = serving[first].last.part
        return tuple(row for row, one in serving.items() if one.last.part == kind)

    def size(self, serving: Sequence[Serving], rows: int, rate: float) -> Size:
        served, slots, part = self.exact_size(serving)
        extra, served = slots - served, min(rounded(served), rows)
        return served, served + next(share for share in (0, -(-served // 4), served) if share >= extra), part

    def exact_size(self, serving: Sequence[Serving]) -> Size:
        """(rows served, all slots, whether they compute a sub-block alone)."""
        return len(serving), len(serving) + sum(one.last.due for one in serving), serving[0].last.part

    # -- the device's part ---------------------------------------------------------------------------------------

    def prepared(self, rows: Rows, served: int, slots: int, part: int = 0) -> Pass:
        """A slot for each row: its block, or its current sub-block; then finished blocks, beside whole ones."""
        terms, seen = self.terms, Region.of(rows, rows.start, 1, self.terms, filler=True)
        took, storing, row, block = self._placed(
            rows, rows.active & (rows.part == bool(part)), rows.pending, served, slots
        )
        own = torch.where(took[row[:served]], row[:served], rows.nobody)
        current = self._current(seen.needed)
        row_P, number_P = self._predicted(own, current, part)
        left = self._left(seen.needed)
        steps = rows.step.view(-1, self.states).sum(-1, keepdim=True)
        wanted, counts, due = least(torch.ones_like(left), left > 0, steps, rows.steps, terms.config, terms.rules, left)
        here = number_P == current[row_P]
        there = (row_P < rows.nobody) & (left > 0)[row_P, 0]
        masked = picked(seen.masked, row_P, number_P, self.unit) & (row_P < rows.nobody)[:, None]
        offered = candidates_of(rows, seen, terms) & turn(seen.needed, terms.config)
        ids, view = self._part(rows, row, row_P, number_P) if part else self._whole(rows, row, block, row_P, number_P)
        return Pass(
            ids, view, seen, took, storing, row_P, number_P, row_P * self.states + number_P, masked,
            picked(offered, row_P, number_P, self.unit) & there[:, None],
            places(terms.carry, masked) & there[:, None], wanted[row_P, 0] * here, counts[row_P, 0] & here,
            None if due is None else due[row_P, 0] * here,
        )  # fmt: skip

    def starting(self, rows: Rows, count: int, reference: bool) -> tuple[Tensor, Slots, Tensor, Tensor]:
        """As of blocks; what is predicted are all sub-blocks of each."""
        ids, slots, row, _ = super().starting(rows, count, reference)
        row_P, number_P = self._predicted(row, torch.zeros_like(rows.start), part=0)
        return ids, self._placing(slots, rows, row_P, number_P), row_P, row_P * self.states + number_P

    def drawn_states(self, rows: Rows, row: int, state: CarryState) -> tuple[Tensor, CarryState]:
        """(states, what they are) of a start [1, b] that was drawn for a row's block."""
        first = row * self.states
        apart = state.with_tensors([in_blocks(each, self.unit) for each in state.tensors()])
        return torch.arange(first, first + self.states, device=rows.start.device), apart

    def settled(self, rows: Rows, made: Pass, outcome: Outcome) -> Tensor:
        """Commit, move on to the next sub-block or block, end where the text does; in place. Returns the report."""
        terms, took, before = self.terms, made.took, made.seen.needed
        ids, _, needed = write(rows, made, outcome, terms)
        left, now = needed.any(-1), self._current(needed)
        hand_on(rows, made, outcome, left[made.row])
        self._forget(rows, took & ~left)
        ended = rows.ended | (is_end(ids, rows.ends) & made.seen.ending).any(-1)
        more, first = self._more(rows, ended), (~left).long()
        finish(rows, made, ~left & ~more, broken(rows, made, outcome))
        move(rows, made.storing, pending=torch.zeros_like(rows.pending))
        whole = ~left | (now != self._current(before))
        if terms.model.shift:
            whole = whole | needed.unflatten(1, (self.states, -1))[rows.number, now, 0]
        if terms.config.first_token_alone:
            whole = whole | before[:, 0]
        move(
            rows, took, start=rows.start + first * terms.b, pending=first, ended=ended, part=~whole,
            fresh=rows.fresh | (~left & more & terms.starts), referred=rows.referred + first,
            stored=rows.stored + first * more,
        )  # fmt: skip
        masks = needed.unflatten(1, (self.states, -1)).sum(-1)[rows.number, now]
        one = torch.ones_like(masks)
        return report(
            rows, due=rows.pending, ahead=one, masks=torch.where(left, masks, self.unit), step=one - 1, flying=one
        )  # fmt: skip

    def _forget(self, rows: Rows, done: Tensor) -> None:
        """The carry of a finished block is nothing, that of the sub-blocks which the last pass did not compute too."""
        for each in (rows.step, *rows.carry.tensors(), *rows.memory):
            apart = each.view(len(done), self.states, *each.shape[1:])
            apart.copy_(torch.where(done.view(-1, *([1] * (apart.dim() - 1))), 0, apart))

    def _current(self, needed: Tensor) -> Tensor:
        """[R + 1] the number of the leftmost sub-block with a mask that matters; 0 where there is none."""
        return needed.unflatten(1, (self.states, -1)).any(-1).long().argmax(-1)

    def _predicted(self, row: Tensor, current: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """Of each predicted sub-block its row and its number: the first ones of all rows, then the second ones."""
        if part:
            return row, current[row]
        number = torch.arange(self.states, device=row.device).repeat_interleave(len(row))
        return row.repeat(self.states), number

    def _whole(self, rows: Rows, row: Tensor, block: Tensor, row_P: Tensor, number_P: Tensor) -> tuple[Tensor, Slots]:
        """(ids, slots) of whole blocks, counted from their rows' unfinished ones; the first are predicted."""
        begin = (rows.start[row] + block * self.terms.b).clamp_min(0)
        ids, slots = self._run(rows, row, begin, begin, self.terms.b)
        return ids, self._placing(slots, rows, row_P, number_P)

    def _part(self, rows: Rows, row: Tensor, row_P: Tensor, number_P: Tensor) -> tuple[Tensor, Slots]:
        """(ids, slots) of the sub-blocks alone."""
        begin = rows.start[row] + number_P * self.unit
        ids, slots = self._run(rows, row, rows.start[row], begin, self.unit)
        return ids, self._placing(slots, rows, row_P, torch.zeros_like(number_P), number_P)

    def _placing(
        self, slots: Slots, rows: Rows, row_P: Tensor, inside_P: Tensor, number_P: Tensor | None = None
    ) -> Slots:
        """With the places of the sub-blocks: each is the `inside`-th in its slot, and the `number`-th of its block."""
        shift, count = self.terms.model.shift, len(row_P) if number_P is not None else len(row_P) // self.states
        slot = torch.arange(len(row_P), device=row_P.device)[:, None] % count
        along = torch.arange(self.unit, device=row_P.device)
        inside = inside_P[:, None] * self.unit + along + shift
        if not shift:
            return replace(slots, places=(slot, inside))
        number_P = inside_P if number_P is None else number_P
        position = rows.start[row_P][:, None] + number_P[:, None] * self.unit + along
        return replace(slots, places=(slot, inside), sources=(slot, source(position, inside, shift)))
