"""Faults planted in the engine, each a change of one function that the oracle does not call; the fuzz must catch them.

    python -m tests.equivalence.faults      # the first case that catches each

What belongs to both (a step's rules, noise, thresholds of blocks in flight) cannot be caught so; `tests/claims` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rcd.decode import blocks, canvas, rows, sub_blocks
from rcd.decode.blocks import Blocks
from rcd.decode.canvas import Canvas
from rcd.decode.engine import Engine
from rcd.decode.fused import FusedBackbone
from rcd.decode.guidance import Guided, Unconditional
from rcd.decode.model import SlotModel
from rcd.decode.requests import Serving
from rcd.decode.rows import Pass, Region, Rows
from rcd.decode.slots import Slots
from rcd.decode.step import Rules
from rcd.decode.stock import Place
from rcd.decode.sub_blocks import SubBlocks
from rcd.diffusion.noise import uniform_of
from rcd.residual.distribution import Distribution
from tests.equivalence import fuzz

Patch = pytest.MonkeyPatch


def wrapped(patch: Patch, where: Any, name: str, around: Callable[..., Any]) -> None:
    """`around` gets the function and its arguments."""
    real = getattr(where, name)
    patch.setattr(where, name, lambda *given, **named: around(real, *given, **named))


def entering(patch: Patch, change: Callable[[Rows, int, Callable[[], None]], None]) -> None:
    """`change` does what a row does when a request enters it."""

    def enter(real: Any, self: Rows, row: int, *given: Any, **values: Any) -> None:
        change(self, row, lambda: real(self, row, *given, **values))

    wrapped(patch, Rows, "enter", enter)


def stale_carry(patch: Patch) -> None:
    """A row is used again, and what the request before carried is still there."""

    def change(self: Rows, row: int, enter: Callable[[], None]) -> None:
        kept = [each.clone() for each in self.carry.tensors()]
        enter()
        for each, old in zip(self.carry.tensors(), kept, strict=True):
            each.copy_(old)

    entering(patch, change)


def stale_stop_ids(patch: Patch) -> None:
    """A row is used again, and the tokens that ended the request before end this one."""

    def change(self: Rows, row: int, enter: Callable[[], None]) -> None:
        old = self.ends[row].clone()
        enter()
        if (old >= 0).any():
            self.ends[row] = old

    entering(patch, change)


def stale_steps(patch: Patch) -> None:
    """A row is used again, and its blocks go on counting steps."""

    def change(self: Rows, row: int, enter: Callable[[], None]) -> None:
        old = self.step.clone()
        enter()
        self.step.copy_(old)

    entering(patch, change)


def swapped_seed(patch: Patch) -> None:
    """A request draws by the seed of the row's last one."""

    def change(self: Rows, row: int, enter: Callable[[], None]) -> None:
        old = self.seed[row].clone()
        enter()
        if int(old):
            self.seed[row] = old

    entering(patch, change)


def settings(patch: Patch, change: Callable[[Pass, Rows, Any], Any]) -> None:
    """`change` makes other settings of a step."""

    def inputs(real: Any, self: Pass, of: Rows, *given: Any) -> Any:
        found = real(self, of, *given)
        return replace(found, settings=change(self, of, found.settings))

    wrapped(patch, Pass, "inputs", inputs)


def neighbour(own: Pass, of: Rows) -> torch.Tensor:
    """The row beside each that a pass predicts for."""
    return (own.row + 1) % (of.nobody + 1)


def neighbours_threshold(patch: Patch) -> None:
    settings(patch, lambda own, of, k: replace(k, rule=(of.threshold[neighbour(own, of)][:, None], *k.rule[1:])))


def neighbours_temperature(patch: Patch) -> None:
    def change(own: Pass, of: Rows, k: Any) -> Any:
        drawn = isinstance(k.temperature, torch.Tensor)
        return replace(k, temperature=of.temperature[neighbour(own, of)][:, None]) if drawn else k

    settings(patch, change)


