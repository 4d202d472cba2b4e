"""The rows of a running batch as tensors, and what every step does to them: all of it runs without host syncs.

A row holds its whole text, prompt and masks, how far it is, and the settings of its request. What a pass computes of
the rows is a window's choice (`rcd.decode.blocks`, `rcd.decode.canvas`); it asks about blocks of b tokens, each with a
state of its own. When a block is settled the row moves on by itself. A row that has ended waits, idle, for the host.
Shapes: R rows and one more that is nobody's, T positions, J blocks of a row that a window looks at, N slots of Q
tokens, P blocks that a pass predicts, b block length, K states of a row, E end tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rcd.carry.base import CarryState
from rcd.decode.choice import ChoiceInputs, choice_noise
from rcd.decode.request_settings import MOST_STOP_IDS
from rcd.decode.requests import RowReport
from rcd.decode.slots import Slots
from rcd.decode.step import Open, Outcome, StepInputs, StepSettings
from rcd.decode.stopping import revisable, settle, unsettled
from rcd.decode.terms import Features, Terms
from rcd.diffusion.noise import uniform_of
from rcd.diffusion.rule import RULE_SETTINGS
from rcd.kernels.plain import run_of

FRACTIONS = (*RULE_SETTINGS, "temperature", "top_p", "scale", "guidance")
"""Settings of a request that are fractions."""


@dataclass
class Rows:
    text: Tensor
    """[R + 1, T] ids; masks behind what is decided."""
    given: Tensor
    """[R + 1, T] booleans: tokens of the answer that its canvas gives."""
    start: Tensor
    """[R + 1] where the first unfinished block begins."""
    ahead: Tensor
    """[R + 1] blocks in flight, from that one on."""
    pending: Tensor
    """[R + 1] finished blocks before it that are still to be stored; of a canvas, 1 where the next pass reads all."""
    referred: Tensor
    """[R + 1] the same of the reference's cache, which is behind when the reference was not asked for a while."""
    ended: Tensor
    """[R + 1] whether an end token was seen."""
    active: Tensor
    prompt: Tensor
    """[R + 1] the prompt's length."""
    limit: Tensor
    """[R + 1] the first position behind the answer."""
    closing: Tensor
    """[R + 1] from here on an end token ends the text: the answer's first position, or its last given token's."""
    until: Tensor
    """[R + 1] where no further block is added: the answer's end, or a block that is given and still to be read."""
    total: Tensor
    """[R + 1] of a canvas: masks of the current block when it was entered."""
    denoised: Tensor
    """[R + 1] denoising steps, from the beginning."""
    stored: Tensor
    """[R + 1] finished blocks that were stored for the next one's sake."""
    broken: Tensor
    """[R + 1] the denoising step whose logits were no numbers, 0 if none; negative: the reference's were."""
    serial: Tensor
    """[R + 1] which request the row serves."""
    seed: Tensor
    """[R + 1] what its tokens are drawn by."""
    part: Tensor
    """[R + 1] whether the next pass computes the current sub-block alone."""
    fresh: Tensor
    """[R + 1] whether the newest block's carry has still to start, by more than being nothing."""
    steps: Tensor
    """[R + 1] at most so many steps a block; 0: as many as it has positions."""
    top_k: Tensor
    threshold: Tensor
    factor: Tensor
    entropy_bound: Tensor
    kl_threshold: Tensor
    edit_threshold: Tensor
    max_post_steps: Tensor
    alg_temp: Tensor
    temperature: Tensor
    top_p: Tensor
    scale: Tensor
    """[R + 1] of the residual."""
    guidance: Tensor
    ends: Tensor
    """[R + 1, E] end and stop tokens, filled up with -1."""
    step: Tensor
    """[(R + 1) K] steps of a block since it must make progress."""
    post: Tensor
    """[(R + 1) K] steps that a block without masks may still take."""
    memory: tuple[Tensor, ...]
    """Of [(R + 1) K, b]: what the commit rule remembers."""
    carry: CarryState
    """Of [(R + 1) K, b]."""

    @classmethod
    def empty(
        cls, rows: int, states: int, capacity: int, terms: Terms, carry: CarryState, memory: tuple[Tensor, ...],
        wide: torch.dtype,
    ) -> Rows:  # fmt: skip
        device, mask = terms.device, terms.model.mask_token_id
        made: dict[str, Any] = {
            field.name: torch.zeros(rows + 1, dtype=torch.long, device=device) for field in fields(cls)
        }
        made["text"] = torch.full((rows + 1, capacity), mask, dtype=torch.long, device=device)
        made |= {name: made["active"].new_zeros((rows + 1) * states) for name in ("step", "post")}
        width = len(terms.model.eos_token_ids) + MOST_STOP_IDS
        made["ends"] = torch.full((rows + 1, width), -1, dtype=torch.long, device=device)
        made["given"] = torch.zeros(rows + 1, capacity, dtype=torch.bool, device=device)
        made |= {name: made[name].bool() for name in ("active", "ended", "fresh", "part")}
        made |= {name: made[name].to(wide) for name in FRACTIONS}
        return cls(**{**made, "serial": made["serial"] - 1, "carry": carry, "memory": memory})

    def enter(self, row: int, ids: Tensor, ends: list[int], mask: int, **values: float) -> None:
        """Write a request into a row, which is active when its prompt is read; what is not named is 0. `ids`: prompt
        and canvas."""
        self.text[row].fill_(mask)
        self.text[row, : len(ids)] = ids
        self.given[row].fill_(False)
        if len(ids) > values["prompt"]:
            behind = slice(int(values["prompt"]), len(ids))
            self.given[row, behind] = ids[behind] != mask
        self.ends[row].fill_(-1)
        self.ends[row, : len(ends)] = torch.tensor(ends, dtype=torch.long).to(self.ends.device)
        for field in fields(self):
            if field.name not in ("text", "given", "step", "post", "carry", "memory", "ends"):
                getattr(self, field.name)[row].fill_(values.get(field.name, 0))
        states = len(self.step) // len(self.active)
        own = slice(row * states, (row + 1) * states)
        for state in (self.step, self.post, *self.carry.tensors(), *self.memory):
            state[own].zero_()

    def resume(self, row: int, **values: float) -> None:
        """Go on at other blocks, whose states are nothing; the row is active when what stands before them is read."""
        for name, value in values.items():
            getattr(self, name)[row].fill_(value)

    def leave(self, row: int) -> None:
        """The row is free; what is in flight for it does nothing."""
        self.active[row].fill_(False)
        self.serial[row].fill_(-1)

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
class Region:
    """J consecutive blocks of every row, as they were before the pass."""

    row: Tensor
    """[R + 1, J b] where each position is: nobody's row if it is behind the row's end."""
    position: Tensor
    ids: Tensor
    output: Tensor
    """Positions of the answer."""
    ending: Tensor
    """Those of them where an end token ends the text."""
    masked: Tensor
    needed: Tensor
    """The masks that must still be decoded."""

    @classmethod
    def of(cls, rows: Rows, first: Tensor, count: int, terms: Terms, filler: bool) -> Region:
        """`filler`: masks behind the answer's end count as masks."""
        position = first[:, None] + torch.arange(count * terms.b, device=first.device)
        inside = position < rows.capacity
        row = torch.where(inside, rows.number[:, None], rows.nobody)
        position = torch.where(inside, position, 0)
        ids = rows.text[row, position]
        output = (position >= rows.prompt[:, None]) & (position < rows.limit[:, None])
        ending = output & (position >= rows.closing[:, None])
        masked = (ids == terms.model.mask_token_id) & (inside if filler else output)
        needed = unsettled(ids, masked, output, ending, rows.ends, terms.early)
        return cls(row, position, ids, output, ending, masked, needed)

    def given(self, rows: Rows) -> Tensor:
        """[R + 1, J b] what the canvas gives."""
        return rows.given[self.row, self.position]


