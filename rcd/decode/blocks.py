"""The windows of block-causal attention, `blockwise` and `d2f`: the past is in the cache, and blocks are in flight.

`blockwise` is one block in flight, `d2f` several (Discrete Diffusion Forcing). Every unfinished block is a slot that is
predicted; the finished ones before them are stored by the next pass, in slots beside. A row for which no such slots are
left stores first, in the slots of its own, and takes its step in a later pass. SDAR's blocks lie on an absolute grid,
and the prompt's remainder sits as fixed tokens in the first one; LLaDA's (under d2f, which it must be trained for)
begin at the prompt's end, and the prompt is one block; so do Dream's.
Shapes: as in `rcd.decode.rows`; W blocks in flight at most, J = K = W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rcd.carry.base import CarryState, places
from rcd.decode.config import rounded
from rcd.decode.filling import Filling, Piece, Segment
from rcd.decode.flight import another, decoded_share, least, prefill_piece
from rcd.decode.requests import Serving, Size
from rcd.decode.rows import Pass, Region, Rows, broken, finish, hand_on, move, picked, report, stay_open, write
from rcd.decode.slots import Slots
from rcd.decode.step import Outcome
from rcd.decode.stopping import is_end
from rcd.decode.terms import Terms
from rcd.decode.window import Window


def blockwise(terms: Terms, capacity: int) -> Blocks:
    """One cached block at a time on an absolute grid (SDAR, LLaDA2, Fast-dLLM v2)."""
    return Blocks(replace(terms, config=replace(terms.config, blocks_in_flight=1)), capacity)


def d2f(terms: Terms, capacity: int) -> Blocks:
    """Several blocks in flight, block-causal, the finished ones cached (D2F; SDAR, and LLaDA or Dream as D2F trains
    them)."""
    return Blocks(terms, capacity)


@dataclass(frozen=True)
class Blocks(Window):
    @property
    def flying(self) -> int:
        """Blocks in flight, W."""
        return self.terms.config.blocks_in_flight

    @property
    def states(self) -> int:
        return self.flying

    @property
    def stores(self) -> bool:
        return self.terms.config.window != "d2f"

    # -- the host's part -----------------------------------------------------------------------------------------

    def origin(self, prompt: int) -> int:
        """Where the first decoded block begins."""
        grid = self.terms.config.grid(self.terms.model)
        return prompt // grid * grid

    def needs(self, prompt: int, new: int) -> int:
        """Positions that a request takes: its last block is a whole one."""
        first = self.origin(prompt)
        return first - (first - prompt - new) // self.terms.b * self.terms.b

    def span(self, prompt: int, new: int) -> int:
        return self.needs(prompt, new) - prompt

    def segments(self, prompt: int, new: int, filling: Filling) -> Iterator[Segment]:
        """Blocks that are given whole are no step's, but read like a prompt when all before them is decided."""
        return filling.segments(prompt, self.origin(prompt), self.terms.b, new)

    def begin(self, prompt: int, new: int, segment: Segment, filling: Filling) -> tuple[dict[str, int], dict[str, int]]:
        end = segment.start + self.terms.b - prompt
        masks = filling.masks(segment.start - prompt, end) if filling else min(self.terms.b, end)
        own = {"start": segment.start, "until": segment.until, "ahead": 1, "pending": 0, "referred": 0}
        return own, {"masks": masks, "ahead": min(2, self.flying)}

    def prefill(self, prompt: int, begin: int, end: int) -> Iterator[Piece]:
        """LLaDA's prompt is one block, and one pass."""
        base = 0 if self.terms.model.attention == "block_causal" else self.origin(prompt)
        if begin < base:
            yield Piece(0, base, base)
        size = prefill_piece(self.terms.b)
        for start in range(max(begin, base), end, size):
            yield Piece(start, min(start + size, end), self.terms.b, base)

    def size(self, serving: Sequence[Serving], rows: int, rate: float) -> Size:
        """(slots that are predicted, all slots) where the host lags. There are as many of the first as the rows may
        have blocks in flight; of the others, for finished blocks, as rows will probably have finished one in the
        step still unheard of."""
        served = min(rounded(sum(one.last.ahead for one in serving)), rows * self.flying)
        likely = sum(one.last.masks <= math.ceil(rate) for one in serving)
        extra = next(share for share in (0, -(-served // 4), -(-served // 2), served) if share >= min(likely, served))
        return served, served + extra

    def exact_size(self, serving: Sequence[Serving]) -> Size:
        """The same where the host knows what every step did: no slot is computed in vain."""
        served = sum(one.last.flying for one in serving)
        return served, served + sum(one.last.due for one in serving)

    def start(self, fresh: Mapping[int, Serving]) -> tuple[tuple[int, ...], Size]:
        return tuple(fresh), (len(fresh),)

    def slots(self, size: Size) -> int:
        return size[1]

    def several(self, size: Size) -> bool:
        return size[1] >= 16 and (size[1] > size[0] or self.flying > 1)

    # -- the device's part ---------------------------------------------------------------------------------------

    def prepared(self, rows: Rows, served: int, slots: int) -> Pass:
        """Every active row's blocks in flight get a slot each; then finished blocks, as long as there are slots."""
        b, seen = self.terms.b, Region.of(rows, rows.start, self.flying, self.terms, filler=True)
        took, storing, row, block = self._placed(rows, rows.active, rows.pending, served, slots)
        own, going = row[:served], took[row[:served]]
        row_P = torch.where(going, own, rows.nobody)
        block_P = torch.where(going, block[:served], 0)
        left = self._left(seen.needed)
        flying = self._added(rows) & self._unfinished(rows, left)
        share = self._share(rows, seen, left)
        wanted, counts, due = least(
            share, flying, self._steps(rows), rows.steps, self.terms.config, self.terms.rules, left
        )
        open_ = flying[row_P, block_P][:, None]
        masked = picked(seen.masked, row_P, block_P, b) & going[:, None]
        ids, view = self._slots(rows, row, block, served, ordered=True)
        return Pass(
            ids, view, seen, took, storing, row_P, block_P, self._state(rows, row_P, block_P), masked,
            self.candidates(rows, seen, row_P, block_P) & open_,
            places(self.terms.carry, masked) & open_, wanted[row_P, block_P], counts[row_P, block_P],
            None if due is None else due[row_P, block_P],
        )  # fmt: skip

    def starting(self, rows: Rows, count: int, reference: bool) -> tuple[Tensor, Slots, Tensor, Tensor]:
        """(ids, slots, rows [count], states [count]): a plain pass over what the rows whose newest block is fresh
        have in flight and have still to store, in so many predicted slots, one a row: that newest block's."""
        behind = rows.referred if reference else rows.pending
        on, ahead = rows.active & rows.fresh, rows.ahead
        rank = torch.where(on, on.long().cumsum(0) - 1, count)
        none = torch.zeros(count + 1, dtype=torch.long, device=rank.device)
        row = (none + rows.nobody).scatter(0, rank, rows.number)[:count]
        newest = (ahead[row] - 1).clamp_min(0)
        # the newest blocks first, then all others from the oldest unstored one on, those that are not there as nobody's
        back = torch.arange(-self.flying, self.flying - 1, device=rank.device).repeat_interleave(count)
        every = row.repeat(2 * self.flying - 1)
        there = (back >= -behind[every]) & (back < ahead[every] - 1) & (every < rows.nobody)
        others = torch.where(there, every, rows.nobody)
        block = torch.cat((newest, torch.where(there, back, 0)))
        # nothing is injected here: the token left of a block says the same as the block before would
        ids, slots = self._slots(rows, torch.cat((row, others)), block, count, ordered=False)
        return ids, slots, row, self._state(rows, row, newest)

    @property
    def stores_at_start(self) -> bool:
        return True

    def drawn_start(self, prompt: int, new: int) -> int:
        return self.terms.b

    def drawn_states(self, rows: Rows, row: int, state: CarryState) -> tuple[Tensor, CarryState]:
        """(states, what they are) of a start [1, b] that was drawn for a row's newest block."""
        one = rows.number[row : row + 1]
        return self._state(rows, one, rows.ahead[one] - 1), state

    def settled(self, rows: Rows, made: Pass, outcome: Outcome) -> Tensor:
        """Commit, move on to the first unfinished block, add one behind the last, end where the text does; in place.
        Returns the report."""
        terms, took = self.terms, made.took
        ids, _, needed = write(rows, made, outcome, terms)
        masks, there = self._left(needed), self._added(rows)
        if terms.rule.post_edits:
            stay_open(rows, made, outcome, masks[made.row, made.block], terms)
        flying = there & self._unfinished(rows, masks)
        hand_on(rows, made, outcome, flying[made.row, made.block])
        first = (there & ~flying).long().cumprod(-1).sum(-1)
        left = masks.gather(1, first.clamp_max(self.flying - 1)[:, None]).squeeze(1)
        left = torch.where(first < rows.ahead, left, terms.b)
        ends = (is_end(ids, rows.ends) & made.seen.ending).unflatten(1, (self.flying, -1)).any(-1)
        ended = self._ended(rows, (ends & there).any(-1))
        more, last = self._more(rows, ended), (rows.ahead - 1).clamp_min(0)[:, None]
        share = self._share(rows, made.seen, masks).gather(1, last).squeeze(1)
        ahead = rows.ahead - first
        done = (ahead == 0) & ~more
        finish(rows, made, done, broken(rows, made, outcome))
        move(rows, made.storing, pending=rows.pending - rows.ahead.minimum(rows.pending))
        added = another(share, ahead, more, terms.config)
        fresh, behind = rows.fresh | (added & terms.starts), first
        stored = rows.stored + torch.where(done, 0, first) * self.stores
        move(
            rows, took, start=rows.start + first * terms.b, pending=behind, ahead=ahead + added.long(), ended=ended,
            fresh=fresh, referred=rows.referred + first, stored=stored,
        )  # fmt: skip
        likely = (rows.ahead + self._more(rows, rows.ended)).clamp_max(self.flying)
        zero = torch.zeros_like(left)
        return report(rows, due=rows.pending, ahead=likely, masks=left, step=zero, flying=rows.ahead)

    def refreshed(self, rows: Rows, made: Pass) -> None:
        move(rows, made.took, referred=torch.zeros_like(rows.referred))

    def _slots(self, rows: Rows, row: Tensor, block: Tensor, count: int, ordered: bool) -> tuple[Tensor, Slots]:
        """(ids, slots) of blocks, counted from their rows' first unfinished ones; the first `count` are predicted.

        Where outputs predict the next position, a slot begins with the token left of its block, which only looks: its
        own keys and values are in the cache, and it sees what it saw there, so that its output is what it was. It
        predicts the block's first position, unless the block before is in flight as well (and `ordered`: in the slot
        before): then that slot's last output does, since its embedding may have a carry in it. b = 3, blocks 4 and 5 of
        a row in flight, in the slots 0 and 1:

            slot 0   11 12 13 14    sees  12 15 15 15     predicts 12, 13, 14 by its tokens 0, 1, 2
            slot 1   14 15 16 17    sees  15 18 18 18     predicts 15 by slot 0's token 3, and 16, 17 by its own 1, 2
        """
        b, shift = self.terms.b, self.terms.model.shift
        begin = (rows.start[row] + block * b).clamp_min(0)
        ids, slots = self._run(rows, row, begin, begin, b)
        if shift:
            inside = torch.arange(b, device=row.device).expand(count, -1)
            slot = torch.arange(count, device=row.device)[:, None].expand(-1, b)
            before = (inside == 0) & (block[:count, None] > 0) & ordered
            own = source(begin[:count, None] + inside, inside + shift, shift)
            sources = slot - before.long(), torch.where(before, b, own)
            slots = replace(slots, places=(slot[:, :1], inside + shift), sources=sources)
        return ids, slots

    def _run(self, rows: Rows, row: Tensor, block: Tensor, begin: Tensor, length: int) -> tuple[Tensor, Slots]:
        """(ids, slots) of so many positions from `begin` on, of blocks that begin at `block`."""
        shift = self.terms.model.shift
        position = begin[:, None] + torch.arange(-shift, length, device=row.device)
        left = (position < block[:, None]) & (block > 0)[:, None]  # it sees what it saw: the block before, to its end
        end = block[:, None] + torch.where(left, 0, self.terms.b)
        slots = Slots(row.int(), (begin - shift).int(), end.int().contiguous(), looking=shift)
        return rows.text[row[:, None], position.clamp_min(0)], slots

    def _state(self, rows: Rows, row: Tensor, block: Tensor) -> Tensor:
        """Where a block's state is: at its number modulo W."""
        if self.flying == 1:
            return row
        return row * self.flying + (rows.start[row] // self.terms.b + block) % self.flying

    def _left(self, needed: Tensor) -> Tensor:
        """[R + 1, W] masks left in each block."""
        return needed.unflatten(1, (self.flying, -1)).sum(-1)

    def _added(self, rows: Rows) -> Tensor:
        """[R + 1, W]"""
        return torch.arange(self.flying, device=rows.ahead.device) < rows.ahead[:, None]

    def _more(self, rows: Rows, ended: Tensor) -> Tensor:
        """[R + 1] whether blocks are to come: some of the answer is behind those added, and no end token was seen."""
        return (rows.start + rows.ahead * self.terms.b < rows.until) & ~ended

    def _share(self, rows: Rows, seen: Region, left: Tensor) -> Tensor:
        """[R + 1, W] the decoded part of each block's masks; nobody waits for that of a block alone in flight."""
        if self.flying == 1:
            return torch.ones_like(left)
        total = seen.output if self.terms.early else seen.position >= rows.prompt[:, None]
        return decoded_share(self._left(total & ~seen.given(rows)), left)

    def _steps(self, rows: Rows) -> Tensor:
        """[R + 1, W] each block's steps."""
        return self._of_blocks(rows, rows.step)

    def _of_blocks(self, rows: Rows, values: Tensor) -> Tensor:
        """[R + 1, W] a number that each block has, of [(R + 1) W]."""
        if self.flying == 1:
            return values[:, None]
        number = rows.start[:, None] // self.terms.b + torch.arange(self.flying, device=rows.start.device)
        return values.view(-1, self.flying).gather(1, number % self.flying)

    def _unfinished(self, rows: Rows, left: Tensor) -> Tensor:
        """[R + 1, W] the blocks that have masks left, or that stay open without."""
        masks = left > 0
        return masks | (self._of_blocks(rows, rows.post) > 0) if self.terms.rule.post_edits else masks

    def _ended(self, rows: Rows, here: Tensor) -> Tensor:
        """[R + 1] whether an end token was seen, before or `here`; if it may be replaced, whether there is one."""
        if not self.terms.revises or self.terms.early:
            return rows.ended | here
        position = torch.arange(rows.capacity, device=here.device)
        until = rows.limit.minimum(rows.start + rows.ahead * self.terms.b)
        inside = (position >= rows.closing[:, None]) & (position < until[:, None])
        return (is_end(rows.text, rows.ends) & inside).any(-1)

    def _placed(
        self, rows: Rows, active: Tensor, pending: Tensor, served: int, slots: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rows that take a step, rows that only store; of each slot its row and its block, counted from the row's
        first unfinished one). Two blocks in flight, row 0 with both, row 1 with one and a finished one behind it:

            ahead  2 1    pending  0 1    served 3    slots 4
            row    0 0 1 1                in flight: row 0's two, row 1's one; then what row 1 has to store
            block  0 1 0 -1

        With slots = 3 nothing is left for storing: row 1 stores in the slot of its own (block -1), and takes no step.
        """
        nobody = rows.nobody
        ahead = torch.where(active, rows.ahead, 0)
        at = ahead.cumsum(0) - ahead
        on = active & (at + ahead <= served)
        behind = torch.where(on, pending, 0)
        turn = behind.cumsum(0) - behind
        storing = on & (behind > 0) & (turn + behind > slots - served)
        # a row's own slots are for its blocks in flight or, if it only stores, for its oldest blocks behind
        begin = torch.where(storing, -behind, 0)
        end = torch.where(storing, (ahead - behind).clamp_max(0), torch.where(on, ahead, 0))
        block = torch.arange(-self.flying, self.flying, device=at.device).expand(nobody + 1, -1)
        at, turn, behind, begin, end = (value[:, None] for value in (at, turn, behind, begin, end))
        aside = (block >= -behind) & (block < begin)
        place = torch.where(aside, served + turn + block + behind, slots)
        place = torch.where((block >= begin) & (block < end), at + block - begin, place).flatten()
        none = torch.zeros(slots + 1, dtype=torch.long, device=place.device)
        row = (none + nobody).scatter(0, place, rows.number[:, None].expand_as(block).flatten())
        return on & ~storing, storing, row[:slots], none.scatter(0, place, block.flatten())[:slots]


def source(position: Tensor, inside: Tensor, shift: int) -> Tensor:
    """Where in its slot the output is that predicts each position; a text's first one is predicted by its own."""
    return torch.where(position < shift, inside, inside - shift)