def wrong_scale(patch: Patch) -> None:
    """The residual's weight is left as it is."""
    settings(patch, lambda own, of, k: replace(k, scale=None))


def noise_of_another_step(patch: Patch) -> None:
    def inputs(real: Any, self: Pass, of: Rows, terms: Any, features: Any) -> Any:
        found = real(self, of, terms, features)
        if found.noise is None:
            return found
        place = rows.picked(self.seen.position, self.row, self.block, terms.b)
        noise = uniform_of(of.seed[self.row][:, None], of.denoised[self.row][:, None] + 1, place)
        return replace(found, noise=noise)

    wrapped(patch, Pass, "inputs", inputs)


def position_off_by_one(patch: Patch) -> None:
    """Of all tokens behind the third."""

    def turns(real: Any, self: FusedBackbone, capacity: int) -> Any:
        return tuple(torch.cat((each[:3], each[2:-1])) for each in real(self, capacity))

    def position(real: Any, self: Place, length: int, device: torch.device) -> torch.Tensor:
        found: torch.Tensor = real(self, length, device)
        return found - (found > 2).long()

    wrapped(patch, FusedBackbone, "turns", turns)
    wrapped(patch, Place, "position", position)


def ignored_t_res(patch: Patch) -> None:
    """The entropy is read at temperature 1."""

    def summarising(real: Any, self: Rules, *given: Any) -> Rules:
        made: Rules = real(self, *given)

        def at_one(*logits: Any) -> Any:
            read: Any = (made.summarise or Distribution)(*logits)
            entropy = read.entropy_at(1.0)
            read.entropy_at = lambda temperature: entropy
            return read

        reading: Any = at_one
        return replace(made, summarise=reading)

    wrapped(patch, Rules, "summarising", summarising)


def lost_piece(patch: Patch) -> None:
    """Pieces of a prompt behind the first are not read."""

    def plain(real: Any, self: SlotModel, ids: Any, slots: Slots, predicted: int = 0) -> Any:
        return None if not predicted and int(slots.start[0]) > 0 else real(self, ids, slots, predicted)

    wrapped(patch, SlotModel, "plain", plain)


def quota_off(patch: Patch) -> None:
    """The schedule's remainder comes a step early on a canvas."""

    def prepared(real: Any, self: Canvas, of: Rows, *size: Any) -> Pass:
        of.step.add_(1)
        try:
            return real(self, of, *size)
        finally:
            of.step.sub_(1)

    wrapped(patch, Canvas, "prepared", prepared)


def forgotten_shift(patch: Patch) -> None:
    """Dream's outputs predict their own positions."""

    def slots(real: Any, self: Canvas, *given: Any) -> Any:
        ids, made = real(self, *given)
        return ids, replace(made, sources=None)

    wrapped(patch, Canvas, "_slots", slots)


def forgotten_look(patch: Patch) -> None:
    """A block's outputs predict their own positions where they predict the next ones."""

    def slots(real: Any, self: Blocks, *given: Any, **named: Any) -> Any:
        ids, made = real(self, *given, **named)
        return ids, replace(made, sources=None)

    wrapped(patch, Blocks, "_slots", slots)


def forgotten_neighbour(patch: Patch) -> None:
    """A block's first position is predicted without what is carried in the block before it."""

    def slots(real: Any, self: Blocks, *given: Any, ordered: bool) -> Any:
        return real(self, *given, ordered=False)

    wrapped(patch, Blocks, "_slots", slots)


def block_never_read_again(patch: Patch) -> None:
    """A block is read whole by the step that enters it alone, whatever sub-block comes."""

    def move(real: Any, of: Rows, took: torch.Tensor, **values: torch.Tensor) -> None:
        if "part" in values:
            values["part"] = values["part"] | (of.part & (values["pending"] == 0))
        real(of, took, **values)

    wrapped(patch, sub_blocks, "move", move)


