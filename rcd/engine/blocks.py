"""The windows of block-causal attention, `blockwise` and `d2f`: the past is in the cache, and blocks are in flight.

`blockwise` is one block in flight, `d2f` several. Every unfinished block is a slot that is predicted; the finished ones
before them are stored by the next pass, in slots beside. A row for which no such slots are left stores first, in the
slots of its own, and takes its step in a later pass.
Shapes: as in `rcd.engine.rows`; W blocks in flight at most, J = K = W.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rcd.carry.base import places
from rcd.decode.d2f import another, decoded_share, least
from rcd.decode.lanes import prefill_piece
from rcd.decode.step import Outcome
from rcd.decode.stopping import is_end
from rcd.engine.backbone import Slots
from rcd.engine.requests import Serving, Size, rounded
from rcd.engine.rows import Pass, Rows, Seen, Terms, broken, drawn_by, finish, hand_on, move, picked, report, write


@dataclass(frozen=True)
class Blocks:
    terms: Terms

    @classmethod
    def of(cls, terms: Terms) -> Blocks:
        one = terms.config.window == "blockwise"
        return cls(replace(terms, config=replace(terms.config, blocks_in_flight=1)) if one else terms)

    @property
    def most(self) -> int:
        """Blocks in flight, W."""
        return self.terms.config.blocks_in_flight

    @property
    def absolute(self) -> bool:
        """Whether blocks begin at multiples of b, or at the prompt's end."""
        return self.terms.model.attention == "block_causal"

    @property
    def states(self) -> int:
        return self.most

    whole = False

    # -- the host's part -----------------------------------------------------------------------------------------

    def origin(self, prompt: int) -> int:
        """Where the first decoded block begins."""
        grid = self.terms.config.grid(self.terms.model)
        return prompt // grid * grid

    def room(self, capacity: int) -> int:
        """The last block is a whole one."""
        return capacity + (-capacity % self.terms.b if self.absolute else self.terms.b - 1)

    def needs(self, prompt: int, new: int) -> int:
        first = self.origin(prompt)
        return first - (first - prompt - new) // self.terms.b * self.terms.b

    def begin(self, prompt: int, new: int) -> dict[str, int]:
        return {"start": self.origin(prompt), "ahead": 1}

    def serving(self, prompt: int, new: int) -> dict[str, int]:
        first = self.origin(prompt)
        return {"left": first + self.terms.b - prompt, "ahead": min(2, self.most)}

    def prefill(self, prompt: int) -> Iterator[tuple[int, int, int]]:
        """(begin, end, tokens of a block): the passes that store what stands before the first decoded block. LLaDA's
        prompt is one block."""
        end = self.origin(prompt)
        unit = self.terms.b if self.absolute else end
        piece = prefill_piece(unit)
        for start in range(0, end, piece):
            yield start, min(start + piece, end), unit

    def must_hear(self, serving: Mapping[int, Serving], rate: float) -> bool:
        return False

    def next(self, serving: Mapping[int, Serving]) -> tuple[int, ...]:
        return tuple(serving)

    def size(self, serving: list[Serving], rows: int, rate: float) -> Size:
        """(slots that are predicted, all slots). There are as many of the first as the rows may have blocks in flight;
        of the others, for finished blocks, as rows will probably have finished one in the step still unheard of."""
        served = rounded(sum(one.ahead for one in serving), rows * self.most)
        likely = sum(one.left <= math.ceil(rate) for one in serving)
        extra = next(share for share in (0, -(-served // 4), -(-served // 2), served) if share >= min(likely, served))
        return served, served + extra

    def slots(self, size: Size) -> int:
        return size[1]

    def several(self, size: Size) -> bool:
        return size[1] >= 16 and (size[1] > size[0] or self.most > 1)

    # -- the device's part ---------------------------------------------------------------------------------------

    def prepared(self, rows: Rows, served: int, slots: int) -> Pass:
        """Every active row's blocks in flight get a slot each; then finished blocks, as long as there are slots."""
        b, seen = self.terms.b, Seen.of(rows, rows.start, self.most, self.terms, filler=True)
        took, storing, row, block = self._placed(rows, served, slots)
        starting = took & rows.fresh
        start = rows.start[row] + block * b
        ids = rows.text[row[:, None], start[:, None] + torch.arange(b, device=row.device)]
        own, going = row[:served], took[row[:served]]
        asked = torch.where(going, own, rows.nobody)
        at = torch.where(going, block[:served], 0)
        flying = self._flying(rows, seen.needed)
        quota = least(self._share(rows, seen, seen.needed), flying, self._steps(rows), self.terms.config)[asked, at]
        open_ = (flying[asked, at] & going)[:, None]
        masked = picked(seen.masked, asked, at, b) & going[:, None]
        state = asked * self.most + start[:served] // b % self.most
        plain = starting[asked]
        open_ = open_ & ~plain[:, None]
        candidates, inject = picked(seen.needed, asked, at, b) & open_, places(self.terms.carry, masked) & open_
        held = plain & (at + 1 < rows.ahead[asked]) if self.terms.starts and self.most > 1 else None
        end = (start + b)[:, None].expand(-1, b)
        return Pass(
            ids, Slots(row.int(), start.int(), end.int().contiguous()), seen, took & ~starting, starting, storing,
            asked, at, state, masked, candidates, inject, quota * (going & ~plain),
            drawn_by(rows, seen, asked, at, self.terms), held,
        )  # fmt: skip

    def settled(self, rows: Rows, made: Pass, outcome: Outcome) -> Tensor:
        """Commit, move on to the first unfinished block, add one behind the last, end where the text does; in place.
        Returns the report."""
        terms, took = self.terms, made.took
        ids, masked = write(rows, made, outcome, terms)
        needed = terms.unsettled(ids, masked, made.seen.output)
        flying = self._flying(rows, needed)
        hand_on(rows, made, outcome.state, flying[made.row, made.block] & made.going[made.row])
        first = (self._added(rows) & ~flying).long().cumprod(-1).sum(-1)
        left = self._left(needed).gather(1, first.clamp_max(self.most - 1)[:, None]).squeeze(1)
        left = torch.where(first < rows.ahead, left, terms.b)
        ended = rows.ended | (is_end(ids, terms.model.eos_token_ids) & made.seen.output).any(-1)
        more, last = self._more(rows, ended), (rows.ahead - 1).clamp_min(0)[:, None]
        share = self._share(rows, made.seen, needed).gather(1, last).squeeze(1)
        ahead = rows.ahead - first
        finish(rows, made, (ahead == 0) & ~more, broken(rows, made, outcome))
        move(rows, made.storing, pending=rows.pending - rows.ahead.minimum(rows.pending), stored=rows.stored + 1)
        added = another(share, ahead, more, terms.config)
        ahead, fresh = ahead + added.long(), added & terms.starts
        move(rows, made.starting, pending=torch.zeros_like(first))
        move(rows, took, start=rows.start + first * terms.b, pending=first, ahead=ahead, ended=ended, fresh=fresh)
        likely = (rows.ahead + self._more(rows, rows.ended)).clamp_max(self.most)
        return report(rows, due=torch.zeros_like(left), ahead=likely, masks=left, step=torch.zeros_like(left))

    def _left(self, needed: Tensor) -> Tensor:
        """[R + 1, W] masks left in each block."""
        return needed.unflatten(1, (self.most, -1)).sum(-1)

    def _added(self, rows: Rows) -> Tensor:
        """[R + 1, W]"""
        return torch.arange(self.most, device=rows.ahead.device) < rows.ahead[:, None]

    def _flying(self, rows: Rows, needed: Tensor) -> Tensor:
        """[R + 1, W] the blocks that were added and are open."""
        return (self._left(needed) > 0) & self._added(rows)

    def _more(self, rows: Rows, ended: Tensor) -> Tensor:
        """[R + 1] whether blocks are to come: some of the answer is behind those added, and no end token was seen."""
        return (rows.start + rows.ahead * self.terms.b < rows.limit) & ~ended

    def _share(self, rows: Rows, seen: Seen, needed: Tensor) -> Tensor:
        """[R + 1, W] the decoded part of each block's masks."""
        early = self.terms.config.eos_early_stop
        total = seen.output if early else seen.position >= rows.prompt[:, None]
        return decoded_share(self._left(total), self._left(needed))

    def _steps(self, rows: Rows) -> Tensor:
        """[R + 1, W] each block's steps: a block's state is at its number modulo W."""
        number = rows.start[:, None] // self.terms.b + torch.arange(self.most, device=rows.start.device)
        return rows.step.view(-1, self.most).gather(1, number % self.most)

    def _placed(self, rows: Rows, served: int, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rows that take a step, rows that only store; of each slot its row and its block, counted from the row's
        first unfinished one)."""
        nobody = rows.nobody
        ahead = torch.where(rows.active, rows.ahead, 0)
        at = ahead.cumsum(0) - ahead
        on = rows.active & (at + ahead <= served)
        behind = torch.where(on, rows.pending, 0)
        turn = behind.cumsum(0) - behind
        storing = on & (behind > 0) & (turn + behind > slots - served)
        block = torch.arange(-self.most, self.most, device=at.device).expand(nobody + 1, -1)
        at, ahead, behind, turn, hold = (value[:, None] for value in (at, ahead, behind, turn, storing))
        stored = (block >= -behind) & (block < (ahead - behind).clamp_max(0))
        own = torch.where(hold, stored, (block >= 0) & (block < ahead)) & on[:, None]
        aside = (block >= -behind) & (block < 0) & (on & ~storing)[:, None]
        place = torch.where(own, at + block + behind * hold, slots)
        place = torch.where(aside, served + turn + block + behind, place).flatten()
        none = torch.zeros(slots + 1, dtype=torch.long, device=place.device)
        row = (none + nobody).scatter(0, place, rows.number[:, None].expand_as(block).flatten())
        return on & ~storing, storing, row[:slots], none.scatter(0, place, block.flatten())[:slots]
