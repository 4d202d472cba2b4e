"""One training step's loss: SeqD's masked objective, or Algorithm 1's with residuals.

Everything that touches the target's parameters happens inside `Objective.forward`, so that sharded parameters are
gathered when it runs and delta always uses the target's own codebook.
Shapes: B rows, L slots, S slots of the layout, M masked positions, V vocabulary, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rcd.carry.residual import Residual, ResidualState
from rcd.models.lm import DiffusionLM, View
from rcd.train.layout import Batch, Frame, Layout, frame_of
from rcd.train.loss import masked_cross_entropy
from rcd.train.residuals import ResidualSource, confidence_of, residual_of


@dataclass(frozen=True)
class Losses:
    total: Tensor
    """Weighted sum; its gradient is the step's."""
    cross_entropy: Tensor
    """Unweighted sum over the masked positions, without gradient."""
    masked: Tensor
    """How many there were."""
    alpha: Tensor
    """Sum of alpha over them."""


class Objective(nn.Module):
    def __init__(
        self,
        model: DiffusionLM,
        *,
        carry: Residual | None = None,
        source: ResidualSource | None = None,
        reference: DiffusionLM | None = None,
        block_length: int | None = None,
        copy: str = "answer",
        flex: bool = False,
    ):
        """`carry` None: SeqD. Else stage 2, with residuals of the reference or of the target itself; a step that has
        neither (trajectories without a reference) is one without residual."""
        super().__init__()
        self.model = model
        self.carry = carry
        self.source = source or ResidualSource()
        self._reference = [reference]  # in a list: it is neither trained, nor sharded, nor saved
        self.block_length = block_length or model.settings.block_length or 1
        self.copy = copy
        self.flex = flex

    @property
    def reference(self) -> DiffusionLM | None:
        return self._reference[0]

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> Losses:
        """The loss of a batch. `generator` (CPU) draws how many passes the settings beyond the paper take; it must be
        in the same state on all processes, whose passes go together. What differs by example is in the batch."""
        frame = self.frame(batch)
        masked, weight = batch.masked, batch.weight
        state: tuple[Tensor, ResidualState] | None = None  # (positions [B, L], residual at them)
        if self.source.trajectory and _draw(generator) < self.source.trajectory_share:
            masked, weight, state = self._trajectory(frame, generator)
        elif self.carry is not None and (self.reference is not None or self.source.recycling):
            state = self._residual(frame, masked, generator)
        layout = self.lay_out(frame, masked)
        state_M = None if state is None else _pick(state, layout)
        if state_M is not None and self.source.dropout:
            rows, slots = layout.source.unbind(1)
            state_M = ResidualState(state_M.alpha * (batch.luck[rows, slots] >= self.source.dropout), state_M.delta)
        hidden = self._hidden(self.model, layout, state_M)
        rows, slots = layout.source.unbind(1)
        total, each = masked_cross_entropy(hidden, self.model.head.weight, batch.ids[rows, slots], weight[rows, slots])
        alpha = torch.zeros((), device=total.device) if state_M is None else state_M.alpha.sum()
        return Losses(total, each.sum(), torch.tensor(len(each), device=total.device), alpha.detach())

    def frame(self, batch: Batch) -> Frame:
        attention = self.model.settings.attention
        return frame_of(batch, attention=attention, block_length=self.block_length, copy=self.copy, flex=self.flex)

    def lay_out(self, frame: Frame, masked: Tensor) -> Layout:
        return frame.lay_out(frame.batch.ids.masked_fill(masked, self.model.settings.mask_token_id), masked)

    def _hidden(self, model: DiffusionLM, layout: Layout, state_M: ResidualState | None) -> Tensor:
        """[M, D] what the model's head reads at the masked positions."""
        rows, slots = layout.noisy.unbind(1)
        ids, own = layout.ids, model.settings.mask_token_id
        if own != self.model.settings.mask_token_id:
            ids = ids.masked_fill(ids == self.model.settings.mask_token_id, own)
        embeds = model.embed(ids.clamp_max(model.settings.vocab_size - 1))
        if state_M is not None:
            assert self.carry is not None
            plain = embeds[rows, slots][None]
            everywhere = torch.ones(1, len(rows), dtype=torch.bool, device=ids.device)
            inside = ResidualState(state_M.alpha[None], state_M.delta[None])
            embeds = embeds.index_put((rows, slots), self.carry.inject(plain, everywhere, inside)[0])
        hidden = model.encode(embeds, View(layout.position, layout.attention))
        return hidden[rows, (slots - model.settings.shift).clamp_min(0)]

    def _residual(
        self, frame: Frame, masked: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, ResidualState] | None:
        """Algorithm 1, lines 7-10: the reference reads the state; or the target itself does (recycling)."""
        assert self.carry is not None
        batch, read = frame.batch, masked
        if self.source.noisier:
            read = masked | ((batch.extra < self.source.noisier) & batch.answer)
        layout, state = self.lay_out(frame, read), None
        passes = 1
        if self.source.recycling:
            passes = int(torch.randint(0, self.source.recycling + 1, (), generator=generator))
            if passes == 0:
                return None
        reader = self.model if self.source.recycling else self.reference
        assert reader is not None, "stage 2 needs a reference, or recycling"
        for number in range(passes):
            last = number == passes - 1
            with torch.no_grad():
                hidden = self._hidden(reader, layout, state)
            gradient = last and self.source.codebook_gradient
            with torch.set_grad_enabled(gradient):
                carry = self.carry if self.source.recycling else replace(self.carry, t_res=1.0)
                state = residual_of(hidden, reader.head.weight, carry, self.model.codebook, gradient=gradient)
        assert state is not None
        return _spread(layout, batch), state

    @torch.no_grad()
    def _trajectory(
        self, frame: Frame, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ResidualState] | None]:
        """(masked, weight, residual) after 0 to n steps of the model's own decoding, the true token put where it would
        commit. A sequence whose answer is all committed keeps its last step's masks."""
        batch = frame.batch
        steps = int(torch.randint(0, self.source.trajectory + 1, (), generator=generator))
        low, high = self.source.trajectory_threshold
        threshold = low + (high - low) * batch.extra[:, :1]  # a draw of each row
        slow = batch.extra[:, 2:3] < self.source.trajectory_slow
        threshold = threshold.masked_fill(slow, 1.0)
        late = (batch.extra[:, 1:2] < self.source.trajectory_from_noise) & batch.masked.any(-1, keepdim=True)
        tail = self._tail(batch) & slow & self.source.trajectory_tail
        masked, state = torch.where(late, batch.masked, batch.answer) | tail, None
        for _ in range(steps):
            layout = self.lay_out(frame, masked)
            before = None if state is None else _pick(state, layout)
            hidden = self._hidden(self.model, layout, before)
            confidence = torch.full(batch.ids.shape, float("-inf"), device=masked.device)
            rows, slots = layout.source.unbind(1)
            head = self.model.head.weight
            confidence[rows, slots] = confidence_of(hidden, head)
            confidence = confidence.masked_fill(tail, float("-inf"))
            commit = masked & ~tail & ((confidence > threshold) | self._best_of_block(batch, confidence))
            after = masked & ~commit
            if self.carry is not None:
                state = (_spread(layout, batch), residual_of(hidden, head, self.carry, self.model.codebook))
            masked = torch.where((after & ~tail).any(-1, keepdim=True), after, masked)
        share = (masked & ~tail).sum(-1, keepdim=True) / (batch.answer & ~tail).sum(-1, keepdim=True).clamp_min(1)
        weight = batch.normaliser / share.clamp_min(1e-3).where(~tail, 1.0)
        return masked, weight, state

    def _tail(self, batch: Batch) -> Tensor:
        """[B, L] the answer's positions behind the first end of text."""
        ends = torch.isin(batch.ids, torch.tensor(self.model.settings.eos_token_ids, device=batch.ids.device))
        ends &= batch.answer
        return batch.answer & (ends.cumsum(-1) - ends.long() > 0)

    def _best_of_block(self, batch: Batch, confidence: Tensor) -> Tensor:
        """Each block's most confident mask commits in any case, as in decoding."""
        if self.model.settings.attention != "block_causal":
            return confidence == confidence.amax(-1, keepdim=True)
        blocks = confidence.view(len(confidence), -1, self.block_length)
        best = (blocks == blocks.amax(-1, keepdim=True)) & (blocks > float("-inf"))
        return best.view_as(confidence)


def _spread(layout: Layout, batch: Batch) -> Tensor:
    """[B, L] the number of each text position among the layout's masked ones; -1 elsewhere."""
    number = torch.full(batch.ids.shape, -1, device=batch.ids.device)
    rows, slots = layout.source.unbind(1)
    number[rows, slots] = torch.arange(len(rows), device=number.device)
    return number


def _pick(state: tuple[Tensor, ResidualState], layout: Layout) -> ResidualState:
    """The residual at the masked positions of another layout of the same text; all of them must be known."""
    number, residual = state
    rows, slots = layout.source.unbind(1)
    index = number[rows, slots]
    return ResidualState(residual.alpha[index], residual.delta[index])


def _draw(generator: torch.Generator | None) -> float:
    return float(torch.rand((), generator=generator))
