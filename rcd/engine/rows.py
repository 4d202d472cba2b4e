"""The rows of a running batch as tensors, and what a step does to them: no word of it needs the host.

A row holds its whole text, prompt and masks, and the position of its current block. When a block is settled the row
moves on by itself: the next block is current, the finished one `pending`, to be stored by the next pass, beside the
next block's first step. A row that has ended waits, idle, for the host.
Shapes: R rows and one more that is nobody's, T positions, A rows that a pass serves, N >= A slots, b block length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rcd.carry.base import Carry, CarryState, TensorState, places
from rcd.decode.config import DecodeConfig
from rcd.decode.step import Outcome
from rcd.decode.stopping import close, is_end, unsettled
from rcd.diffusion.commit import quota
from rcd.diffusion.noise import uniform_of
from rcd.engine.backbone import Slots

REPORT = ("serial", "active", "pending", "masks", "denoised", "stored", "broken", "started")
"""What the host is told of every row after a step."""


@dataclass
class Rows:
    text: Tensor
    """[R + 1, T] ids; masks behind what is decided."""
    start: Tensor
    """[R + 1] where the current block begins."""
    pending: Tensor
    """[R + 1] whether the block before it is still to be stored."""
    active: Tensor
    prompt: Tensor
    """[R + 1] the prompt's length."""
    limit: Tensor
    """[R + 1] the first position behind the answer."""
    step: Tensor
    """[R + 1] steps taken in the current block."""
    denoised: Tensor
    """[R + 1] denoising steps, from the beginning."""
    stored: Tensor
    """[R + 1] passes that could only store a block, for want of a slot."""
    broken: Tensor
    """[R + 1] the denoising step whose logits were no numbers, 0 if none."""
    serial: Tensor
    """[R + 1] which request the row serves."""
    seed: Tensor
    """[R + 1] what its tokens are drawn by."""
    fresh: Tensor
    """[R + 1] whether the current block's first pass, which only predicts, is still to come."""
    started: Tensor
    """[R + 1] such passes."""
    carry: CarryState

    @classmethod
    def empty(cls, rows: int, capacity: int, mask: int, carry: CarryState, device: torch.device) -> Rows:
        def whole(value: int = 0) -> Tensor:
            return torch.full((rows + 1,), value, dtype=torch.long, device=device)

        def flags() -> Tensor:
            return torch.zeros(rows + 1, dtype=torch.bool, device=device)

        text = torch.full((rows + 1, capacity), mask, dtype=torch.long, device=device)
        return cls(
            text, whole(), flags(), flags(), whole(), whole(), whole(), whole(), whole(), whole(), whole(-1), whole(),
            flags(), whole(), carry,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Which slots a pass computes."""

    row: Tensor
    """[N]; the first A are the rows served, the others store finished blocks."""
    start: Tensor
    """[N]"""
    storing: Tensor
    """[A] rows whose own slot must store the finished block, since no other slot was free."""

    def slots(self, block_length: int) -> Slots:
        end = (self.start + block_length)[:, None].expand(-1, block_length)
        many = self.row.is_cuda and len(self.row) > len(self.storing) >= 16
        order = self.row.argsort(stable=True).int() if many else None
        return Slots(self.row.int(), self.start.int(), end.int().contiguous(), order)


def plan(rows: Rows, served: int, slots: int, block_length: int) -> Plan:
    """The active rows, in order, get a slot each; then the pending blocks, as long as there are slots."""
    spare, nobody = slots - served, rows.active.shape[0] - 1
    number = torch.arange(nobody + 1, device=rows.active.device)
    rank = rows.active.long().cumsum(0) - 1
    on = rows.active & (rank < served)
    waiting = on & rows.pending
    turn = waiting.long().cumsum(0) - 1
    aside = waiting & (turn < spare)
    start = torch.where(waiting & ~aside, rows.start - block_length, rows.start)
    place = torch.where(on, rank, slots)
    row = torch.full((slots + 1,), nobody, device=number.device).scatter(0, place, number)
    at = torch.zeros_like(row).scatter(0, place, start)
    place = torch.where(aside, served + turn, slots)
    row = row.scatter(0, place, torch.where(aside, number, nobody))
    at = at.scatter(0, place, torch.where(aside, rows.start - block_length, 0))
    row, at = row[:slots], at[:slots]
    at = torch.where(row == nobody, 0, at)
    return Plan(row, at, (waiting & ~aside)[row[:served]])


def plan_canvas(rows: Rows, served: int, whole: bool) -> Plan:
    """Of a canvas: the rows that begin a block, and read all of it; or the others, with their block alone."""
    nobody = rows.active.shape[0] - 1
    number = torch.arange(nobody + 1, device=rows.active.device)
    on = rows.active & (rows.pending == whole)
    rank = on.long().cumsum(0) - 1
    place = torch.where(on & (rank < served), rank, served)
    row = torch.full((served + 1,), nobody, device=number.device).scatter(0, place, number)[:served]
    off = (row == nobody) | (rows.pending[row] != whole)
    return Plan(row, torch.where(row == nobody, 0, rows.start[row]), off)


def canvas_slots(rows: Rows, made: Plan, block_length: int, whole: bool, length: int) -> Slots:
    """Everything up to the answer's end is seen; a whole canvas is one slot."""
    limit = rows.limit[made.row].clamp_min(1)[:, None]
    tokens = length if whole else block_length
    start = torch.zeros_like(made.start) if whole else made.start
    inner = torch.arange(block_length, device=start.device)
    places = made.start[:, None] + inner if whole else None
    return Slots(made.row.int(), start.int(), limit.expand(-1, tokens).int().contiguous(), None, places)


def prepared_canvas(
    rows: Rows, served: int, whole: bool, length: int, config: DecodeConfig, carry: Carry, mask: int,
    eos: tuple[int, ...],
) -> tuple[Plan, Ready, Slots, Tensor]:  # fmt: skip
    """(plan, what is asked, slots, the slots' ids)."""
    assert config.block_length is not None
    made = plan_canvas(rows, served, whole)
    given = ready(rows, made, config, carry, mask, eos)
    slots = canvas_slots(rows, made, config.block_length, whole, length)
    return made, given, slots, rows.text[made.row, :length] if whole else given.ids


@dataclass(frozen=True)
class Ready:
    """What the step function needs of the rows that a pass serves."""

    ids: Tensor
    """[N, b]"""
    output: Tensor
    """[A, b] positions of the answer."""
    masked: Tensor
    candidates: Tensor
    inject: Tensor
    quota: Tensor
    """[A]"""
    starting: Tensor
    """[A] rows whose pass only predicts, for the carry to start from."""
    noise: Tensor | None
    """[A, b] what tokens are drawn by, if they are."""


def ready(rows: Rows, made: Plan, config: DecodeConfig, carry: Carry, mask: int, eos: tuple[int, ...]) -> Ready:
    b, served = config.block_length, made.storing.shape[0]
    assert b is not None
    position = made.start[:, None] + torch.arange(b, device=made.start.device)
    ids = rows.text[made.row[:, None], position]
    row, position = made.row[:served], position[:served]
    output = (position >= rows.prompt[row][:, None]) & (position < rows.limit[row][:, None])
    going = (rows.active[row] & ~made.storing)[:, None]
    masked = (ids[:served] == mask) & going
    total = torch.full_like(row, b)
    if config.window != "blockwise":  # a canvas ends where the answer does, not with a whole block
        masked = masked & output
        total = (rows.limit[row] - made.start[:served]).clamp_max(b)
    candidates = unsettled(ids[:served], masked, output, eos, config.eos_early_stop)
    starting = rows.fresh[row] & going.squeeze(1)
    candidates = candidates & ~starting[:, None]
    least = quota(total, config.num_inference_steps or b, rows.step[row])
    noise = uniform_of(rows.seed[row][:, None], rows.denoised[row][:, None], position) if config.temperature else None
    return Ready(ids, output, masked, candidates, places(carry, masked) & going, least, starting, noise)


def prepared(
    rows: Rows, served: int, slots: int, config: DecodeConfig, carry: Carry, mask: int, eos: tuple[int, ...]
) -> tuple[Plan, Ready]:
    assert config.block_length is not None
    made = plan(rows, served, slots, config.block_length)
    return made, ready(rows, made, config, carry, mask, eos)


def settle(
    rows: Rows, made: Plan, given: Ready, outcome: Outcome, config: DecodeConfig, mask: int, eos: tuple[int, ...]
) -> Tensor:
    """Commit, move on where a block is settled, end where the text is; in place. Returns the rows' report
    [R + 1, len(REPORT)]."""
    b, served = config.block_length, made.storing.shape[0]
    assert b is not None
    row, start = made.row[:served], made.start[:served]
    live = given.candidates.any(-1)
    committed = outcome.committed & live[:, None]
    ids = torch.where(committed, outcome.token, given.ids[:served])
    masked = given.masked & ~committed
    ids, masked = close(ids, masked, outcome.token, given.output, eos, config.eos_early_stop)
    bad = (live | given.starting) & ~outcome.finite
    settled = live & ~unsettled(ids, masked, given.output, eos, config.eos_early_stop).any(-1)
    stops = config.eos_early_stop or config.window == "blockwise"
    ended = (is_end(ids, eos) & given.output & stops).any(-1) | (start + b >= rows.limit[row])
    done, onward = (settled & ended) | bad, settled & ~ended & ~bad

    rows.text[row[:, None], start[:, None] + torch.arange(b, device=start.device)] = ids
    active = rows.active[row]
    held = made.storing | given.starting
    rows.pending[row] = onward if config.window == "blockwise" else torch.where(held, rows.pending[row], onward)
    rows.fresh[row] = (onward & starts_itself(config)) | (rows.fresh[row] & ~given.starting)
    rows.started[row] += given.starting.long()
    if config.window == "blockwise":
        rows.stored[row] += made.storing.long()
    rows.start[row] = torch.where(onward, start + b, rows.start[row])
    rows.step[row] = torch.where(onward, 0, rows.step[row] + live.long())
    rows.denoised[row] += live.long()
    rows.broken[row] = torch.where(bad, rows.denoised[row] + given.starting, rows.broken[row])
    rows.active[row] = active & ~done
    _hand_on(rows, row, outcome.state, (live & ~settled) | given.starting, made.storing)
    left = torch.zeros_like(rows.start).index_copy(0, row, masked.sum(-1))
    told = (rows.serial, rows.active, rows.pending, left, rows.denoised, rows.stored, rows.broken, rows.started)
    return torch.stack([value.long() for value in told], dim=1)


def starts_itself(config: DecodeConfig) -> bool:
    """Whether a block begins with a pass that only predicts."""
    return bool(getattr(config.carry, "starts_itself", False))


def _hand_on(rows: Rows, row: Tensor, after: CarryState, keep: Tensor, hold: Tensor) -> None:
    """The carry's state goes on in the block, and is nothing at the beginning of the next one."""
    if not isinstance(after, TensorState) or not isinstance(rows.carry, TensorState):
        return
    for kept, new in zip(rows.carry._tensors(), after._tensors(), strict=True):
        shape = (-1, *([1] * (new.dim() - 1)))
        value = torch.where(keep.view(shape), new.to(kept.dtype), 0)
        kept[row] = torch.where(hold.view(shape), kept[row], value)
