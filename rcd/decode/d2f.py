"""D2F's window: several blocks in flight, each behind the unfinished ones on its left, attention block-causal.

SDAR keeps its absolute grid of blocks. LLaDA's blocks begin at the prompt's end, and block-causal attention between
them is what D2F trains LLaDA for: an ordinary LLaDA has never seen it. A block has its own steps and its own carry,
which starts when the block is added. A finished block's keys and values are computed from its tokens in the next
ordinary pass, together with the blocks still in flight, so that no pass is spent on storing it.
Shapes: B rows, N blocks of the decoded part, W blocks of a pass, b slots of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rcd.carry.base import CarryState, TensorState, places
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Event, Finished, Step
from rcd.decode.lanes import Run, WindowPasses
from rcd.decode.layout import Grid, Span
from rcd.decode.step import Outcome, denoise
from rcd.decode.stopping import check_prompts, close, cut, is_end, unsettled
from rcd.diffusion.attention import block_causal
from rcd.diffusion.commit import quota
from rcd.models.lm import DiffusionLM, View
from rcd.residual.distribution import Distribution


def decode(
    target: DiffusionLM,
    reference: DiffusionLM | None,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    generators: list[torch.Generator],
) -> Iterator[Event]:
    """Several blocks in flight, block-causal, the finished ones cached (D2F; SDAR, and LLaDA as D2F trains it)."""
    return _Decoding(target, reference, prompts, config, generators).events()


@dataclass(frozen=True)
class Flight(TensorState):
    """The rows' texts behind what was prefilled, and how far each row is. Slots and blocks are counted from there."""

    ids: Tensor
    """[B, N b]"""
    output: Tensor
    """[B, N b] booleans: behind the prompt and within max_new_tokens."""
    position: Tensor
    """[B, T] of all slots, the prefilled ones too; negative in the padding."""
    place: Tensor
    """[B, T] likewise: place // b is the block, for the mask."""
    total: Tensor
    """[B, N] the masks of each block that mattered at the beginning."""
    step: Tensor
    """[B, N] each block's steps since it must make progress."""
    added: Tensor
    """[B] blocks that are in flight or done."""
    stored: Tensor
    """[B] blocks whose keys and values in the target's cache are final."""
    referred: Tensor
    """[B] the same of the reference's cache, which is behind when the reference was not asked for a while."""


@dataclass(frozen=True)
class Blocks(TensorState):
    """What the rules ask about the blocks of every row."""

    masked: Tensor
    """[B, N b]"""
    needed: Tensor
    """[B, N b] the masks that must still be decoded."""
    open: Tensor
    """[B, N] booleans: the blocks that have such masks."""
    share: Tensor
    """[B, N] the decoded part of each block."""
    ended: Tensor
    """[B] booleans: the text has an end token."""
    first: Tensor
    """[B] the first open block; N where none is."""


@dataclass(frozen=True)
class Carried:
    """The carry's state of the blocks in flight."""

    state: CarryState
    slots: Tensor
    """[B, W b] where it stands."""

    def rows(self, index: Tensor) -> Carried:
        return Carried(self.state.rows(index), self.slots[index])

    def at(self, span: Span) -> CarryState:
        """The state at other slots. Where it knows nothing, nothing is asked of it: no block is open there, or it is
        new and starts anyway."""
        return self.state.at((span.slots - self.slots[:, :1]).clamp(0, self.slots.shape[1] - 1))


@dataclass
class Asked:
    """The passes that a carry asks for before a step: each is run once, however many blocks ask for it."""

    read: dict[str, Callable[[Sequence[int]], tuple[Span, Distribution]]]
    """Of each kind, the pass over all rows, counted for some of them."""
    distribution: Callable[[Tensor], Distribution]
    found: dict[str, tuple[Span, Distribution]] = field(default_factory=dict)

    def __call__(self, kind: str, rows: list[int], index: Tensor, slots: Tensor) -> Distribution:
        """What a pass predicts at some slots of the rows `index`; when it is run now, it is counted for `rows`."""
        if kind not in self.found:
            self.found[kind] = self.read[kind](rows)
        span, predicted = self.found[kind]
        return self.distribution(predicted.logits[index[:, None], slots - span.slots[index, :1]])


def decoded_share(total: Tensor, left: Tensor) -> Tensor:
    """The part of a block's masks that is decoded; all of it where it had none."""
    return torch.where(total > 0, (total - left) / total.clamp_min(1), 1.0)


def another(share_B: Tensor, flying_B: Tensor, more_B: Tensor, config: DecodeConfig) -> Tensor:
    """[B] the rows that get one more block: enough of the last one is decoded (`share`), there is room beside those in
    flight, and there are `more`."""
    return (share_B >= config.block_add_threshold) & (flying_B < config.blocks_in_flight) & more_B


