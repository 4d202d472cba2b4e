"""Carries as another package would define them: nothing of them is known to `rcd`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rcd.carry.base import Carry, CarryState
from rcd.residual.distribution import Distribution
from rcd.settings import setting, settings


@dataclass(frozen=True)
class MemoryState(CarryState):
    """A running mean of the most probable tokens' embeddings."""

    mean: Tensor
    count: Tensor


@settings
class Memory(Carry):
    """Without learnt parameters; every state needs the one before."""

    reads_codebook = True
    decay: float = setting(default=0.5, help="How much of the past is kept.", ge=0, le=1)

    def cold(self, shape_BL: tuple[int, int], codebook_VD: Tensor) -> MemoryState:
        return MemoryState(
            codebook_VD.new_zeros(*shape_BL, codebook_VD.shape[1]), codebook_VD.new_zeros(shape_BL, dtype=torch.long)
        )

    def inject(self, embeds_BLD: Tensor, where_BL: Tensor, state: Any, learnt: nn.Module | None = None) -> Tensor:
        return torch.where(where_BL.unsqueeze(-1), embeds_BLD + state.mean, embeds_BLD)

    def update(self, state: Any, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor) -> MemoryState:
        assert predicted.logits.dim() == hidden_BLD.dim() == state.mean.dim() == 3, "B x L x ..., as declared"
        fresh = codebook_VD[predicted.best()]
        return MemoryState(self.decay * state.mean + (1 - self.decay) * fresh, state.count + 1)


@dataclass(frozen=True)
class GatedState(CarryState):
    hidden: Tensor


@dataclass(frozen=True)
class Gated(Carry):
    """With learnt parameters, begun at random; a plain dataclass."""

    everywhere = True
    share: float = 1.0

    @property
    def extra_pass_share(self) -> float:
        return self.share

    def parameters(self, width: int) -> nn.Module:
        return nn.Linear(width, width)

    def cold(self, shape_BL: tuple[int, int], codebook_VD: Tensor) -> GatedState:
        return GatedState(codebook_VD.new_zeros(*shape_BL, codebook_VD.shape[1]))

    def inject(self, embeds_BLD: Tensor, where_BL: Tensor, state: Any, learnt: nn.Module | None = None) -> Tensor:
        assert learnt is not None
        gate = state.hidden.any(-1, keepdim=True) & where_BL.unsqueeze(-1)
        return torch.where(gate, embeds_BLD + torch.tanh(learnt(state.hidden)), embeds_BLD)

    def update(self, state: Any, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor) -> GatedState:
        assert hidden_BLD.dim() == 3, "B x L x D, as declared"
        return GatedState(hidden_BLD)
