"""The rows of a running batch as tensors, and what every step does to them: no word of it needs the host.

A row holds its whole text, prompt and masks, and how far it is. What a pass computes of the rows is a window's choice
(`rcd.engine.blocks`, `rcd.engine.canvas`); it asks about blocks of b tokens, each with a state of its own. When a block
is settled the row moves on by itself. A row that has ended waits, idle, for the host.
Shapes: R rows and one more that is nobody's, T positions, J blocks of a row that a window looks at, N slots of Q
tokens, P blocks that a pass predicts, b block length, K states of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rcd.carry.base import Carry, CarryState, TensorState
from rcd.decode.config import DecodeConfig
from rcd.decode.step import Outcome
from rcd.decode.stopping import close, unsettled
from rcd.diffusion.noise import uniform_of
from rcd.engine.backbone import Slots
from rcd.models.lm import ModelSettings

REPORT = ("serial", "active", "due", "ahead", "masks", "step", "denoised", "stored", "broken", "started")
"""What the host is told of every row after a step."""


@dataclass
class Rows:
    text: Tensor
    """[R + 1, T] ids; masks behind what is decided."""
    start: Tensor
    """[R + 1] where the first unfinished block begins."""
    ahead: Tensor
    """[R + 1] blocks in flight, from that one on."""
    pending: Tensor
    """[R + 1] finished blocks before it that are still to be stored; of a canvas, 1 where the next pass reads all."""
    ended: Tensor
    """[R + 1] whether an end token was seen."""
    active: Tensor
    prompt: Tensor
    """[R + 1] the prompt's length."""
    limit: Tensor
    """[R + 1] the first position behind the answer."""
    denoised: Tensor
    """[R + 1] denoising steps, from the beginning."""
    stored: Tensor
    """[R + 1] passes that could only store blocks, for want of a slot."""
    broken: Tensor
    """[R + 1] the denoising step whose logits were no numbers, 0 if none."""
    serial: Tensor
    """[R + 1] which request the row serves."""
    seed: Tensor
    """[R + 1] what its tokens are drawn by."""
    fresh: Tensor
    """[R + 1] whether the newest block's first pass, which only predicts, is still to come."""
    started: Tensor
    """[R + 1] such passes."""
    step: Tensor
    """[(R + 1) K] steps of a block since it must make progress."""
    carry: CarryState
    """Of [(R + 1) K, b]."""

    @classmethod
    def empty(cls, rows: int, states: int, capacity: int, mask: int, carry: CarryState, device: torch.device) -> Rows:
        made: dict[str, Any] = {
            field.name: torch.zeros(rows + 1, dtype=torch.long, device=device) for field in fields(cls)
        }
        made["text"] = torch.full((rows + 1, capacity), mask, dtype=torch.long, device=device)
        made["step"] = torch.zeros((rows + 1) * states, dtype=torch.long, device=device)
        for name in ("active", "ended", "fresh"):
            made[name] = made[name].bool()
        return cls(**{**made, "serial": made["serial"] - 1, "carry": carry})

    def enter(self, row: int, ids: Tensor, mask: int, **values: int) -> None:
        """Write a request into a row, which is active from here on; what is not named is 0."""
        self.text[row].fill_(mask)
        self.text[row, : len(ids)] = ids
        for field in fields(self):
            if field.name not in ("text", "step", "carry"):
                getattr(self, field.name)[row].fill_(values.get(field.name, 0))
        states = len(self.step) // len(self.active)
        own = slice(row * states, (row + 1) * states)
        for state in (self.step, *(self.carry._tensors() if isinstance(self.carry, TensorState) else ())):
            state[own].zero_()
        self.active[row].fill_(True)

    @property
    def nobody(self) -> int:
        return self.active.shape[0] - 1

    @property
    def capacity(self) -> int:
        return self.text.shape[1]

    @property
    def number(self) -> Tensor:
        return torch.arange(self.nobody + 1, device=self.active.device)


@dataclass(frozen=True)
class Terms:
    """What stays the same over an engine's life."""

    config: DecodeConfig
    carry: Carry
    model: ModelSettings

    @property
    def b(self) -> int:
        assert self.config.block_length is not None
        return self.config.block_length

    @property
    def starts(self) -> bool:
        """Whether a carry begins with a pass that only predicts."""
        return bool(getattr(self.carry, "starts_itself", False))

    def unsettled(self, ids: Tensor, masked: Tensor, output: Tensor) -> Tensor:
        return unsettled(ids, masked, output, self.model.eos_token_ids, self.config.eos_early_stop)


@dataclass(frozen=True)
class Seen:
    """J consecutive blocks of every row, as they were before the pass."""

    row: Tensor
    """[R + 1, J b] where each position is: nobody's row if it is behind the row's end."""
    position: Tensor
    ids: Tensor
    output: Tensor
    """Positions of the answer."""
    masked: Tensor
    needed: Tensor
    """The masks that must still be decoded."""

    @classmethod
    def of(cls, rows: Rows, first: Tensor, count: int, terms: Terms, filler: bool) -> Seen:
        """`filler`: masks behind the answer's end count as masks."""
        position = first[:, None] + torch.arange(count * terms.b, device=first.device)
        inside = position < rows.capacity
        row = torch.where(inside, rows.number[:, None], rows.nobody)
        position = torch.where(inside, position, 0)
        ids = rows.text[row, position]
        output = inside & (position >= rows.prompt[:, None]) & (position < rows.limit[:, None])
        masked = (ids == terms.model.mask_token_id) & (inside if filler else output)
        return cls(row, position, ids, output, masked, terms.unsettled(ids, masked, output))


