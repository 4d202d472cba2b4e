"""Loopholing: the hidden states of the last step are added to the input embeddings (Jo et al. 2025).

e = E(z) + LN(h), where h is what the head reads (after the backbone's final norm), carried from step to step, and LN
has a weight and a bias that are learnt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rcd.carry.base import TensorState
from rcd.errors import number
from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes


@dataclass(frozen=True)
class HiddenState(TensorState):
    """h per position, B x L x D. An all-zero h is none: the first step's, or that of a position left out."""

    alpha: ClassVar[None] = None
    hidden: Tensor

    def kept(self, keep: Tensor) -> HiddenState:
        """h where `keep`, none elsewhere."""
        return HiddenState(self.hidden * keep.unsqueeze(-1))


@dataclass(frozen=True)
class Loopholing:
    """The rival of tab:comparison.

    h enters at every position of the window: at masks, at committed tokens, and at the prompt's tokens in the first
    block of a block diffusion model. Positions that no head reads have none: the prompt of a bidirectional canvas, and
    the finished blocks in a cache, which is computed from tokens alone. Under Dream's shift, the h of a position is the
    output that predicts it, one to the left. Where h is zero nothing is added, LN's bias neither, so that the first
    step is SeqD's to the last bit (with the bias, as the original has it, it would move with training).
    """

    needs_reference: ClassVar[bool] = False
    everywhere: ClassVar[bool] = True
    two_passes: float = 0.5
    """Training: the share of steps with two passes, the first with h = 0, the second with the stopped gradient of the
    first's h. The others have h = 0. Trajectories and recycling take their place where they are set."""
    init: float = 1.0
    """What LN's weight begins with. 1 is the original's; 0 begins as SeqD, which is gentler to a pretrained model."""

    def __post_init__(self) -> None:
        number("two_passes", self.two_passes, least=0, most=1)
        number("init", self.init, least=0)

    def parameters(self, width: int) -> nn.Module:
        norm = nn.LayerNorm(width)
        nn.init.constant_(norm.weight, self.init)
        return norm

    def refresh(self, state: HiddenState | None, passes: Passes, codebook_VD: Tensor) -> HiddenState:
        if state is not None:
            return state
        batch, length, _ = passes.shape
        shape = (batch, length, codebook_VD.shape[1])
        return HiddenState(torch.zeros(shape, device=passes.device, dtype=codebook_VD.dtype))

    def inject(
        self, embeds_BLD: Tensor, where_BL: Tensor, state: HiddenState, learnt: nn.Module | None = None
    ) -> Tensor:
        assert isinstance(learnt, nn.LayerNorm), "the model holds the carry's parameters"
        wide = torch.promote_types(embeds_BLD.dtype, torch.float32)
        embeds, hidden = embeds_BLD.to(wide), state.hidden.to(wide)
        added = nn.functional.layer_norm(
            hidden, learnt.normalized_shape, learnt.weight.to(wide), learnt.bias.to(wide), learnt.eps
        )
        enters = where_BL.unsqueeze(-1) & hidden.any(-1, keepdim=True)
        return torch.where(enters, embeds + added, embeds).to(embeds_BLD.dtype)

    def update(
        self, state: HiddenState, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor
    ) -> HiddenState:
        return HiddenState(hidden_BLD)
