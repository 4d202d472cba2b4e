"""One training step's loss: SeqD's masked objective, or with what a carry hands from pass to pass (Algorithm 1's
residuals, Loopholing's two passes).

Everything that touches the target's parameters happens inside `Objective.forward`, so that sharded parameters are
gathered when it runs and delta always uses the target's own codebook.
Shapes: B rows, L slots, S slots of the layout, M masked positions, N positions where the carry enters (the masked ones,
or all of the window), V vocabulary, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rcd.carry.base import Carry, CarryState, learnt_by
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM, View
from rcd.train.layout import Batch, Frame, Layout, frame_of
from rcd.train.loss import masked_cross_entropy
from rcd.train.residuals import ResidualSource, cold_at, confidence_of, inject_at, update_at
from rcd.train.routing import balance, watched


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
    balance: Tensor | float = 0.0
    """The load-balancing loss, times the pass's share of the step's labels, without gradient."""


Carried = tuple[Tensor, CarryState]
"""(the number of each text position [B, L], the state at the numbered ones [N])."""


class Objective(nn.Module):
    def __init__(
        self,
        model: DiffusionLM,
        *,
        carry: Carry | None = None,
        source: ResidualSource | None = None,
        reference: DiffusionLM | None = None,
        block_length: int | None = None,
        copy: str = "answer",
        flex: bool = False,
        router_balance: float = 0.0,
    ):
        """`carry` None: SeqD. Else stage 2, with states from the reference or from the target itself, as the carry
        declares; a step that has neither (trajectories without a reference) is one without."""
        super().__init__()
        assert model.holds(carry), "the model holds what the carry learns"
        if model.spread:
            raise RCDError("the model's layers are on several devices, or on disk; load it on one to train it.")
        if model.quantised:
            raise RCDError(
                f"the model's weights are quantised ({model.quantised}), and training needs floats; load it without "
                "quantize, or take the checkpoint that it was quantised from."
            )
        self.model = model
        self.carry = carry
        self.learns = learnt_by(carry, model.codebook.shape[1]) is not None
        self.source = source or ResidualSource()
        self._reference = [reference]  # in a list: it is neither trained, nor sharded, nor saved
        self.block_length = block_length or model.settings.block_length or 1
        self.copy = copy
        self.flex = flex
        self.router_balance = router_balance

    @property
    def reference(self) -> DiffusionLM | None:
        return self._reference[0]

    def forward(self, batch: Batch, generator: torch.Generator | None = None) -> Losses:
        """The loss of a batch. `generator` (CPU) draws how many passes the settings beyond the paper take; it must be
        in the same state on all processes, whose passes go together. What differs by example is in the batch."""
        frame = self.frame(batch)
        masked, weight = batch.masked, batch.weight
        state: Carried | None = None
        if self.source.trajectory and _draw(generator) < self.source.trajectory_share:
            masked, weight, state = self._trajectory(frame, generator)
        elif self.carry is not None:
            state = self._residual(frame, masked, generator)
        layout = self.lay_out(frame, masked)
        state_N = None if state is None else _pick(state, self._places(layout)[1])
        if state_N is not None and self.source.dropout:
            rows, slots = self._places(layout)[1].unbind(1)
            state_N = state_N.kept(batch.luck[rows, slots] >= self.source.dropout)
        with watched(self.model, self.router_balance > 0) as routed:
            hidden = self._hidden(self.model, layout, state_N)
        rows, slots = layout.source.unbind(1)
        total, each = masked_cross_entropy(hidden, self.model.head.weight, batch.ids[rows, slots], weight[rows, slots])
        alpha = torch.zeros((), device=total.device)
        if state_N is not None and state_N.alpha is not None:
            alpha = state_N.alpha.sum()
        uneven: Tensor | float = 0.0
        if self.router_balance:
            uneven = balance(routed, layout.real) * (batch.normaliser * batch.answer).sum()
            total, uneven = total + self.router_balance * uneven, uneven.detach()
        return Losses(total, each.sum(), torch.tensor(len(each), device=total.device), alpha.detach(), uneven)

    def frame(self, batch: Batch) -> Frame:
        attention = self.model.settings.attention
        return frame_of(batch, attention=attention, block_length=self.block_length, copy=self.copy, flex=self.flex)

    def lay_out(self, frame: Frame, masked: Tensor) -> Layout:
        return frame.lay_out(frame.batch.ids.masked_fill(masked, self.model.settings.mask_token_id), masked)

    def _places(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Where the carry enters: two of [N, 2], (row, slot) in the layout and in the text."""
        everywhere = self.carry is not None and self.carry.everywhere
        return layout.window if everywhere else (layout.noisy, layout.source)

    def _hidden(self, model: DiffusionLM, layout: Layout, state_N: CarryState | None) -> Tensor:
        """[M, D] what the model's head reads at the masked positions."""
        return _outputs(model, self._encode(model, layout, state_N), layout, layout.noisy)

    def _encode(self, model: DiffusionLM, layout: Layout, state_N: CarryState | None) -> Tensor:
        """[B, S, D] the backbone's outputs. A pass without a state has none injected; but the target of a carry with
        parameters has the cold one, which gives them a gradient (Loopholing's: of zero), so that every process and
        every resume knows the same gradients and moments."""
        ids, own = layout.ids, model.settings.mask_token_id
        if own != self.model.settings.mask_token_id:
            ids = ids.masked_fill(ids == self.model.settings.mask_token_id, own)
        embeds = model.embed(ids.clamp_max(model.settings.vocab_size - 1))
        rows, slots = self._places(layout)[0].unbind(1)
        if state_N is None and self.learns and model is self.model:
            assert self.carry is not None
            state_N = cold_at(len(rows), self.carry, model.codebook)
        if state_N is not None:
            assert self.carry is not None
            injected = inject_at(embeds[rows, slots], self.carry, state_N, model.carry_parameters)
            embeds = embeds.index_put((rows, slots), injected)
        return model.encode(embeds, View(layout.position, layout.attention))

    def _passes(self, generator: torch.Generator | None) -> int:
        """How many passes without gradient give the state of a step that is no trajectory."""
        if self.source.recycling:
            return int(torch.randint(0, self.source.recycling + 1, (), generator=generator))
        assert self.carry is not None
        if self.carry.reads_reference:
            return int(self.reference is not None)
        return int(_draw(generator) < self.carry.extra_pass_share)

    def _residual(self, frame: Frame, masked: Tensor, generator: torch.Generator | None) -> Carried | None:
        """Algorithm 1, lines 7-10: the reference reads the state; or the target itself does (recycling, and every carry
        that reads no reference)."""
        assert self.carry is not None
        batch, read = frame.batch, masked
        if self.source.noisier:
            read = masked | ((batch.extra < self.source.noisier) & batch.answer)
        passes = self._passes(generator)
        if not passes:
            return None
        layout, carry, reader = self.lay_out(frame, read), self.carry.for_training(), self.model
        state: CarryState | None = None
        if self.carry.reads_reference and not self.source.recycling:
            assert self.reference is not None
            carry, reader = self.carry.for_reference(), self.reference
        where, source = self._places(layout)
        for number in range(passes):
            last = number == passes - 1
            with torch.no_grad():
                hidden = _outputs(reader, self._encode(reader, layout, state), layout, where)
            gradient = last and self.source.codebook_gradient
            with torch.set_grad_enabled(gradient):
                state = update_at(state, hidden, reader.head.weight, carry, self.model.codebook, gradient=gradient)
        assert state is not None
        return _spread(source, batch), state

    @torch.no_grad()
    def _trajectory(self, frame: Frame, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Carried | None]:
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
        masked = torch.where(late, batch.masked, batch.answer) | tail
        state: Carried | None = None
        for _ in range(steps):
            layout = self.lay_out(frame, masked)
            where, source = self._places(layout)
            before = None if state is None else _pick(state, source)
            encoded = self._encode(self.model, layout, before)
            rows, slots = layout.source.unbind(1)
            head = self.model.head.weight
            sure = confidence_of(_outputs(self.model, encoded, layout, layout.noisy), head)
            confidence = sure.new_full(batch.ids.shape, float("-inf"))
            confidence[rows, slots] = sure
            confidence = confidence.masked_fill(tail, float("-inf"))
            commit = masked & ~tail & ((confidence > threshold) | self._best_of_block(batch, confidence))
            after = masked & ~commit
            if self.carry is not None:
                hidden = _outputs(self.model, encoded, layout, where)
                after_N = update_at(before, hidden, head, self.carry.for_training(), self.model.codebook)
                state = (_spread(source, batch), after_N)
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


def _outputs(model: DiffusionLM, encoded_BSD: Tensor, layout: Layout, where: Tensor) -> Tensor:
    """[N, D] what the head reads to predict the positions (row, slot) `where`."""
    return layout.outputs(encoded_BSD, where, model.settings.shift)


def _spread(source: Tensor, batch: Batch) -> Tensor:
    """[B, L] the number of each text position among those of `source` [N, 2]; -1 elsewhere."""
    number = torch.full(batch.ids.shape, -1, device=batch.ids.device)
    rows, slots = source.unbind(1)
    number[rows, slots] = torch.arange(len(rows), device=number.device)
    return number


def _pick(carried: Carried, source: Tensor) -> CarryState:
    """The state at other positions `source` of the same text; all of them must be known."""
    number, state = carried
    rows, slots = source.unbind(1)
    return state.rows(number[rows, slots])


def _draw(generator: torch.Generator | None) -> float:
    return float(torch.rand((), generator=generator))
