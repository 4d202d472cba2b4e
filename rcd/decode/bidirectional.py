"""Windows of bidirectional models (LLaDA, Dream): a canvas that is computed whole at every step, or at some of them.

The canvas is prompt + max_new_tokens masks, padded on the left in a batch. Only masks of a row's current block may
commit; every row moves through its blocks at its own pace and leaves the batch when its text is settled. Fast-dLLM's
windows (`prefix`, `dual`) keep the keys and values of a step that read the whole canvas, and compute a part of it in
the steps that follow. Shapes: B rows, T canvas, P answer positions, R rows of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rcd.carry.base import CarryState, TensorState, places
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Event, Finished, Step
from rcd.decode.lanes import Run
from rcd.decode.layout import Span, Whole, lay_out
from rcd.decode.step import Outcome, denoise
from rcd.decode.stopping import check_prompts, close, cut, unsettled
from rcd.diffusion.attention import visible
from rcd.diffusion.commit import quota
from rcd.models.lm import DiffusionLM, View


def decode(
    target: DiffusionLM,
    reference: DiffusionLM | None,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    generators: list[torch.Generator],
) -> Iterator[Event]:
    """The whole canvas at every step, in blocks or at once (LLaDA, Dream)."""
    return _Decoding(target, reference, prompts, config, generators, cached=False).events()


def prefix(
    target: DiffusionLM,
    reference: DiffusionLM | None,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    generators: list[torch.Generator],
) -> Iterator[Event]:
    """The block and all behind it; what stands before is read once a block (Fast-dLLM's prefix cache; LLaDA, Dream)."""
    return _Decoding(target, reference, prompts, config, generators, cached=True, suffix=True).events()


def dual(
    target: DiffusionLM,
    reference: DiffusionLM | None,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    generators: list[torch.Generator],
) -> Iterator[Event]:
    """The block alone; the rest of the canvas is read once a block (Fast-dLLM's dual cache; LLaDA, Dream)."""
    return _Decoding(target, reference, prompts, config, generators, cached=True).events()


@dataclass(frozen=True)
class Canvas(TensorState):
    """The rows' texts, and how far each row is."""

    ids: Tensor
    """[B, T]"""
    position: Tensor
    """[B, T], negative in the padding."""
    masked: Tensor
    """[B, P]"""
    needed: Tensor
    """[B, P] booleans: the masks that must still be decoded."""
    block: Tensor
    """[B] each row's block; -1 before the first."""
    total: Tensor
    """[B] the masks that mattered when the row entered its block."""
    step: Tensor
    """[B] the row's steps in its block."""

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], new: int, mask: int, device: torch.device) -> Canvas:
        width = max(map(len, prompts))
        pads = [width - len(prompt) for prompt in prompts]
        ids, position = lay_out(prompts, pads, width + new, mask, device)
        masked = torch.ones(len(prompts), new, dtype=torch.bool, device=device)
        zero = torch.zeros(len(prompts), dtype=torch.long, device=device)
        return cls(ids, position, masked, masked, zero - 1, zero, zero)

    def entering(self, block_of_P: Tensor) -> tuple[Canvas, Tensor]:
        """(every row in its leftmost block with a mask that matters, the rows [B] that are new in theirs)."""
        block = torch.where(self.needed, block_of_P, len(block_of_P)).amin(-1)
        entered = block != self.block
        total = torch.where(entered, (self.needed & (block_of_P == block[:, None])).sum(-1), self.total)
        return replace(self, block=block, total=total, step=torch.where(entered, 0, self.step)), entered