@dataclass(frozen=True)
class Pass:
    """What a pass computes, and what is asked of the blocks that it predicts."""

    ids: Tensor
    """[N, Q]"""
    slots: Slots
    seen: Seen
    took: Tensor
    """[R + 1] the rows that take a denoising step."""
    starting: Tensor
    """[R + 1] the rows whose pass only predicts, plain masks, for the carry to start from."""
    storing: Tensor
    """[R + 1] the rows that only store blocks, since no other slot was free."""
    row: Tensor
    """[P] whose block it is; nobody's where nothing is asked."""
    block: Tensor
    """[P] its number among those seen."""
    state: Tensor
    """[P] where its step and its carry are kept."""
    masked: Tensor
    """[P, b]"""
    candidates: Tensor
    inject: Tensor
    quota: Tensor
    """[P]"""
    noise: Tensor | None
    """[P, b] what tokens are drawn by, if they are."""
    held: Tensor | None = None
    """[P] blocks whose carry stays as it is, since another one of their row starts."""

    @property
    def going(self) -> Tensor:
        """[R + 1]"""
        return self.took | self.starting

    def spread(self, values: Tensor, own: Tensor) -> Tensor:
        """[R + 1, J b] with the predicted blocks' values replaced."""
        apart = values.unflatten(1, (-1, own.shape[1]))
        return apart.index_put((self.row, self.block), own.to(values.dtype)).flatten(1)


def picked(values: Tensor, row: Tensor, block: Tensor, block_length: int) -> Tensor:
    return values.unflatten(1, (-1, block_length))[row, block]


def drawn_by(rows: Rows, seen: Seen, row: Tensor, block: Tensor, terms: Terms) -> Tensor | None:
    """[P, b] U[0, 1) of the row's seed, the number of its step and the position alone; None where nothing is drawn."""
    if terms.config.temperature == 0.0:
        return None
    return uniform_of(rows.seed[row][:, None], rows.denoised[row][:, None], picked(seen.position, row, block, terms.b))


def broken(rows: Rows, made: Pass, outcome: Outcome) -> Tensor:
    """[R + 1] the rows whose logits were no numbers."""
    theirs = made.row == rows.number[:, None]  # compared, not added up: that would be a sort and ten kernels more
    return made.going & (theirs & ~outcome.finite).any(1)


def write(rows: Rows, made: Pass, outcome: Outcome, terms: Terms) -> tuple[Tensor, Tensor]:
    """Commit, and close the masks behind an end token; in place. Returns (ids, masked) of what is seen."""
    seen, eos = made.seen, terms.model.eos_token_ids
    token = made.spread(seen.ids, outcome.token)
    committed = made.spread(torch.zeros_like(seen.masked), outcome.committed)
    ids, masked = torch.where(committed, token, seen.ids), seen.masked & ~committed
    ids, masked = close(ids, masked, token, seen.output, eos, terms.config.eos_early_stop)
    rows.text[seen.row, seen.position] = ids
    return ids, masked


def hand_on(rows: Rows, made: Pass, after: CarryState, keep: Tensor) -> None:
    """The steps and the carry go on in the blocks `keep` [P]; elsewhere they are nothing, as at a block's beginning."""
    rows.step[made.state] = torch.where(keep, rows.step[made.state] + (made.quota > 0), 0)
    if not isinstance(after, TensorState) or not isinstance(rows.carry, TensorState):
        return
    for kept, new in zip(rows.carry._tensors(), after._tensors(), strict=True):
        shape = (-1, *([1] * (new.dim() - 1)))
        value = torch.where(keep.view(shape), new.to(kept.dtype), 0)
        kept[made.state] = value if made.held is None else torch.where(made.held.view(shape), kept[made.state], value)


def move(rows: Rows, took: Tensor, **values: Tensor) -> None:
    """New values of the rows that took a step; in place."""
    for name, value in values.items():
        old = getattr(rows, name)
        old.copy_(torch.where(took, value, old))


def finish(rows: Rows, made: Pass, done: Tensor, bad: Tensor) -> None:
    """Count the step, and end the rows that are done or broken; in place."""
    rows.denoised.add_(made.took)
    rows.started.add_(made.starting)
    step = torch.where(bad, rows.denoised + made.starting, rows.broken)
    move(rows, made.going, broken=step, active=rows.active & ~done & ~bad, fresh=rows.fresh & made.took)


def report(rows: Rows, **told: Tensor) -> Tensor:
    """[R + 1, len(REPORT)]"""
    columns = [told[name] if name in told else getattr(rows, name) for name in REPORT]
    return torch.stack([value.long() for value in columns], dim=1)


def trace(rows: Rows, made: Pass, outcome: Outcome, terms: Terms) -> tuple[Tensor, ...]:
    """What a Step event needs of the rows that took the step, of all blocks that are seen."""
    seen, nothing = made.seen, torch.zeros_like(made.seen.masked)
    asked = made.spread(nothing, made.masked)
    after = rows.text[seen.row, seen.position]
    draft = torch.where(asked, made.spread(seen.ids, outcome.token), after)
    committed = made.spread(nothing, outcome.committed)
    confidence = made.spread(nothing.float(), outcome.confidence.float()).masked_fill(~asked, float("nan"))
    alpha = outcome.state.alpha
    shown = nothing.float() if alpha is None else made.spread(nothing.float(), alpha.float())
    left = after == terms.model.mask_token_id
    return made.took, seen.position[:, 0], draft, committed, left, confidence, shown