def unforgotten_sub_blocks(patch: Patch) -> None:
    """A block's state goes on in the next one where the last pass did not compute it."""
    patch.setattr(SubBlocks, "_forget", lambda self, *_: None)


def block_not_stored(patch: Patch) -> None:
    """The keys and values of a finished block stay those of its last step."""

    def placed(real: Any, self: Blocks, of: Rows, *given: Any) -> Any:
        took, storing, row, block = real(self, of, *given)
        return took, storing, torch.where(block < 0, of.nobody, row), block

    wrapped(patch, Blocks, "_placed", placed)


def carried_on(patch: Patch) -> None:
    """A finished block's state goes on in the next block that takes its place."""
    for room in (blocks, canvas, sub_blocks):
        wrapped(patch, room, "hand_on", lambda real, of, made, after, keep: real(of, made, after, keep | True))


def never_refreshed(patch: Patch) -> None:
    """A cached canvas is read whole at a block's start alone."""
    patch.setattr(Canvas, "every", property(lambda self: 1 if self.shared else None))


def guided_by_the_prompt(patch: Patch) -> None:
    """The second pass sees the prompt's tokens where they are read beforehand, and masks in the steps."""

    def plain_hidden(real: Any, self: Unconditional, ids: Any, slots: Slots, predicted: int) -> Any:
        hidden = self.backbone(self.model.embed(ids), slots, self.cache)
        chosen: Any = slots.sources or slots.places or slice(predicted)
        return hidden[chosen]

    wrapped(patch, Unconditional, "plain_hidden", plain_hidden)


def guided_to_the_block(patch: Patch) -> None:
    """The second pass masks one token less than the prompt has."""

    def own(real: Any, self: Unconditional, ids: Any, slots: Slots) -> Any:
        assert self.rows is not None
        self.rows.prompt.sub_(1)
        try:
            return real(self, ids, slots)
        finally:
            self.rows.prompt.add_(1)

    wrapped(patch, Unconditional, "_own", own)


def neighbours_guidance(patch: Patch) -> None:
    def scale(real: Any, self: Guided, *given: Any) -> Any:
        own = self.rows.guidance
        self.rows.guidance = own.roll(1)
        try:
            return real(self, *given)
        finally:
            self.rows.guidance = own

    wrapped(patch, Guided, "_scale", scale)


def forgotten_memory(patch: Patch) -> None:
    """Every step is the first that the commit rule sees."""

    def hand_on(real: Any, of: Rows, made: Pass, after: Any, keep: Any) -> None:
        real(of, made, after, keep)
        for each in of.memory:
            each.zero_()

    for room in (blocks, canvas, sub_blocks):
        wrapped(patch, room, "hand_on", hand_on)


def closed_when_full(patch: Patch) -> None:
    """A block without masks is finished, whatever its rule would still replace."""
    for room in (blocks, canvas):
        wrapped(patch, room, "stay_open", lambda real, *given: None)


def one_post_step_too_many(patch: Patch) -> None:
    def stay_open(real: Any, of: Rows, *given: Any) -> None:
        of.max_post_steps.add_(1)
        real(of, *given)
        of.max_post_steps.sub_(1)

    for room in (blocks, canvas):
        wrapped(patch, room, "stay_open", stay_open)


def neighbours_rule(patch: Patch) -> None:
    """What the commit rule reads is the next row's."""

    def change(own: Pass, of: Rows, k: Any) -> Any:
        return replace(k, rule=tuple(each.roll(1, 0) for each in k.rule))

    settings(patch, change)


def choice_by_the_tokens_noise(patch: Patch) -> None:
    """What is committed is drawn by the numbers that tokens are drawn by."""
    wrapped(patch, rows, "choice_noise", lambda real, *counters: uniform_of(*counters))


def prompt_is_edited(patch: Patch) -> None:
    """A rule that replaces tokens is offered the prompt's as well."""

    def revisable(real: Any, ids: Any, masked: Any, output: Any, *given: Any) -> Any:
        return real(ids, masked, torch.ones_like(output), *given)

    wrapped(patch, rows, "revisable", revisable)


