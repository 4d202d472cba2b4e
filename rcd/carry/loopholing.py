"""Loopholing: the hidden states of the last step are added to the input embeddings (Jo et al. 2025).

e = E(z) + LN(h), where h is what the head reads (after the backbone's final norm), carried from step to step, and LN
has a weight and a bias that are learnt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rcd.carry.base import Carry, CarryState
from rcd.residual.context import wide
from rcd.residual.distribution import Distribution
from rcd.settings import setting, settings


@dataclass(frozen=True)
class HiddenState(CarryState):
    """h per position, B x L x D. An all-zero h is none: the first step's, or that of a position left out."""

    hidden: Tensor


@settings
class Loopholing(Carry):
    """The rival of tab:comparison.

    h enters at every position of the window: at masks, at committed tokens, and at the prompt's tokens in the first
    block of a block diffusion model. Positions that no head reads have none: the prompt of a bidirectional canvas, and
    the finished blocks in a cache, which is computed from tokens alone. Under Dream's shift, the h of a position is the
    output that predicts it, one to the left. Where h is zero nothing is added, LN's bias neither, so that the first
    step is SeqD's to the last bit (with the bias, as the original has it, it would move with training).
    """

    everywhere = True
    scalable = False

    two_passes: float = setting(
        default=0.5,
        help="Training: the share of steps with two passes, the first with h = 0, the second with the stopped gradient "
        "of the first's h. The others have h = 0. Trajectories and recycling take their place where they are set.",
        ge=0, le=1,
    )  # fmt: skip
    init: float = setting(
        default=1.0,
        help="What LN's weight begins with. 1 is the original's; 0 begins as SeqD, which is gentler to a pretrained "
        "model.",
        ge=0,
    )

    @property
    def extra_pass_share(self) -> float:
        return self.two_passes

    def parameters(self, width: int) -> nn.Module:
        norm = nn.LayerNorm(width)
        nn.init.constant_(norm.weight, self.init)
        return norm

    def cold(self, shape_BL: tuple[int, int], codebook_VD: Tensor) -> HiddenState:
        return HiddenState(codebook_VD.new_zeros(*shape_BL, codebook_VD.shape[1]))

    def inject(
        self, embeds_BLD: Tensor, where_BL: Tensor, state: HiddenState, learnt: nn.Module | None = None
    ) -> Tensor:
        assert isinstance(learnt, nn.LayerNorm), "the model holds the carry's parameters"
        dtype = wide(embeds_BLD)
        embeds, hidden = embeds_BLD.to(dtype), state.hidden.to(dtype)
        added = nn.functional.layer_norm(
            hidden, learnt.normalized_shape, learnt.weight.to(dtype), learnt.bias.to(dtype), learnt.eps
        )
        enters = where_BL.unsqueeze(-1) & hidden.any(-1, keepdim=True)
        return torch.where(enters, embeds + added, embeds).to(embeds_BLD.dtype)

    def update(
        self, state: HiddenState, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor
    ) -> HiddenState:
        return HiddenState(hidden_BLD)