@dataclass(frozen=True)
class Pass:
    """What a pass computes, and what a step may do with the blocks that it predicts."""

    ids: Tensor
    """[N, Q]"""
    slots: Slots
    seen: Region
    took: Tensor
    """[R + 1] the rows that take a denoising step."""
    storing: Tensor
    """[R + 1] the rows that only store blocks, since no other slot was free."""
    row: Tensor
    """[P] whose block it is; nobody's where nothing is predicted."""
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
    counts: Tensor
    """[P] whether the step is one of those over which the block is split."""
    share: Tensor | None = None
    """[P] of a rule that asks for it."""
    early: Tensor | None = None
    """[P] where a rule that remembers takes no prediction as stable yet."""

    @cached_property
    def where(self) -> Any:
        """`state` as an index; where it is a run, one that copies nothing. It asks the host."""
        return run_of(self.state.tolist())

    def spread(self, values: Tensor, own: Tensor) -> Tensor:
        """[R + 1, J b, ...] with the predicted blocks' values replaced."""
        apart = values.unflatten(1, (-1, own.shape[1]))
        return apart.index_put((self.row, self.block), own.to(values.dtype)).flatten(1, 2)

    def inputs(self, rows: Rows, terms: Terms, features: Features) -> StepInputs:
        """The same as a step takes it. Noise is U[0, 1) of the row's seed, the number of its step and the position
        alone."""
        row, rules, noise = self.row, terms.rules, None
        if features.draws or rules.draws:
            position = picked(self.seen.position, row, self.block, self.masked.shape[1])
            counters = rows.seed[row][:, None], rows.denoised[row][:, None], position
            noise = uniform_of(*counters) if features.draws else None
        settings = StepSettings(
            rule=tuple(getattr(rows, name)[row][:, None] for name in rules.rule.reads),
            temperature=rows.temperature[row][:, None] if features.draws else 0.0,
            top_k=rows.top_k[row][:, None] if features.top_k else 0, most_k=features.top_k, sorts=features.sorts,
            top_p=rows.top_p[row][:, None] if features.top_p else 1.0,
            scale=rows.scale[row] if features.scaled else None,
        )  # fmt: skip
        choice = ChoiceInputs(
            noise=choice_noise(*counters) if rules.draws else None, share=self.share, early=self.early,
            ids=picked(self.seen.ids, row, self.block, self.masked.shape[1]) if rules.rule.revises else None,
        )  # fmt: skip
        return StepInputs(self.masked, self.candidates, self.inject, self.quota, settings, noise, choice=choice)