class _Decoding:
    """One run over a batch; what changes from step to step is passed along."""

    def __init__(
        self,
        target: DiffusionLM,
        reference: DiffusionLM | None,
        prompts: Sequence[Sequence[int]],
        config: DecodeConfig,
        generators: list[torch.Generator],
        cached: bool,
        suffix: bool = False,
    ):
        assert config.block_length is not None
        self.config, self.prompts, self.device = config, prompts, target.device
        self.eos, self.shift = target.settings.eos_token_ids, target.settings.shift
        self.b, self.new, self.width = config.block_length, config.new_tokens, max(map(len, prompts), default=0)
        self.cached, self.suffix = cached, suffix
        check_prompts(prompts, target.settings, self.new, 1)
        capacity = self.width + self.new if cached else None
        self.run = Run.of(target, reference, config, generators, capacity)
        self.block_of = torch.arange(self.new, device=self.device) // self.b
        self.everywhere = torch.ones(1, self.new, dtype=torch.bool, device=self.device)

    def events(self) -> Iterator[Event]:
        canvas = Canvas.of(self.prompts, self.new, self.run.target.model.settings.mask_token_id, self.device)
        rows, state = list(range(len(self.prompts))), None
        while rows:
            canvas, entered = canvas.entering(self.block_of)
            for index, span in self._passes(canvas, entered):
                if index is None:
                    canvas, state, event = self._step(canvas, state, rows, entered, span)
                else:
                    assert state is not None, "all rows begin together, with a pass over the whole canvas"
                    some, part, old = [rows[k] for k in index.tolist()], canvas.rows(index), state.rows(index)
                    part, new, event = self._step(part, old, some, entered[index], span, index)
                    canvas, state = canvas.put(index, part), state.put(index, new)
                yield event
            open_rows = canvas.needed.any(-1).tolist()
            if all(open_rows):
                continue
            for k, row in enumerate(rows):
                if not open_rows[k]:
                    text = canvas.ids[k, self.width :].tolist()
                    yield Finished(row, *cut(text, self.eos, self.new), self.run.ledger[row])
            keep = [k for k, on in enumerate(open_rows) if on]
            index = torch.tensor(keep, dtype=torch.long, device=self.device)
            assert state is not None
            rows, canvas, state = [rows[k] for k in keep], canvas.rows(index), state.rows(index)
            self.run.rows(index)

    def _passes(self, canvas: Canvas, entered_B: Tensor) -> Iterator[tuple[Tensor | None, Span]]:
        """(rows, None for all; the answer's positions that they compute): the passes of one step of every row. Rows
        whose turn it is read the whole canvas, the others a part."""
        whole = self._turns(canvas, entered_B)
        if all(whole):
            yield None, Whole.all(len(whole), self.new, self.device)
            return
        block = canvas.block.tolist()
        # rows go together that compute equally much: all blocks alone, or the suffixes of one block
        kind = [-1 if on else block[k] if self.suffix else 0 for k, on in enumerate(whole)]
        for one in sorted(set(kind)):
            index = torch.tensor([k for k, own in enumerate(kind) if own == one], device=self.device)
            span = self._span(canvas.block[index]) if one >= 0 else Whole.all(len(index), self.new, self.device)
            yield (None if len(index) == len(kind) else index), span

    def _turns(self, canvas: Canvas, entered_B: Tensor) -> list[bool]:
        """The rows that read the whole canvas: without a cache all, else those that enter a block or are due."""
        every = self.config.refresh_every
        if not self.cached:
            return [True] * len(entered_B)
        due = entered_B if every is None else entered_B | (canvas.step % every == 0)
        return [bool(on) for on in due.tolist()]

    def _span(self, block_R: Tensor) -> Span:
        """Each row's block, and with the prefix cache what stands behind it."""
        start = block_R * self.b
        if self.suffix:
            return Span.of(start, torch.full_like(start, self.new), self.new)
        return Span.of(start, (start + self.b).clamp_max(self.new), self.new, width=min(self.b, self.new))

    def _view(self, canvas: Canvas, span: Span, rows: list[int], index: Tensor | None) -> tuple[Tensor, View]:
        """(the ids that a pass reads, its view). A part's pass also reads the token left of it where that predicts its
        first position (Dream's shift), and keeps that token's keys and values as they are."""
        total = self.width + self.new
        whole = isinstance(span, Whole)
        read = Whole.all(len(canvas.ids), total, self.device) if whole else span.moved(self.width, left=self.shift)
        cache = self.run.target.cache
        place = None if cache is None else cache.place(read.slots, read.own, total, index)
        padded = any(len(self.prompts[row]) < self.width for row in rows)
        attention = visible(canvas.position, read.slots.shape[1]) if padded else None
        predict = slice(self.width if whole else self.shift, None)
        return read.take(canvas.ids), View(read.take(canvas.position).clamp_min(0), attention, place, predict)

    def _step(
        self,
        canvas: Canvas,
        state: CarryState | None,
        rows: list[int],
        entered_B: Tensor,
        span: Span,
        index: Tensor | None = None,
    ) -> tuple[Canvas, CarryState, Step]:
        """One denoising step of some rows; `index` is where they stand in the cache (None: they are all)."""
        run, config = self.run, self.config
        before, masked = span.take(canvas.ids[:, self.width :]), span.take(canvas.masked)
        here = span.take(self.block_of == canvas.block[:, None])
        inject = places(run.rules.carry, masked) & (here if config.carry_scope == "block" else span.own)

        ids, view = self._view(canvas, span, rows, index)
        entering = self._refreshed(None if state is None else span.of_state(state), ids, view, rows, entered_B)
        least = quota(canvas.total, config.num_inference_steps or self.b, canvas.step)
        candidates, noise = span.take(canvas.needed) & here, run.noise(rows, view)
        outcome = denoise(run.target.model, run.rules, ids, view, entering, candidates, least, noise, inject)
        canvas, numbers = self._written(canvas, span, outcome), run.counted(outcome, rows)
        event = outcome.told(rows, span.first, numbers, before, masked, span.take(canvas.masked))
        return canvas, span.put_state(state, outcome.state), event

    def _refreshed(
        self, state: CarryState | None, ids: Tensor, view: View, rows: list[int], entered_B: Tensor
    ) -> CarryState:
        """The carry's state for the coming step. With scope "block", the rows that enter a block start anew."""
        starting = entered_B.nonzero().flatten() if self.config.carry_scope == "block" and state is not None else None
        if state is None or starting is None or not len(starting):
            return self.run.refresh(state, ids, view, rows, rows)
        groups = ((None, starting), (state, (~entered_B).nonzero().flatten()))
        for before, index in groups:
            if len(index):
                some = [rows[k] for k in index.tolist()]
                old = None if before is None else before.rows(index)
                state = state.put(index, self.run.refresh(old, ids[index], view.rows(index), some, some))
        return state

    def _written(self, canvas: Canvas, span: Span, outcome: Outcome) -> Canvas:
        """The canvas after a step: what was committed, the masks behind an end token closed."""
        answer, early = canvas.ids[:, self.width :], self.config.eos_early_stop
        after = span.put(answer, torch.where(outcome.committed, outcome.token, span.take(answer)))
        masked = span.put(canvas.masked, span.take(canvas.masked) & ~outcome.committed)
        after, masked = close(after, masked, span.put(answer, outcome.token), self.everywhere, self.eos, early)
        needed = unsettled(after, masked, self.everywhere, self.eos, early)
        ids = torch.cat((canvas.ids[:, : self.width], after), dim=1)
        return replace(canvas, ids=ids, masked=masked, needed=needed, step=canvas.step + 1)
