"""Where stage 2's residuals come from (Algorithm 1, lines 7-10), and the settings beyond the paper.

Shapes: B rows, L slots, M masked positions, N positions where the carry enters, V vocabulary, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rcd.carry.loopholing import HiddenState, Loopholing
from rcd.carry.residual import Residual, ResidualState
from rcd.errors import RCDError, number, whole
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


TrainedCarry = Residual | Loopholing
"""The carries that are trained; the others are for models as they are."""
TrainedState = ResidualState | HiddenState


def state_of(
    hidden_ND: Tensor, head_VD: Tensor, carry: TrainedCarry, codebook_VD: Tensor, *, gradient: bool = False
) -> TrainedState:
    """What a pass hands on to the next: its hidden states without their gradient, or alpha and delta."""
    if isinstance(carry, Loopholing):
        return HiddenState(hidden_ND.detach())
    return residual_of(hidden_ND, head_VD, carry, codebook_VD, gradient=gradient)


def residual_of(
    hidden_MD: Tensor,
    head_VD: Tensor,
    carry: Residual,
    codebook_VD: Tensor,
    *,
    gradient: bool = False,
) -> ResidualState:
    """alpha and delta at the masked positions, from the hidden states of whoever predicts, chunk by chunk."""

    def one(part: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
        logits = align_vocabulary(part @ head_VD.t(), codebook.shape[0])
        state = carry.residual(Distribution(logits), codebook)
        return state.alpha, state.delta

    head_VD, hidden_MD = head_VD.detach(), hidden_MD.detach()
    codebook = codebook_VD if gradient else codebook_VD.detach()
    alphas, deltas = [], []
    for part in hidden_MD.to(head_VD.dtype).split(chunk_of(head_VD)):
        if gradient:
            alpha, delta = checkpoint(one, part, codebook, use_reentrant=False)
        else:
            alpha, delta = one(part, codebook)
        alphas.append(alpha.detach())
        deltas.append(delta)
    if not alphas:
        return ResidualState(codebook.new_zeros(0, dtype=torch.float32), codebook.new_zeros(0, codebook.shape[1]))
    return ResidualState(torch.cat(alphas), torch.cat(deltas))


def confidence_of(hidden_MD: Tensor, head_VD: Tensor) -> Tensor:
    """[M] the largest probability of each prediction."""
    head_DV = head_VD.t().to(hidden_MD.dtype)
    parts = [Distribution(part @ head_DV).p.amax(-1) for part in hidden_MD.split(chunk_of(head_VD))]
    return torch.cat(parts) if parts else hidden_MD.new_zeros(0, dtype=torch.float32)