def answer_too_long(patch: Patch) -> None:
    """One position behind the answer counts as part of it."""

    def of(real: Any, found: Rows, *given: Any) -> Region:
        found.limit.add_(1)
        try:
            return real(found, *given)
        finally:
            found.limit.sub_(1)

    patch.setattr(Region, "of", staticmethod(_around(Region.of, of)))


def ends_at_once(patch: Patch) -> None:
    """An end token ends the text also before the last token that its canvas gives."""

    def change(self: Rows, row: int, enter: Callable[[], None]) -> None:
        enter()
        self.closing[row] = self.prompt[row]

    entering(patch, change)


def given_blocks_unread(patch: Patch) -> None:
    """Blocks that a canvas gives in the midst of an answer are not read."""

    def resume(real: Any, self: Engine, row: int, one: Serving) -> None:
        real(self, row, one)
        one.read(iter(()))

    wrapped(patch, Engine, "_resume", resume)


def unstored_before_given(patch: Patch) -> None:
    """The blocks that were finished before them keep the keys and values of their last step."""

    def resume(real: Any, self: Engine, row: int, one: Serving) -> None:
        for behind in (self.rows.pending, self.rows.referred):
            behind[row] = 0
        real(self, row, one)

    wrapped(patch, Engine, "_resume", resume)


def given_tokens_share(patch: Patch) -> None:
    """Of blocks in flight, tokens that the canvas gives count as decoded."""
    wrapped(patch, Region, "given", lambda real, self, of: torch.zeros_like(real(self, of)))


def whole_block_split(patch: Patch) -> None:
    """A canvas's quota splits the block, not the masks that it has."""

    def begin(real: Any, self: Canvas, *given: Any) -> Any:
        own, known = real(self, *given)
        return {**own, "total": self.terms.b}, known

    wrapped(patch, Canvas, "begin", begin)


def _around(real: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: around(real, *given, *named.values())


FAULTS: dict[str, tuple[Callable[[Patch], None], int]] = {
    fault.__name__: (fault, seed)
    for fault, seed in (
        (stale_carry, 9), (stale_stop_ids, 61), (stale_steps, 9), (swapped_seed, 0), (neighbours_threshold, 0),
        (neighbours_temperature, 0), (wrong_scale, 0), (noise_of_another_step, 0), (position_off_by_one, 0),
        (ignored_t_res, 0), (lost_piece, 1), (quota_off, 8), (forgotten_shift, 3), (forgotten_look, 1),
        (forgotten_neighbour, 19), (block_not_stored, 2), (carried_on, 0), (never_refreshed, 3), (answer_too_long, 1),
        (guided_by_the_prompt, 4), (guided_to_the_block, 3), (neighbours_guidance, 3), (ends_at_once, 74),
        (given_blocks_unread, 4), (unstored_before_given, 4), (given_tokens_share, 35), (whole_block_split, 11),
        (forgotten_memory, 58), (closed_when_full, 13), (one_post_step_too_many, 13), (neighbours_rule, 12),
        (choice_by_the_tokens_noise, 3), (prompt_is_edited, 13),
        (block_never_read_again, 86), (unforgotten_sub_blocks, 86),
    )
}  # fmt: skip
"""With the first case of the fuzz that catches it."""


def caught(fault: Callable[[Patch], None], seed: int) -> str | None:
    """What a case says of the fault."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        try:
            return fuzz.check(seed)[0]
        except fuzz.Endless as error:
            return f"seed {seed}: {error}"


def main() -> None:
    torch.set_num_threads(1)
    missed = 0
    for name, (fault, _) in FAULTS.items():
        found = ((seed, caught(fault, seed)) for seed in range(200))
        first = next(((seed, said) for seed, said in found if said), None)
        missed += first is None
        print(f"{name}: {'NOT CAUGHT by 200 cases' if first is None else first[1]}", flush=True)
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
