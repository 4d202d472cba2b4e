"""Where stage 2's residuals come from (Algorithm 1, lines 7-10), and the settings beyond the paper.

Shapes: B rows, L slots, M masked positions, N positions where the carry enters, V vocabulary, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rcd.carry.base import Carry, CarryState
from rcd.errors import RCDError, number, whole
from rcd.residual.context import wide
from rcd.residual.distribution import Distribution, align_vocabulary
from rcd.train.loss import chunk_of


@dataclass(frozen=True)
class ResidualSource:
    """How the residual of a training step is made. The defaults are the paper's."""

    dropout: float = 0.0
    """Share of examples without a residual, so that the cold start's plain mask is in distribution."""
    recycling: int = 0
    """0: the reference gives the residual. n > 0: the target itself does, by 0 to n passes without gradient, each fed
    with the residual of the one before (after 0 passes there is none); no reference is needed."""
    noisier: float = 0.0
    """The residual is read from a state in which this share of the visible answer tokens is masked as well: decoding
    takes it from the step before, which knew less."""
    trajectory: int = 0
    """n > 0: state and residual come from 0 to n steps of the model's own decoding of the masked answer, the true token
    put wherever it would commit; the loss is on what is then still masked."""
    trajectory_share: float = 2 / 3
    """Share of the training steps that are trajectories."""
    trajectory_threshold: tuple[float, float] = (0.5, 0.99)
    """The commit threshold of a trajectory is drawn from this range."""
    trajectory_from_noise: float = 0.0
    """Share of the sequences whose trajectory begins at the random mask state instead of the masked answer: the late
    states of slow decoding, which few steps from the beginning do not reach."""
    trajectory_slow: float = 0.0
    """Share of the sequences whose trajectory commits one token a step: there a residual recurs many times while little
    else changes."""
    trajectory_tail: bool = False
    """Slow trajectories commit nothing behind the text's end: decoding one token a step never comes to those masks."""
    codebook_gradient: bool = False
    """Whether the loss reaches the codebook through delta. The paper does not say."""

    def __post_init__(self) -> None:
        number("residual.dropout", self.dropout, least=0, most=1)
        number("residual.noisier", self.noisier, least=0, most=1)
        number("residual.trajectory_share", self.trajectory_share, least=0, most=1)
        number("residual.trajectory_from_noise", self.trajectory_from_noise, least=0, most=1)
        number("residual.trajectory_slow", self.trajectory_slow, least=0, most=1)
        whole("residual.recycling", self.recycling, least=0)
        whole("residual.trajectory", self.trajectory, least=0)
        if len(self.trajectory_threshold) != 2:
            raise RCDError("residual.trajectory_threshold is a pair such as [0.5, 0.99].")
        for value in self.trajectory_threshold:
            number("residual.trajectory_threshold", value, least=0, most=1)


class _FromHidden(Distribution):
    """What hidden states predict; the logits exist only if a carry asks for them."""

    def __init__(self, hidden_BLD: Tensor, head_VD: Tensor, vocabulary: int):
        self.hidden, self.head, self.vocabulary = hidden_BLD, head_VD, vocabulary
        self.temperature = 1.0

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        flat = self.hidden.flatten(0, -2).to(self.head.dtype) @ self.head.t()
        return align_vocabulary(flat, self.vocabulary).unflatten(0, self.hidden.shape[:-1])


def cold_at(positions: int, carry: Carry, codebook_VD: Tensor) -> CarryState:
    """The state that is nothing, [N, ...] at so many positions."""
    return _flat(carry.cold((1, positions), codebook_VD))


def inject_at(embeds_ND: Tensor, carry: Carry, state_N: CarryState, learnt: nn.Module | None) -> Tensor:
    """The embeddings [N, D] of positions at all of which the carry enters."""
    where = torch.ones(1, len(embeds_ND), dtype=torch.bool, device=embeds_ND.device)
    return carry.inject(embeds_ND.unsqueeze(0), where, _row(state_N), learnt).squeeze(0)


def update_at(
    before_N: CarryState | None,
    hidden_ND: Tensor,
    head_VD: Tensor,
    carry: Carry,
    codebook_VD: Tensor,
    *,
    gradient: bool = False,
) -> CarryState:
    """What a pass hands on to the next, [N, ...], chunk by chunk, from the hidden states of whoever predicts. None
    `before`: the pass began with nothing. `gradient`: the loss may reach the codebook through it, and nothing else."""
    head_VD, hidden_ND = head_VD.detach(), hidden_ND.detach()
    codebook = codebook_VD if gradient else codebook_VD.detach()
    before = cold_at(len(hidden_ND), carry, codebook) if before_N is None else before_N

    def one(hidden: Tensor, codebook: Tensor, *before_tensors: Tensor) -> tuple[Tensor, ...]:
        predicted = _FromHidden(hidden.unsqueeze(0), head_VD, codebook.shape[0])
        state = carry.update(_row(before.with_tensors(before_tensors)), predicted, hidden.unsqueeze(0), codebook)
        return tuple(_flat(state).tensors())

    size, parts = chunk_of(head_VD), []
    for start in range(0, len(hidden_ND), size):
        hidden, *given = (tensor[start : start + size] for tensor in (hidden_ND, *before.tensors()))
        if gradient:
            parts.append(checkpoint(one, hidden, codebook, *given, use_reentrant=False))
        else:
            parts.append(one(hidden, codebook, *given))
    return before.with_tensors([torch.cat(tensors) for tensors in zip(*parts, strict=True)]) if parts else before


def _row(state_N: CarryState) -> CarryState:
    """[N, ...] as the contract has it, [1, N, ...]."""
    return state_N.with_tensors([tensor.unsqueeze(0) for tensor in state_N.tensors()])


def _flat(state_BL: CarryState) -> CarryState:
    return state_BL.with_tensors([tensor.flatten(0, 1) for tensor in state_BL.tensors()])


def confidence_of(hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
    """[M] the largest probability of each prediction."""
    head_DV = head_VD.t().to(hidden_MD.dtype)
    parts = [Distribution(part @ head_DV).p.amax(-1) for part in hidden_MD.split(chunk_of(head_VD))]
    return torch.cat(parts) if parts else hidden_MD.new_zeros(0, dtype=wide(hidden_MD))
