"""The windows as the oracle has them (`rcd.decode.simple`): for every step, the positions that are read and predicted,
and what they see, as an attention mask. One text, no cache.

Shapes: T positions of the text, A of them decoded (from `origin` on), Q read, n blocks of b predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rcd.carry.base import Carry, CarryState
from rcd.decode.config import BLOCKS, CACHED, DecodeConfig
from rcd.decode.filling import Filling
from rcd.decode.flight import another, decoded_share, least, prefill_passes, turn
from rcd.decode.step import Places, Rules
from rcd.decode.stopping import is_end, revisable, unsettled
from rcd.models.lm import DiffusionLM, ModelSettings, Prediction, View


@dataclass(frozen=True)
class Text:
    """Prompt and masks, and what is decoded of them: blocks of b from `origin` on."""

    ids: Tensor
    """[T]"""
    origin: int
    output: Tensor
    """[1, A] booleans: the answer."""
    given: Tensor
    """[1, A] what a canvas gives of it."""
    ending: Tensor
    """[1, A] where an end token ends it: from the last given token on."""
    ends: Tensor
    """[1, E] its end tokens."""
    mask: int
    early: bool

    @classmethod
    def of(cls, prompt: Sequence[int], config: DecodeConfig, model: ModelSettings, filling: Filling) -> Text:
        b, length, new = config.block, len(prompt), config.new_tokens
        origin = length // b * b if model.attention == "block_causal" else length
        whole_blocks = config.window in BLOCKS
        end = origin + -(-(length + new - origin) // b) * b if whole_blocks else length + new
        area = torch.arange(origin, end)[None]
        ends = torch.tensor([[*model.eos_token_ids, *config.stop_ids]], dtype=torch.long)
        masks = [model.mask_token_id] * (end - length - len(filling.ids))
        ids = torch.tensor([*prompt, *filling.ids, *masks])
        output = (area >= length) & (area < length + new)
        given = output & (ids[None, origin:] != model.mask_token_id)
        ending = output & (area >= length + filling.last)
        return cls(ids, origin, output, given, ending, ends, model.mask_token_id, config.eos_early_stop)

    @property
    def masked(self) -> Tensor:
        """[1, A]"""
        return self.ids[None, self.origin :] == self.mask

    @property
    def needed(self) -> Tensor:
        """[1, A] the masks that must still be decoded."""
        ids = self.ids[None, self.origin :]
        return unsettled(ids, self.masked, self.output, self.ending, self.ends, self.early)

    def offered(self, revises: bool) -> Tensor:
        """[1, A] what may be committed: those masks and, where the rule revises, tokens of the answer."""
        ids = self.ids[None, self.origin :]
        if not revises:
            return self.needed
        answer = self.output & ~self.given
        if not self.early:  # what fills up the last block is decoded, and revised, like the rest
            answer = answer | (~self.output & (self.output.cumsum(-1) > 0))
        return self.needed | revisable(ids, self.masked, answer, self.ends, self.early)

    def ended(self, until: int) -> bool:
        """Whether an end token stands in the first so many positions."""
        return bool((is_end(self.ids[None, self.origin :], self.ends) & self.ending)[:, :until].any())


@dataclass(frozen=True)
class PassPlan:
    """What a pass does."""

    read: Tensor
    """[Q] the positions that it computes, rising."""
    predicted: Tensor
    """[n, b] those of them that it predicts."""
    whole: bool = True
    """Of a canvas or a block: all of it, or a part of it and the rest as it was."""


@dataclass(frozen=True)
class StepPlan:
    """A step."""

    reads: PassPlan
    here: Tensor
    """[n, b] booleans: the blocks being decoded; with `carry_scope="block"` they alone carry."""
    allowed: Tensor
    """[n, b] booleans: where they may commit."""
    quota: Tensor
    """[n]"""
    share: Tensor | None = None
    """[n] the same as a part of the masks left, if the rule asks for it."""
    early: Tensor | None = None
    """[n] where a rule that remembers takes no prediction as stable yet."""
    fresh: Tensor | None = None
    """[1, A] booleans: where the carry starts."""
    start: Tensor | None = None
    """[1, L] the positions that its start is about."""


@dataclass
class PostSteps:
    """How many steps each block without masks may still take, where the rule replaces tokens of such blocks."""

    rules: Rules
    config: DecodeConfig
    left: dict[int, int] = field(default_factory=dict)

    def open(self, block: int) -> bool:
        return self.left.get(block, 0) > 0

    def told(self, was: Text, now: Text) -> None:
        """A step has made the second text of the first."""
        if not self.rules.rule.post_edits:
            return
        config, b, origin = self.config, self.config.block, now.origin
        for block in range(-(-was.output.shape[1] // b)):
            here = slice(block * b, (block + 1) * b)
            old, new = was.ids[origin:][here], now.ids[origin:][here]
            if bool(now.needed[0, here].any()):
                continue
            if bool(was.needed[0, here].any()):
                self.left[block] = config.max_post_steps if config.edit_threshold < 1 else 0
            elif self.open(block):
                edited = bool(((old != now.mask) & (old != new)).any())
                self.left[block] = self.left[block] - 1 if edited else 0

    def unfinished(self, text: Text) -> int | None:
        """Where the first block begins that has masks left or stays open; None: there is none."""
        b, found = self.config.block, [k for k in sorted(self.left) if self.open(k)]
        found += [int(place) // b for place in text.needed[0].nonzero()[:1]]
        return min(found) * b + text.origin if found else None


class BlockWindow:
    """`blockwise`, `sub_blocks` and `d2f`: the blocks in flight, block-causal; all before them is read again."""

    def __init__(self, config: DecodeConfig, text: Text, causal: bool, rules: Rules, shift: int):
        self.config = replace(config, blocks_in_flight=1) if config.window != "d2f" else config
        self.rules, position, b = rules, torch.arange(len(text.ids)), config.block
        self.block_of = position // b if causal else (position - text.origin + b).clamp_min(0) // b
        self.total = self._left(text.needed)
        self.answer = self._left(text.output)
        self.walls = (self.answer == self._left(text.given))[0].tolist()
        """Blocks of which nothing is decoded: what is given whole is read when all before it is decided."""
        self.steps = torch.zeros_like(self.total)
        self.added = 0
        """Blocks in flight or done."""
        self.opened = 0
        """Those of them that had masks."""
        self.prefills = prefill_passes(text.origin, b) if causal else 1
        self.causal = causal
        self.post = PostSteps(rules, config)
        self.shift, self.place, self.alone = shift, (-1, -1), False
        """The last step's block and sub-block, and whether it was for a block's first position alone."""

    def next(self, text: Text) -> StepPlan | None:
        config, b = self.config, self.config.block
        left, share = self._left(text.needed), decoded_share(self.total, self._left(text.needed))
        open_ = [k for k in range(left.shape[1]) if left[0, k] or self.post.open(k)]
        count = int(self.answer.bool().sum())
        first = next((k for k in open_ if k < self.added), self.added)
        if first == self.added:
            behind = next((k for k in range(self.added, count) if not self.walls[k]), count)
            if behind == count or text.ended(behind * b):
                return None
            before = text.origin if self.causal and not self.added else 0
            self.prefills += prefill_passes(before + (behind - self.added) * b, b) - prefill_passes(before, b)
            first = self.added = behind
        more = self.added < count and not self.walls[self.added] and not text.ended(self.added * b)
        last = share[:, self.added - 1] if self.added else torch.ones(1)
        fresh = bool(another(last, torch.tensor([self.added - first]), torch.tensor([more]), config))
        self.added += fresh
        self.opened += fresh
        flying = torch.zeros_like(left, dtype=torch.bool)
        flying[0, [k for k in open_ if k < self.added]] = True
        chosen = flying[0].nonzero().flatten()
        steps = torch.tensor([config.num_inference_steps or 0])
        wanted, counts, due = least(share, flying, self.steps, steps, config, self.rules, left)
        self.steps += counts.long()
        predicted = text.origin + chosen[:, None] * b + torch.arange(b)
        reads = PassPlan(torch.arange(text.origin + self.added * b), predicted)
        here = torch.ones_like(predicted, dtype=torch.bool)
        allowed = turn(text.needed[0].view(-1, b)[chosen], config)
        plan = StepPlan(reads, here, allowed, wanted[0, chosen], None if due is None else due[0, chosen])
        if config.window == "sub_blocks":
            plan = self._part(plan, text)
        if not fresh:
            return plan
        new = torch.arange(text.output.shape[1])[None] // b == self.added - 1
        return replace(plan, fresh=new, start=text.origin + new[0].nonzero().flatten()[None])

    def _part(self, plan: StepPlan, text: Text) -> StepPlan:
        """The step on its sub-block alone, where the whole block need not be read."""
        assert self.config.sub_block_length is not None
        s, block = self.config.sub_block_length, plan.reads.predicted[0]
        needed = text.needed[0][block - text.origin]
        number = int(needed.view(-1, s).any(-1).long().argmax())
        place, own = (int(block[0]), number), slice(number * s, (number + 1) * s)
        whole = place != self.place or self.alone or bool(self.shift and needed[number * s])
        self.place, self.alone = place, self.config.first_token_alone and bool(needed[0])
        if whole:
            return plan
        predicted = block[own]
        read = torch.arange(max(0, int(predicted[0]) - 1), int(predicted[-1]) + 1)  # with the token to the left
        reads = PassPlan(read, predicted[None], whole=False)
        return replace(plan, reads=reads, here=plan.here[:, own], allowed=plan.allowed[:, own])

    def _left(self, needed: Tensor) -> Tensor:
        """[1, N] in each block."""
        return needed.unflatten(1, (-1, self.config.block)).sum(-1)


class CanvasWindow:
    """`bidirectional`, `prefix` and `dual`: one current block; the whole canvas is read, or a part of it."""

    block_of = None

    def __init__(self, config: DecodeConfig, text: Text, rules: Rules):
        self.rules, self.config, self.current, self.step, self.total = rules, config, -1, 0, 0
        self.post = PostSteps(rules, config)

    def next(self, text: Text) -> StepPlan | None:
        config, b, needed = self.config, self.config.block, text.needed
        number = torch.arange(needed.shape[1]) // b
        stays = self.post.open(self.current)
        if not (stays or bool(needed.any())):
            return None
        first, current = self.current < 0, self.current if stays else int(number[needed[0]][0])
        entered = current != self.current
        if entered:
            self.current, self.step, self.total = current, 0, int(needed[0, number == current].sum())
        every = config.refresh_every
        whole = config.window not in CACHED or entered or bool(every and self.step % every == 0)
        position, begin = torch.arange(len(text.ids)), text.origin + current * b
        stop = None if config.window == "prefix" else begin + b
        predicted = position[text.origin :] if whole else position[begin:stop]
        read = position if whole else position[begin - 1 : stop]  # with the token to the left, which only looks
        here = ((predicted - text.origin) // b == current)[None]
        alone = config.first_token_alone and bool(needed[0, current * b])
        left = needed[0, number == current].sum()[None]
        given = (*torch.tensor([[self.total], [config.num_inference_steps or self.total], [self.step]]), lambda: left)
        schedule, share = self.rules.schedule, None
        if self.rules.rule.takes_share:
            share = schedule.share(*given)
        early = torch.tensor([self.step < config.klass_history - 1])
        self.step += 1
        allowed = here & (predicted == begin) if alone else here
        plan = StepPlan(PassPlan(read, predicted[None], whole), here, allowed, schedule.quota(*given), share, early)
        if not (first or (entered and config.carry_scope == "block")):
            return plan
        new = (number == current)[None] if config.carry_scope == "block" else torch.ones_like(needed)
        return replace(plan, fresh=new, start=position[None, text.origin :])


@dataclass
class Reader:
    """A model that reads the text; it remembers what it last read whole."""

    model: DiffusionLM
    block_of: Tensor | None
    """[T] the block of every position, for block-causal attention; None: everything sees everything."""
    mask: int
    before: Tensor | None = None
    unread: int = 0
    """Positions at the beginning that it reads as masks."""

    @property
    def codebook(self) -> Tensor:
        return self.model.codebook

    def __call__(
        self, ids: Tensor, view: PassPlan, carry: Carry | None = None, state: Any = None, inject: Tensor | None = None,
        places: Places | None = None,
    ) -> Prediction:  # fmt: skip
        settings = self.model.settings
        own = torch.where(ids == self.mask, settings.mask_token_id, ids).clamp_max(settings.vocab_size - 1)
        own[: self.unread] = settings.mask_token_id
        embeds, at = self.model.embed(own[view.read]), torch.searchsorted(view.read, view.predicted)
        if carry is not None and inject is not None:
            embeds[at] = carry.inject(embeds[at], inject, state, self.model.carry_parameters)  # Eq. 2
        hidden = self._encode(embeds, view)[(at - settings.shift).clamp_min(0)]
        return Prediction(self.model.head(hidden), hidden)

    def _encode(self, embeds: Tensor, view: PassPlan) -> Tensor:
        read = view.read
        if view.whole:
            self.before = embeds
            return self.model.encode(embeds[None], View(read[None], self._sees(read)))[0]
        assert self.before is not None
        # keys: the text as it was, but for the part; and the part, but for the token that only looks
        old, looking = len(self.before), int((read < view.predicted.min()).sum())
        both = torch.cat((torch.arange(old), read))
        sees = torch.ones(len(both), len(both), dtype=torch.bool)
        sees[:old, old:] = False
        sees[old:, :old] = (torch.arange(old)[:, None] != read[looking:]).all(-1)
        sees[old:, old : old + looking] = False
        causal = self._sees(both)
        seen = sees[None, None] if causal is None else sees & causal
        return self.model.encode(torch.cat((self.before, embeds))[None], View(both[None], seen))[0, old:]

    def _sees(self, position: Tensor) -> Tensor | None:
        """[1, 1, Q, Q] under block-causal attention."""
        if self.block_of is None:
            return None
        block = self.block_of[position]
        return (block[:, None] >= block)[None, None]


@dataclass
class Guided:
    """Classifier-free guidance as LLaDA's `generate.py` writes it: un + (s + 1) (cond - un), `un` without prompt."""

    cond: Reader
    uncond: Reader
    scale: float

    @property
    def codebook(self) -> Tensor:
        return self.cond.codebook

    def __call__(self, *given: Any) -> Prediction:
        cond, un = self.cond(*given), self.uncond(*given)
        logits = un.logits + (self.scale + 1) * (cond.logits - un.logits)
        return Prediction(logits, un.hidden + (self.scale + 1) * (cond.hidden - un.hidden))


def shaped(state: CarryState, where: Tensor) -> CarryState:
    """The state of as many positions in another shape."""
    flat = [each.flatten(0, 1) for each in state.tensors()]
    return state.with_tensors([each.view(*where.shape, *each.shape[1:]) for each in flat])