def picked(values: Tensor, row: Tensor, block: Tensor, block_length: int) -> Tensor:
    return values.unflatten(1, (-1, block_length))[row, block]


def candidates_of(rows: Rows, seen: Region, terms: Terms) -> Tensor:
    """[R + 1, J b] what may be committed: masks that matter and, where the rule revises, tokens of the answer."""
    if not terms.revises:
        return seen.needed
    answer = seen.output & ~seen.given(rows)
    if not terms.early:  # what fills up the last block is decoded, and revised, like the rest
        answer |= (seen.position >= rows.limit[:, None]) & (seen.ids != terms.model.mask_token_id)
    return seen.needed | revisable(seen.ids, seen.masked, answer, rows.ends, terms.early)


def broken(rows: Rows, made: Pass, outcome: Outcome) -> Tensor:
    """[R + 1] the rows whose logits were no numbers."""
    theirs = made.row == rows.number[:, None]  # compared, not added up: that would be a sort and ten kernels more
    return made.took & (theirs & ~outcome.finite).any(1)


def write(rows: Rows, made: Pass, outcome: Outcome, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """Commit, and close the masks behind an end token; in place. Returns (ids, masked, needed) of what is seen."""
    seen = made.seen
    token = made.spread(seen.ids, outcome.token)
    committed = made.spread(torch.zeros_like(seen.masked), outcome.committed)
    ids, masked = torch.where(committed, token, seen.ids), seen.masked & ~committed
    ids, masked, needed = settle(
        ids, masked, token, seen.output, seen.ending, rows.ends, terms.early, len(terms.model.eos_token_ids)
    )
    rows.text[seen.row, seen.position] = ids
    return ids, masked, needed


def stay_open(rows: Rows, made: Pass, outcome: Outcome, left_P: Tensor, terms: Terms) -> None:
    """How many steps each predicted block, of which so many masks are left, may still take to replace tokens; in place.
    A block whose last mask this step has committed gets `max_post_steps`, one that has just been edited goes on."""
    b, seen = terms.b, made.seen
    had = picked(seen.needed, made.row, made.block, b).any(-1)
    changed = outcome.token != picked(seen.ids, made.row, made.block, b)
    edited = (outcome.committed & ~made.masked & changed).any(-1)
    most = torch.where(rows.edit_threshold < 1, rows.max_post_steps, 0)[made.row]
    more = torch.where(had, most, (rows.post[made.state] - 1) * edited)
    rows.post[made.state] = torch.where(left_P > 0, 0, more)


def hand_on(rows: Rows, made: Pass, outcome: Outcome, keep: Tensor) -> None:
    """The steps and the carry go on in the blocks `keep` [P]; elsewhere they are nothing, as at a block's beginning."""
    rows.step[made.state] = torch.where(keep, rows.step[made.state] + made.counts, 0)
    kept, new = [*rows.carry.tensors(), *rows.memory], [*outcome.state.tensors(), *outcome.memory]
    if not isinstance(outcome.places, Open):
        for old, value in zip(kept, new, strict=True):
            old[made.state] = torch.where(keep.view(-1, *([1] * (value.dim() - 1))), value.to(old.dtype), 0)
        return
    if not kept:
        return
    at, gone = outcome.places.within(made.where, made.state), None if all(keep.tolist()) else made.state[~keep]
    for old, value in zip(kept, new, strict=True):  # what was no mask may keep what it had: nothing enters there
        old.view(-1, *value.shape[1:]).index_copy_(0, at, value.to(old.dtype))
        if gone is not None:
            old[gone] = 0


def move(rows: Rows, took: Tensor, **values: Tensor) -> None:
    """New values of the rows that took a step; in place."""
    for name, value in values.items():
        old = getattr(rows, name)
        old.copy_(torch.where(took, value, old))


def finish(rows: Rows, made: Pass, done: Tensor, bad: Tensor) -> None:
    """Count the step, and end the rows that are done or broken; in place."""
    rows.denoised.add_(made.took)
    move(rows, made.took, broken=torch.where(bad, rows.denoised, rows.broken), active=rows.active & ~done & ~bad)


def report(rows: Rows, **values: Tensor) -> Tensor:
    """[R + 1, fields of RowReport]: the values given, the others as the rows have them."""
    columns = [values[name] if name in values else getattr(rows, name) for name in RowReport._fields]
    return torch.stack([value.long() for value in columns], dim=1)


def chosen(rows: Rows, on: Tensor, served: int) -> tuple[Tensor, Tensor]:
    """(the first so many of the rows `on` [R + 1], the same as numbers [A]; nobody's where there are fewer).

    on  . x . x x      rank  -1 0 0 1 2      served 2:  on  . x . x .      numbers  1 3
    """
    rank = on.long().cumsum(0) - 1
    on = on & (rank < served)
    row = torch.full((served + 1,), rows.nobody, device=rank.device)
    return on, row.scatter(0, torch.where(on, rank, served), rows.number)[:served]


def in_blocks(value: Tensor, b: int) -> Tensor:
    """[1, L, ...] as [blocks, b, ...], the last one filled up with 0."""
    short = -value.shape[1] % b
    widths = [0, 0] * (value.dim() - 2) + [0, short]
    return functional.pad(value, widths).unflatten(1, (-1, b)).squeeze(0)
