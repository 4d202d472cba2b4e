"""RCD: every discarded prediction comes back as residual context (Sec. 3.1 and 3.3, Algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rcd import registry
from rcd.errors import RCDError, unknown_name
from rcd.residual.alpha import weight
from rcd.residual.context import interpolate, soft_embedding, top1_embedding
from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes


@dataclass(frozen=True)
class ResidualState:
    """(alpha, delta) per position: B x L x D between steps, not the distribution's B x L x V."""

    alpha: Tensor
    delta: Tensor

    def rows(self, index: Tensor) -> ResidualState:
        return ResidualState(self.alpha[index], self.delta[index])

    def put(self, index: Tensor, other: ResidualState) -> ResidualState:
        alpha, delta = self.alpha.clone(), self.delta.clone()
        alpha[index], delta[index] = other.alpha, other.delta
        return ResidualState(alpha, delta)


@dataclass(frozen=True)
class Residual:
    """The carry of the paper. Where the paper leaves doubt, the choice is a setting."""

    alpha: str = "entropy"
    """The weight, one of the eight of fig:ablation-on-alpha (`rcd list alpha`)."""
    alpha_scale: float = 1.0
    """Multiplies the weight; the product is kept in [0, 1]."""
    alpha_value: float = 0.3
    """The constant of the weight `fixed` (0.3 in the paper)."""
    top1_alpha: str = "entropy"
    """The weight under `top1`. The paper replaces the distribution by its top token as the residual signal and does
    not say with which alpha (the entropy of a one-hot row would be 0): ours is that of the full distribution."""
    start: str = "zero"
    """The first step's residual, one of tab:init-ablation (`rcd list start`)."""
    concentration: float = 1.0
    """Of the Dirichlet start; the paper does not give it."""
    t_res: float = 1.0
    """T_res, the residual temperature of Sec. 3.3."""
    t_res_on: str = "alpha"
    """`alpha`: T_res scales the entropy weight only (Algorithm 2). `both`: the residual vector too (Sec. 3.3: "the
    distribution used for residual calculation"). At t_res = 1 they are the same."""
    t_res_at_start: bool = False
    """Algorithm 2 computes the first residual without T_res; true applies it there as well."""
    source: str = "self"
    """`self`: the residual is the model's own last prediction. `reference`: a reference model reads the current state
    and gives the residual at every step (the setting of fig:ablation-on-alpha)."""

    def __post_init__(self) -> None:
        for kind, name in (("alpha", self.alpha), ("alpha", self.top1_alpha), ("start", self.start)):
            if name not in registry.names(kind):
                raise unknown_name(kind, name, registry.names(kind))
        if self.t_res_on not in ("alpha", "both"):
            raise unknown_name("t_res_on", self.t_res_on, ("alpha", "both"))
        if self.source not in ("self", "reference"):
            raise unknown_name("source", self.source, ("self", "reference"))
        if not 0 < self.t_res < math.inf:
            raise RCDError(f"t_res must be above 0, not {self.t_res}; 1 leaves the distribution as it is.")
        if not 0 < self.concentration < math.inf:
            raise RCDError(f"the Dirichlet concentration must be above 0, not {self.concentration}.")
        if not 0 <= self.alpha_scale < math.inf:
            raise RCDError(f"alpha_scale must be 0 or more, not {self.alpha_scale}.")
        if not 0 <= self.alpha_value <= 1:
            raise RCDError(f"alpha_value must be in [0, 1], not {self.alpha_value}.")

    @property
    def needs_reference(self) -> bool:
        return self.source == "reference" or self.start == "reference"

    def start_state(self, passes: Passes, codebook_VD: Tensor) -> ResidualState:
        """Algorithm 2, lines 2-5. The cold start stores zeros and computes nothing."""
        batch, length, _ = passes.shape
        if self.start == "zero":
            return ResidualState(
                torch.zeros(batch, length, device=passes.device),
                torch.zeros(batch, length, codebook_VD.shape[1], device=passes.device, dtype=codebook_VD.dtype),
            )
        p = registry.get("start", self.start)(passes, self.concentration)
        if self.t_res_at_start and self.t_res != 1.0:
            return self.residual(Distribution(p.log()), codebook_VD)
        return self._residual(p, p, codebook_VD)

    def refresh(self, state: ResidualState | None, passes: Passes, codebook_VD: Tensor) -> ResidualState:
        """The state that the next step sees: the start's, the last step's own, or the reference's reading of now."""
        if self.source == "reference":
            p = passes.reference().p
            return self._residual(p, p, codebook_VD)
        return self.start_state(passes, codebook_VD) if state is None else state

    def inject(self, embeds_BLD: Tensor, masked_BL: Tensor, state: ResidualState) -> Tensor:
        return interpolate(embeds_BLD, masked_BL, state.alpha, state.delta)

    def update(
        self, state: ResidualState, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor
    ) -> ResidualState:
        return state if self.source == "reference" else self.residual(predicted, codebook_VD)

    def residual(self, predicted: Distribution, codebook_VD: Tensor) -> ResidualState:
        """Algorithm 2, lines 21-25: alpha at T_res, delta at 1 or at T_res."""
        tempered = predicted.at(self.t_res).p
        return self._residual(tempered, tempered if self.t_res_on == "both" else predicted.p, codebook_VD)

    def _residual(self, p_alpha: Tensor, p_delta: Tensor, codebook_VD: Tensor) -> ResidualState:
        top1 = self.alpha == "top1"
        name = self.top1_alpha if top1 else self.alpha
        alpha = weight(name, p_alpha, scale=self.alpha_scale, value=self.alpha_value)
        embedding = top1_embedding if top1 else soft_embedding
        return ResidualState(alpha, embedding(p_delta, codebook_VD))