def least(share_BN: Tensor, flying_BN: Tensor, step_BN: Tensor, config: DecodeConfig) -> Tensor:
    """[B, N] what each block commits at least: its share of the steps once enough of its left neighbour is decoded
    (the first block's always is), nothing before."""
    assert config.block_length is not None
    neighbour = torch.cat((torch.ones_like(share_BN[:, :1]), share_BN[:, :-1]), dim=1)
    active = flying_BN & (neighbour >= config.decoded_token_threshold)
    whole = torch.full_like(step_BN, config.block_length)
    return quota(whole, config.num_inference_steps or config.block_length, step_BN) * active


class _Decoding:
    """One run over a batch; what changes from step to step is passed along."""

    def __init__(
        self,
        target: DiffusionLM,
        reference: DiffusionLM | None,
        prompts: Sequence[Sequence[int]],
        config: DecodeConfig,
        generators: list[torch.Generator],
    ):
        assert config.block_length is not None
        self.config, self.b, self.limit, self.settings = config, config.block_length, config.new_tokens, target.settings
        absolute = self.settings.attention == "block_causal"
        check_prompts(prompts, self.settings, self.limit, *config.rounding(self.settings))
        laid = Grid.of if absolute else Grid.behind
        self.grid = laid(prompts, self.b, self.limit, self.settings.mask_token_id, target.device)
        self.run = Run.of(target, reference, config, generators, capacity=self.grid.ids.shape[1])

    def events(self) -> Iterator[Event]:
        self.run.prefill(self.grid)
        flight, carried = self._begun(), None
        now = self._now(flight)
        rows = list(range(len(flight.ids)))
        skipped = flight.output.long().argmax(-1).tolist()  # the prompt's tokens in each row's first block
        while rows:
            flight, new = self._added(flight, now)
            flight, carried, event = self._step(flight, now, carried, new, rows)
            yield replace(event, offsets=[at - skipped[row] for at, row in zip(event.offsets, rows, strict=True)])
            now = self._now(flight)
            going = ((now.first < flight.added) | self._more(flight, now)).tolist()
            if all(going):
                continue
            for k, row in enumerate(rows):
                if not going[k]:
                    text = flight.ids[k].tolist()[skipped[row] :]
                    yield Finished(row, *cut(text, self.settings.eos_token_ids, self.limit), self.run.ledger[row])
            keep = [k for k, on in enumerate(going) if on]
            index = torch.tensor(keep, dtype=torch.long, device=flight.ids.device)
            rows, flight, carried = [rows[k] for k in keep], flight.rows(index), carried.rows(index)
            now = now.rows(index)
            self.run.rows(index)

    # the rules: which blocks are in flight

    def _begun(self) -> Flight:
        ids, output = (values[:, self.grid.prefilled :] for values in (self.grid.ids, self.grid.output))
        zero = torch.zeros(ids.shape[0], ids.shape[1] // self.b, dtype=torch.long, device=ids.device)
        none = zero[:, 0]
        flight = Flight(ids, output, self.grid.position, self.grid.place, zero, zero, none, none, none)
        return replace(flight, total=self._blocks(self._now(flight).needed).sum(-1))

    def _now(self, flight: Flight) -> Blocks:
        ids, output, eos = flight.ids, flight.output, self.settings.eos_token_ids
        masked = ids == self.settings.mask_token_id
        needed = unsettled(ids, masked, output, eos, self.config.eos_early_stop)
        left = self._blocks(needed).sum(-1)
        number = torch.arange(left.shape[1], device=ids.device)
        first = torch.where(left > 0, number, left.shape[1]).amin(-1)
        share = decoded_share(flight.total, left)
        return Blocks(masked, needed, left > 0, share, (is_end(ids, eos) & output).any(-1), first)

    def _added(self, flight: Flight, now: Blocks) -> tuple[Flight, Tensor]:
        """(the rows with at most one block more, the rows [B] that got one)."""
        last = now.share.gather(1, (flight.added - 1).clamp_min(0)[:, None]).squeeze(1)
        last = torch.where(flight.added == 0, 1.0, last)
        new = another(last, flight.added - now.first, self._more(flight, now), self.config)
        return replace(flight, added=flight.added + new.long()), new

    def _more(self, flight: Flight, now: Blocks) -> Tensor:
        """[B] whether blocks are to come: a part of the answer lies behind those added, and no end token was seen."""
        return (flight.added < self._blocks(flight.output).any(-1).sum(-1)) & ~now.ended

    def _flying(self, flight: Flight, now: Blocks) -> Tensor:
        """[B, N] the blocks that were added and are open."""
        return now.open & (torch.arange(now.open.shape[1], device=now.open.device) < flight.added[:, None])

    def _least(self, flight: Flight, now: Blocks) -> Tensor:
        """[B, N] what each block commits at least."""
        return least(now.share, self._flying(flight, now), flight.step, self.config)

    # one step

    def _step(
        self, flight: Flight, now: Blocks, carried: Carried | None, new_B: Tensor, rows: list[int]
    ) -> tuple[Flight, Carried, Step]:
        """One denoising step of every row, over its blocks in flight and those that are done but not stored."""
        run, done = self.run, now.first.minimum(flight.added)
        span, least = self._span(flight.stored, flight), self._least(flight, now)
        asked = Asked(
            {
                "own": lambda counted: self._read(flight.stored, flight, run.own, counted),
                "reference": lambda counted: self._read(flight.referred, flight, run.refer, counted),
            },
            run.rules.distribution,
        )
        state = self._refreshed(flight, carried, span, asked, new_B, rows)
        number = self._blocks(span.slots)[:, :, 0] // self.b
        flying = self._flying(flight, now).gather(1, number)
        masked, decoded = span.take(now.masked) & span.own, flying.repeat_interleave(self.b, dim=1)
        ids, view = self._view(flight, span)
        outcome = denoise(
            run.target.model, run.rules, ids, view, state, span.take(now.needed) & decoded, least.gather(1, number),
            run.noise(rows, view), places(run.rules.carry, masked) & decoded,
        )  # fmt: skip
        flight = self._written(flight, span, outcome)
        # what was done when the pass began has been computed from its tokens
        referred = done if "reference" in asked.found else flight.referred
        flight = replace(flight, step=flight.step + (least > 0), stored=done, referred=referred)
        left = span.take(flight.ids) == self.settings.mask_token_id
        event = outcome.told(rows, span.first, run.counted(outcome, rows), ids, masked, left)
        return flight, Carried(outcome.state, span.slots), event

    def _written(self, flight: Flight, span: Span, outcome: Outcome) -> Flight:
        """What was committed, and the masks behind an end token closed."""
        ids = span.put(flight.ids, torch.where(outcome.committed, outcome.token, span.take(flight.ids)))
        masked, token = ids == self.settings.mask_token_id, span.put(flight.ids, outcome.token)
        early = self.config.eos_early_stop
        return replace(flight, ids=close(ids, masked, token, flight.output, self.settings.eos_token_ids, early)[0])

    def _refreshed(
        self, flight: Flight, carried: Carried | None, span: Span, asked: Asked, new_B: Tensor, rows: list[int]
    ) -> CarryState:
        """The carry's state for the coming step; a block that is new has a start of its own."""
        carry, codebook, state = self.run.rules.carry, self.run.target.model.codebook, None
        every, index = torch.arange(len(rows), device=new_B.device), new_B.nonzero().flatten()
        if carried is not None:
            state = carry.refresh(carried.at(span), self._passes(asked, rows, every, span.slots), codebook)
        if len(index):
            block = (flight.added[index, None] - 1) * self.b + torch.arange(self.b, device=index.device)
            start = carry.refresh(None, self._passes(asked, rows, index, block), codebook)
            state = start if state is None else _joined(state, index, block - span.slots[index, :1], start)
        assert state is not None, "the first step has a new block in every row"
        return state

    def _passes(self, asked: Asked, rows: list[int], index: Tensor, slots: Tensor) -> WindowPasses:
        """What a carry may ask for at these slots of the rows `index`."""
        some = [rows[k] for k in index.tolist()]
        return WindowPasses(
            shape=(*slots.shape, self.settings.vocab_size),
            device=slots.device,
            generators=[self.run.generators[row] for row in some],
            own=lambda: asked("own", some, index, slots),
            reference=lambda: asked("reference", some, index, slots),
        )

    def _read(
        self,
        stored_B: Tensor,
        flight: Flight,
        predict: Callable[[Tensor, View, Sequence[int]], Distribution],
        counted: Sequence[int],
    ) -> tuple[Span, Distribution]:
        """A plain pass over everything that is not stored, counted for some rows."""
        span = self._span(stored_B, flight)
        return span, predict(*self._view(flight, span), counted)

    def _span(self, stored_B: Tensor, flight: Flight) -> Span:
        """The blocks that were added and are not stored."""
        return Span.of(stored_B * self.b, flight.added * self.b, flight.ids.shape[1])

    def _view(self, flight: Flight, span: Span) -> tuple[Tensor, View]:
        """(the ids that a pass over the span reads, its view)."""
        seen = self.grid.prefilled + int(flight.added.max()) * self.b
        there = span.moved(self.grid.prefilled)
        attention = block_causal(there.take(flight.place), flight.place[:, :seen], self.b)
        assert self.run.target.cache is not None
        place = self.run.target.cache.place(there.slots, there.own, seen)
        return span.take(flight.ids), View(there.take(flight.position).clamp_min(0), attention, place)

    def _blocks(self, values: Tensor) -> Tensor:
        """[B, N b] as [B, N, b]."""
        return values.unflatten(1, (-1, self.b))


def _joined(state: CarryState, index: Tensor, place: Tensor, other: CarryState) -> CarryState:
    """The state with some positions of some rows replaced."""
    part = state.rows(index).put_at(place, other, torch.ones_like(place, dtype=torch.bool))
    return state.put(index, part)
