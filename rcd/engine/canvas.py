"""The cached windows of a bidirectional canvas, `prefix` and `dual`: a pass reads whole canvases, or a part of each.

A row that begins a block reads its whole canvas, as one slot, and so it does every `refresh_every` steps. In the passes
between, `dual` computes the block and `prefix` all blocks from there on, a slot each; the keys and values of the rest
stay as they were. Both see the canvas up to the answer's end.
Shapes: as in `rcd.engine.rows`; J = M blocks of an answer, A rows that a pass serves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rcd.carry.base import places
from rcd.carry.none import NoCarry
from rcd.decode.step import Outcome
from rcd.diffusion.commit import quota
from rcd.engine.backbone import Slots
from rcd.engine.requests import Serving, Size, rounded
from rcd.engine.rows import Pass, Rows, Seen, Terms, broken, drawn_by, finish, hand_on, move, picked, report, write
from rcd.errors import RCDError

WHOLE = 0


@dataclass(frozen=True)
class Canvas:
    terms: Terms

    @classmethod
    def of(cls, terms: Terms) -> Canvas:
        return cls(terms)

    @property
    def most(self) -> int:
        """Blocks of an answer, M."""
        return -(-self.terms.config.new_tokens // self.terms.b)

    @property
    def suffix(self) -> bool:
        return self.terms.config.window == "prefix"

    @property
    def carried(self) -> bool:
        """Whether every block of the canvas has a state, or the current one alone."""
        return self.terms.config.carry_scope == "canvas" and not isinstance(self.terms.carry, NoCarry)

    @property
    def states(self) -> int:
        return self.most if self.carried else 1

    @property
    def wide(self) -> bool:
        """Whether blocks other than the current one are predicted, too: for their carry; or where an end token closes
        them, is of several, and they are read again."""
        again = self.suffix or self.terms.config.refresh_every is not None
        return self.carried or (self.terms.config.eos_early_stop and len(self.terms.model.eos_token_ids) > 1 and again)

    whole = True

    # -- the host's part -----------------------------------------------------------------------------------------

    def room(self, capacity: int) -> int:
        """The answer's last block is a whole one."""
        return capacity + -self.terms.config.new_tokens % self.terms.b

    def needs(self, prompt: int, new: int) -> int:
        """Room for as many blocks as the engine's answers have."""
        if new > self.terms.config.new_tokens:
            raise RCDError(
                f"a request for {new} new tokens is more than the canvas has ({self.terms.config.new_tokens}); make "
                "the engine with a larger max_new_tokens."
            )
        return prompt + self.most * self.terms.b

    def begin(self, prompt: int, new: int) -> dict[str, int]:
        return {"start": prompt, "ahead": 1, "pending": 1}

    def serving(self, prompt: int, new: int) -> dict[str, int]:
        return {"left": self.terms.b, "ahead": -(-new // self.terms.b), "due": 1}

    def prefill(self, prompt: int) -> Iterator[tuple[int, int, int]]:
        return iter(())

    def must_hear(self, serving: Mapping[int, Serving], rate: float) -> bool:
        """Whether a row may have become due in a step that is still unheard of. What comes next is then another kind of
        pass, and the host waits; at most once a block and row, and once for every refresh."""
        every = self.terms.config.refresh_every
        return any(
            one.due or one.left <= math.ceil(rate) or (every is not None and (one.step + 1) % every == 0)
            for one in serving.values()
        )

    def next(self, serving: Mapping[int, Serving]) -> tuple[int, ...]:
        """Those that read all of their canvas, if there are any."""
        due = tuple(row for row, one in serving.items() if one.due)
        return due or tuple(serving)

    def size(self, serving: list[Serving], rows: int, rate: float) -> Size:
        """(rows served, WHOLE or the blocks of a part)."""
        served = rounded(len(serving), rows)
        if serving[0].due:
            return served, WHOLE
        return served, rounded(max(one.ahead for one in serving), self.most) if self.suffix else 1

    def slots(self, size: Size) -> int:
        return size[0] * max(1, size[1])

    def several(self, size: Size) -> bool:
        return size[1] > 1

    # -- the device's part ---------------------------------------------------------------------------------------

    def prepared(self, rows: Rows, served: int, part: int) -> Pass:
        b, seen = self.terms.b, Seen.of(rows, rows.prompt, self.most, self.terms, filler=False)
        took, row = self._served(rows, served, part)
        starting = took & rows.fresh
        current = self._current(rows)
        asked, at = self._asked(rows, row, current, part)
        here = (at == current[asked]) & (asked < rows.nobody)
        scope = (asked < rows.nobody) if self.carried else here
        state = asked * self.states + at if self.carried else torch.where(here, asked, rows.nobody)
        masked = picked(seen.masked, asked, at, b)
        here, scope = here & ~starting[asked], scope & ~starting[asked]
        inject = places(self.terms.carry, masked) & picked(seen.output, asked, at, b) & scope[:, None]
        total = (rows.limit - rows.start)[asked].clamp_max(b)
        least = quota(total, self.terms.config.num_inference_steps or b, rows.step[state]) * here
        made = self._whole(rows, row) if part == WHOLE else self._part(rows, row, current, part)
        slots, ids = self._shifted(*made, len(row), len(asked)) if self.terms.model.shift else made
        candidates = picked(seen.needed, asked, at, b) & here[:, None]
        return Pass(
            ids, slots, seen, took & ~starting, starting, torch.zeros_like(took), asked, at, state, masked, candidates,
            inject, least, drawn_by(rows, seen, asked, at, self.terms),
        )  # fmt: skip

    def settled(self, rows: Rows, made: Pass, outcome: Outcome) -> Tensor:
        """Commit, move on to the leftmost block with a mask that matters, end where there is none; in place. Returns
        the report."""
        terms, took, every = self.terms, made.took, self.terms.config.refresh_every
        ids, masked = write(rows, made, outcome, terms)
        needed = terms.unsettled(ids, masked, made.seen.output).unflatten(1, (self.most, -1)).any(-1)
        first = torch.where(needed, torch.arange(self.most, device=took.device), self.most).amin(-1)
        moved, block = first != self._current(rows), first.clamp_max(self.most - 1)
        keep = made.going[made.row] & (self.carried | ~moved[made.row])
        hand_on(rows, made, outcome.state, keep)
        step = rows.step[rows.number * self.states + (block if self.carried else 0)]
        due = moved | (step % every == 0) if every is not None else moved
        finish(rows, made, first == self.most, broken(rows, made, outcome))
        fresh = moved & (terms.starts and not self.carried)
        move(rows, took, start=rows.prompt + block * terms.b, pending=due.long(), fresh=fresh)
        left = masked.unflatten(1, (self.most, -1)).sum(-1).gather(1, block[:, None]).squeeze(1)
        ahead = (rows.limit - rows.start + terms.b - 1) // terms.b
        return report(rows, due=rows.pending, ahead=ahead, masks=left, step=step)

    def _current(self, rows: Rows) -> Tensor:
        """[R + 1] the number of each row's block."""
        return (rows.start - rows.prompt) // self.terms.b

    def _served(self, rows: Rows, served: int, part: int) -> tuple[Tensor, Tensor]:
        """(the rows that take a step [R + 1], the same as numbers [A]): those whose turn for such a pass it is."""
        on = rows.active & (rows.pending == int(part == WHOLE))
        rank = on.long().cumsum(0) - 1
        on = on & (rank < served)
        row = torch.full((served + 1,), rows.nobody, device=rank.device)
        return on, row.scatter(0, torch.where(on, rank, served), rows.number)[:served]

    def _asked(self, rows: Rows, row: Tensor, current: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """Of each predicted block its row, nobody's behind the answer, and its number: the current blocks of all rows,
        then the second ones."""
        count = 1 if not self.wide else self.most if part == WHOLE else part
        first = torch.zeros_like(row) if part == WHOLE and self.wide else current[row]
        return self._blocks(rows, row, first, count)

    def _blocks(self, rows: Rows, row: Tensor, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
        block = (first + torch.arange(count, device=row.device)[:, None]).flatten()
        row = row.repeat(count)
        there = rows.prompt[row] + block * self.terms.b < rows.limit[row]
        return torch.where(there, row, rows.nobody), torch.where(there, block, 0)

    def _part(self, rows: Rows, row: Tensor, current: Tensor, count: int) -> tuple[Slots, Tensor]:
        """(slots, ids): so many blocks of every row, from its current one on; each with the token left of it, which
        only looks, where that predicts its first position (Dream's shift)."""
        row, block = self._blocks(rows, row, current[row], count)
        left = self.terms.model.shift
        start = (rows.prompt[row] + block * self.terms.b - left).clamp_min(0)
        end = rows.limit[row].clamp_min(1)[:, None].expand(-1, self.terms.b + left)
        position = start[:, None] + torch.arange(self.terms.b + left, device=start.device)
        slots = Slots(row.int(), start.int(), end.int().contiguous(), looking=left)
        return slots, rows.text[row[:, None], position]

    def _whole(self, rows: Rows, row: Tensor) -> tuple[Slots, Tensor]:
        """(slots, ids): every row from its first token to its end, and where in it the predicted blocks are."""
        end = rows.limit[row].clamp_min(1)[:, None].expand(-1, rows.capacity)
        first = rows.prompt[row] if self.wide else rows.start[row]
        block = torch.arange(self.most if self.wide else 1, device=row.device)[:, None]
        inside = torch.arange(self.terms.b, device=row.device)
        at = (first + block * self.terms.b).flatten()[:, None] + inside
        return Slots(row.int(), torch.zeros_like(row).int(), end.int().contiguous(), None, at), rows.text[row]

    def _shifted(self, slots: Slots, ids: Tensor, served: int, asked: int) -> tuple[Slots, Tensor]:
        """The same where outputs predict the next position. In a part, the one before a row's second block is the last
        of its first one: what looks there knows no carry."""
        shift, number = self.terms.model.shift, torch.arange(asked, device=ids.device)[:, None]
        if slots.places is not None:
            return replace(slots, sources=(number % served, (slots.places - shift).clamp_min(0))), ids
        places = torch.arange(shift, self.terms.b + shift, device=ids.device).expand(asked, -1)
        inner = (places - shift < shift) & (number >= served)
        slot = torch.where(inner, number - served, number)
        source = torch.where(inner, places - shift + self.terms.b, places - shift)
        return replace(slots, places=places, sources=(slot, source)), ids
