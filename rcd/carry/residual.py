"""RCD: every discarded prediction comes back as residual context (Sec. 3.1 and 3.3, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from rcd import registry
from rcd.carry.base import TensorState
from rcd.errors import number, one_of
from rcd.residual.alpha import normalised, weigh, weight
from rcd.residual.context import interpolate, soft_embedding, top1_embedding
from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes


@dataclass(frozen=True)
class ResidualState(TensorState):
    """(alpha, delta) per position: B x L x D between steps, not the distribution's B x L x V."""

    alpha: Tensor
    delta: Tensor

    @classmethod
    def zero(cls, passes: Passes, codebook_VD: Tensor) -> Self:
        """No residual at any position: the cold start. What a subclass adds is zero, too."""
        batch, length, _ = passes.shape
        delta = torch.zeros(batch, length, codebook_VD.shape[1], device=passes.device, dtype=codebook_VD.dtype)
        alpha = torch.zeros(batch, length, device=passes.device)
        return cls(alpha, delta, *(torch.zeros_like(alpha) for _ in fields(cls)[2:]))

    def kept(self, keep: Tensor) -> ResidualState:
        """The residual where `keep`, none elsewhere."""
        return ResidualState(self.alpha * keep, self.delta)


@dataclass(frozen=True)
class Residual:
    """The carry of the paper. Where the paper leaves doubt, the choice is a setting."""

    everywhere: ClassVar[bool] = False
    alpha: str = "entropy"
    """The weight, one of the eight of fig:ablation-on-alpha (`rcd list alpha`)."""
    alpha_scale: float = 1.0
    """Multiplies the weight; the product is kept in [0, alpha_most]."""
    alpha_most: float = 1.0
    """The largest weight that a residual gets, so that a mask can still be told from a token. The paper has none."""
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
    and gives the residual at every step (the setting of fig:ablation-on-alpha); the start is then never asked for."""

    def __post_init__(self) -> None:
        one_of("alpha", self.alpha, registry.names("alpha"))
        one_of("alpha", self.top1_alpha, registry.names("alpha"))
        one_of("start", self.start, registry.names("start"))
        one_of("t_res_on", self.t_res_on, ("alpha", "both"))
        one_of("source", self.source, ("self", "reference"))
        number("t_res", self.t_res, least=1e-3, why="1 leaves the distribution as it is")
        number("concentration", self.concentration, least=1e-6)
        number("alpha_scale", self.alpha_scale, least=0)
        number("alpha_most", self.alpha_most, least=0, most=1)
        number("alpha_value", self.alpha_value, least=0, most=1)

    @property
    def needs_reference(self) -> bool:
        return self.source == "reference" or self.start == "reference"

    @property
    def expects(self) -> bool:
        """Whether every step reads the expectation of its own prediction, which may then be computed in another way."""
        return self.source == "self" and self.alpha != "top1"

    @property
    def starts_itself(self) -> bool:
        """Whether a block begins with a pass that only predicts, of which the residual is computed as of any other."""
        return self.source == "self" and self.start == "self" and (self.t_res == 1.0 or self.t_res_at_start)

    def start_state(self, passes: Passes, codebook_VD: Tensor) -> ResidualState:
        """Algorithm 2, lines 2-5."""
        if self.starts_itself:
            return self.residual(passes.own(), codebook_VD)
        p = registry.get("start", self.start)(passes, self.concentration)
        if p is None:
            return ResidualState.zero(passes, codebook_VD)
        if self.t_res_at_start and self.t_res != 1.0:
            return self.residual(Distribution(p.log()), codebook_VD)
        return self._of(p, codebook_VD)

    def refresh(self, state: ResidualState | None, passes: Passes, codebook_VD: Tensor) -> ResidualState:
        """The state that the next step sees: the start's, the last step's own, or the reference's reading of now."""
        if self.source == "reference":
            return self.residual(passes.reference(), codebook_VD)
        return self.start_state(passes, codebook_VD) if state is None else state

    def inject(
        self, embeds_BLD: Tensor, where_BL: Tensor, state: ResidualState, learnt: nn.Module | None = None
    ) -> Tensor:
        return interpolate(embeds_BLD, where_BL, state.alpha, state.delta)

    def update(
        self, state: ResidualState, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor
    ) -> ResidualState:
        return state if self.source == "reference" else self.residual(predicted, codebook_VD)

    def residual(self, predicted: Distribution, codebook_VD: Tensor) -> ResidualState:
        """Algorithm 2, lines 21-25: alpha at T_res, delta at 1 or at T_res."""
        h = normalised(predicted.entropy_at(self.t_res), predicted.logits.shape[-1])
        c = predicted.at(self.t_res).peak if "confidence" in self._weight else h
        alpha = weigh(self._weight, h, c, **self._limits)
        source = predicted.at(self.t_res) if self.t_res_on == "both" else predicted
        delta = codebook_VD[source.best()] if self.alpha == "top1" else source.expectation(codebook_VD)
        return ResidualState(alpha, delta)

    def _of(self, p: Tensor, codebook_VD: Tensor) -> ResidualState:
        """alpha and delta of a start's probabilities."""
        embedding = top1_embedding if self.alpha == "top1" else soft_embedding
        return ResidualState(weight(self._weight, p, **self._limits), embedding(p, codebook_VD))

    @property
    def _weight(self) -> str:
        return self.top1_alpha if self.alpha == "top1" else self.alpha

    @property
    def _limits(self) -> dict[str, float]:
        return {"scale": self.alpha_scale, "value": self.alpha_value, "most": self.alpha_most}
