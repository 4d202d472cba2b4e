"""The windows of a bidirectional canvas (LLaDA, Dream): `bidirectional`, and Fast-dLLM's `prefix` and `dual`.

The canvas is prompt + max_new_tokens masks. Only masks of a row's current block may commit; every row moves through its
blocks at its own pace. `bidirectional` computes the whole canvas at every step. The cached windows do so where a row
begins a block, and every `refresh_every` steps; in the passes between, `dual` computes the block and `prefix` all
blocks from there on, and the keys and values of the rest stay as they were. A pass is one slot a row: the canvas, or
the part. Rows go together whose passes are equally long.
Shapes: as in `rcd.decode.rows`; J blocks of the longest answer, A rows that a pass serves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rcd.carry.base import CarryState, places
from rcd.decode.config import CACHED, canvas_length, rounded
from rcd.decode.filling import Filling, Segment
from rcd.decode.requests import Serving, Size
from rcd.decode.rows import (
    Pass,
    Region,
    Rows,
    broken,
    chosen,
    finish,
    hand_on,
    in_blocks,
    move,
    picked,
    report,
    stay_open,
    write,
)
from rcd.decode.slots import Slots
from rcd.decode.step import Outcome
from rcd.decode.terms import Terms
from rcd.decode.window import Window


def bidirectional(terms: Terms, capacity: int) -> Canvas:
    """The whole canvas at every step, in blocks or at once (LLaDA, Dream)."""
    return Canvas(terms, capacity)


def prefix(terms: Terms, capacity: int) -> Canvas:
    """The block and all behind it; what stands before is read once a block (Fast-dLLM's prefix cache; LLaDA, Dream)."""
    return Canvas(terms, capacity)


def dual(terms: Terms, capacity: int) -> Canvas:
    """The block alone; the rest of the canvas is read once a block (Fast-dLLM's dual cache; LLaDA, Dream)."""
    return Canvas(terms, capacity)


@dataclass(frozen=True)
class Canvas(Window):
    @property
    def most(self) -> int:
        """Blocks of the longest answer, J."""
        return -(-self.capacity // self.terms.b)

    @property
    def spare(self) -> int:
        """Positions behind a row's end that a part may reach into, by less than a block."""
        return self.terms.b

    @property
    def suffix(self) -> bool:
        return self.terms.config.window == "prefix"

    @property
    def shared(self) -> bool:
        """Whether every pass is a whole one, so that nothing of a layer is read after it."""
        return self.terms.config.window not in CACHED

    @property
    def every(self) -> int | None:
        """Steps from one whole pass to the next; None: a block's."""
        return 1 if self.shared else self.terms.config.refresh_every

    @property
    def carried(self) -> bool:
        """Whether every block of the canvas has a state, or the current one alone."""
        kept = self.terms.carry.carries or self.terms.rule.remembers is not None
        return self.terms.config.carry_scope == "canvas" and kept

    @property
    def states(self) -> int:
        return self.most if self.carried else 1

    @property
    def wide(self) -> bool:
        """Whether blocks other than the current one are predicted, too: for their carry; or where an end token closes
        them, is of several, and they are read again."""
        again = self.suffix or self.every is not None
        return self.carried or (self.terms.early and len(self.terms.model.eos_token_ids) > 1 and again)

    # -- the host's part -----------------------------------------------------------------------------------------

    def needs(self, prompt: int, new: int) -> int:
        """Positions that a request takes: whole blocks of its own answer's length."""
        return self.length(prompt + -(-new // self.terms.b) * self.terms.b)

    def length(self, needed: int) -> int:
        """Where no bit may depend on the batch, rows go together that are equally long to the last position."""
        return needed if self.terms.config.batch_invariant else canvas_length(needed)

    def segments(self, prompt: int, new: int, filling: Filling) -> Iterator[Segment]:
        """One: the leftmost block with a mask is where decoding begins."""
        first = filling.ids.index(filling.mask) if filling else 0
        yield Segment(0, prompt + first // self.terms.b * self.terms.b, prompt + new)

    def begin(self, prompt: int, new: int, segment: Segment, filling: Filling) -> tuple[dict[str, int], dict[str, int]]:
        start = segment.start - prompt
        masks = filling.masks(start, start + self.terms.b) if filling else min(self.terms.b, new)
        known = {"masks": masks, "ahead": -(-(new - start) // self.terms.b), "due": 1}
        return {"start": segment.start, "ahead": 1, "pending": 1, "total": masks}, known

    def must_wait(self, serving: Mapping[int, Serving], rate: float) -> bool:
        """Whether a row may have become due in a step that is still unheard of. What comes next is then another kind of
        pass, and the host waits; at most once a block and row, and once for every refresh."""
        if self.shared:
            return False
        return any(
            one.due or one.masks <= math.ceil(rate) or (self.every is not None and (one.step + 1) % self.every == 0)
            for one in (each.last for each in serving.values())
        )

    def next(self, serving: Mapping[int, Serving]) -> tuple[int, ...]:
        """The rows that go with the one that has waited longest."""
        kinds = {row: self._kind(one) for row, one in serving.items()}
        first = min(serving, key=lambda row: serving[row].tick)
        return tuple(row for row, kind in kinds.items() if kind == kinds[first])

    def _kind(self, one: Serving) -> tuple[int, int]:
        """What the rows of a pass have in common."""
        return (one.length, 0) if one.last.due else (0, one.last.ahead if self.suffix else 1)

    def size(self, serving: Sequence[Serving], rows: int, rate: float) -> Size:
        served, low, length, count = self.exact_size(serving)
        return min(rounded(served), rows), low, length, min(rounded(count), self.most) if length else count

    def exact_size(self, serving: Sequence[Serving]) -> Size:
        """(rows served; the next shorter length of a whole pass, and its own, 0 for a part; blocks of a part or of the
        answers)."""
        length, part = self._kind(serving[0])
        return len(serving), self._below(length), length, part or self._most_blocks(serving)

    def start(self, fresh: Mapping[int, Serving]) -> tuple[tuple[int, ...], Size]:
        """Those that are as long as the first."""
        length = next(iter(fresh.values())).length
        same = {row: one for row, one in fresh.items() if one.length == length}
        return tuple(same), (len(same), self._below(length), length, self._most_blocks(same.values()))

    def _most_blocks(self, serving: Iterable[Serving]) -> int:
        """Of the longest answer."""
        return -(-max(one.request.settings.new_tokens for one in serving) // self.terms.b)

    def _below(self, length: int) -> int:
        """The longest text that needs less than such a whole pass; 0 for a part."""
        low = max(0, length - 1)
        while low > 0 and self.length(low) == length:
            low -= 1
        return low

    def slots(self, size: Size) -> int:
        return size[0]

    # -- the device's part ---------------------------------------------------------------------------------------

    def prepared(self, rows: Rows, served: int, low: int, length: int, count: int) -> Pass:
        terms, seen = self.terms, Region.of(rows, rows.prompt, self.most, self.terms, filler=False)
        kind = self._long(rows, low, length) if length else (self._left(rows) == count) | (not self.suffix)
        took, row = chosen(rows, rows.active & (rows.pending == int(length > 0)) & kind, served)
        current = self._current(rows)
        row_P, block_P = self._predicted(rows, row, current, length, count)
        here = (block_P == current[row_P]) & (row_P < rows.nobody)
        scope = (row_P < rows.nobody) if self.carried else here
        masked = picked(seen.masked, row_P, block_P, terms.b)
        inject = places(terms.carry, masked) & picked(seen.output, row_P, block_P, terms.b) & scope[:, None]
        state = self._state(rows, row_P, block_P, here)
        total, steps = rows.total[row_P].clamp_min(1), rows.steps[row_P]
        steps = torch.where(steps > 0, steps, total)
        ids, slots = self._slots(rows, row, row_P, block_P, length, count)
        candidates = self.candidates(rows, seen, row_P, block_P) & here[:, None]
        schedule = terms.rules.schedule
        given = (total, steps, rows.step[state], lambda: picked(seen.needed, row_P, block_P, terms.b).sum(-1))
        share = schedule.share(*given) * here if terms.rule.takes_share else None
        return Pass(
            ids, slots, seen, took, torch.zeros_like(took), row_P, block_P, state, masked, candidates, inject,
            schedule.quota(*given) * here, here, share,
            rows.step[state] < terms.config.klass_history - 1 if terms.rule.remembers is not None else None,
        )  # fmt: skip

    def starting(
        self, rows: Rows, served: int, low: int, length: int, count: int, reference: bool
    ) -> tuple[Tensor, Slots, Tensor, Tensor]:
        """(ids, slots, rows [P], states [P]): a plain pass over the whole canvas of the rows that are fresh."""
        _, row = chosen(rows, rows.active & rows.fresh & self._long(rows, low, length), served)
        row_P, block_P = self._predicted(rows, row, self._current(rows), length, count)
        here = (block_P == self._current(rows)[row_P]) & (row_P < rows.nobody)
        ids, slots = self._slots(rows, row, row_P, block_P, length, count)
        return ids, slots, row_P, self._state(rows, row_P, block_P, here)

    def drawn_start(self, prompt: int, new: int) -> int:
        return new

    def drawn_states(self, rows: Rows, row: int, state: CarryState) -> tuple[Tensor, CarryState]:
        """(states, what they are) of a start [1, answer] that was drawn: all blocks', or the current one's."""
        blocks = -(-state.tensors()[0].shape[1] // self.terms.b)
        apart = state.with_tensors([in_blocks(each, self.terms.b) for each in state.tensors()])
        first = row * self.states
        if self.carried:
            return torch.arange(first, first + blocks, device=rows.start.device), apart
        current = self._current(rows)[row : row + 1]
        return rows.number[row : row + 1], apart.rows(current)

    def settled(self, rows: Rows, made: Pass, outcome: Outcome) -> Tensor:
        """Commit, move on to the leftmost block with a mask that matters, end where there is none; in place. Returns
        the report."""
        terms, took = self.terms, made.took
        _, masked, needed = write(rows, made, outcome, terms)
        open_, current = needed.unflatten(1, (self.most, -1)).sum(-1), self._current(rows)
        first = torch.where(open_ > 0, torch.arange(self.most, device=took.device), self.most).amin(-1)
        if terms.rule.post_edits:
            stay_open(rows, made, outcome, open_[made.row, made.block], terms)
            stays = rows.post[rows.number * self.states + (current if self.carried else 0)] > 0
            first = torch.where(stays, current, first)
        moved, block = first != current, first.clamp_max(self.most - 1)
        hand_on(rows, made, outcome, took[made.row] & (self.carried | ~moved[made.row]))
        step = rows.step[rows.number * self.states + (block if self.carried else 0)]
        due = moved | (step % self.every == 0) if self.every is not None else moved
        finish(rows, made, first == self.most, broken(rows, made, outcome))
        fresh = moved & (terms.starts and not self.carried)
        total = torch.where(moved, open_.gather(1, block[:, None]).squeeze(1), rows.total)
        move(rows, took, start=rows.prompt + block * terms.b, pending=due.long(), fresh=fresh, total=total)
        left = masked.unflatten(1, (self.most, -1)).sum(-1).gather(1, block[:, None]).squeeze(1)
        return report(
            rows, due=rows.pending, ahead=self._left(rows), masks=left, step=step, flying=torch.ones_like(left)
        )

    def _current(self, rows: Rows) -> Tensor:
        """[R + 1] the number of each row's block."""
        return (rows.start - rows.prompt) // self.terms.b

    def _left(self, rows: Rows) -> Tensor:
        """[R + 1] blocks from the current one on."""
        return (rows.limit - rows.start + self.terms.b - 1) // self.terms.b

    def _long(self, rows: Rows, low: int, length: int) -> Tensor:
        """[R + 1] the rows whose whole passes have so many positions."""
        blocks = (rows.limit - rows.prompt + self.terms.b - 1) // self.terms.b
        needed = rows.prompt + blocks * self.terms.b
        return (needed > low) & (needed <= length)

    def _state(self, rows: Rows, row_P: Tensor, block_P: Tensor, here: Tensor) -> Tensor:
        return row_P * self.states + block_P if self.carried else torch.where(here, row_P, rows.nobody)

    def _predicted(self, rows: Rows, row: Tensor, current: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
        """Of each predicted block its row, nobody's behind the answer, and its number: the first ones of all rows, then
        the second ones. Rows 0 and 2, with answers of two blocks and of one, and blocks 0 and 1 of both:

            row  0 2 0 nobody    block  0 0 1 0
        """
        count = count if self.wide else 1
        first = torch.zeros_like(row) if length and self.wide else current[row]
        block = (first + torch.arange(count, device=row.device)[:, None]).flatten()
        row = row.repeat(count)
        there = rows.prompt[row] + block * self.terms.b < rows.limit[row]
        return torch.where(there, row, rows.nobody), torch.where(there, block, 0)

    def _slots(
        self, rows: Rows, row: Tensor, row_P: Tensor, block_P: Tensor, length: int, count: int
    ) -> tuple[Tensor, Slots]:
        """(ids, slots): every row's canvas, or its blocks from the current one on. A part also reads the token left of
        it where that predicts its first position (Dream's shift), and keeps that token's keys and values."""
        b, shift = self.terms.b, self.terms.model.shift
        looking = 0 if length else shift
        start = torch.zeros_like(row) if length else (rows.start[row] - shift).clamp_min(0)
        wide = length or count * b + shift
        position = start[:, None] + torch.arange(wide, device=row.device)
        slot = torch.arange(len(row_P), device=row.device)[:, None] % len(row)
        inside = (rows.prompt[row_P] + block_P * b)[:, None] - start[slot] + torch.arange(b, device=row.device)
        # a block that is not there stands at the prompt's first token, where no carry enters
        inside = torch.where((row_P < rows.nobody)[:, None], inside, 0)
        end = rows.limit[row].clamp_min(1)[:, None].expand(-1, wide)
        sources = (slot, (inside - shift).clamp_min(0)) if shift else None
        slots = Slots(
            row.int(), start.int(), end.int().contiguous(), places=(slot, inside), sources=sources, looking=looking
        )
        return rows.text[row[:, None], position], slots
