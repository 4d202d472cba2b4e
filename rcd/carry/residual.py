"""RCD: every discarded prediction comes back as residual context (Sec. 3.1 and 3.3, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Self

import torch
from torch import Tensor, nn

from rcd import registry
from rcd.carry.base import Carry, CarryState
from rcd.residual.alpha import normalised, weigh, weight
from rcd.residual.context import interpolate, soft_embedding, top1_embedding, wide
from rcd.residual.distribution import Distribution
from rcd.residual.start import DRAWS, PASS, Passes
from rcd.settings import setting, settings


@dataclass(frozen=True)
class ResidualState(CarryState):
    """(alpha, delta) per position: B x L x D between steps, not the distribution's B x L x V."""

    alpha: Tensor = field()
    delta: Tensor = field()

    @classmethod
    def zero(cls, shape_BL: tuple[int, int], codebook_VD: Tensor) -> Self:
        """No residual at any position: the cold start. What a subclass adds is zero, too."""
        delta = torch.zeros(*shape_BL, codebook_VD.shape[1], device=codebook_VD.device, dtype=codebook_VD.dtype)
        alpha = torch.zeros(shape_BL, device=codebook_VD.device, dtype=wide(codebook_VD))
        return cls(alpha, delta, *(torch.zeros_like(alpha) for _ in fields(cls)[2:]))


@settings
class Residual(Carry):
    """The carry of the paper. Where the paper leaves doubt, the choice is a setting."""

    method = "RCD"
    reads_reference = True
    reads_codebook = True

    alpha: str = setting(
        default="entropy", help="The weight, one of the eight of fig:ablation-on-alpha (`rcd list alpha`).",
        choices="alpha",
    )  # fmt: skip
    alpha_scale: float = setting(
        default=1.0, help="Multiplies the weight; the product is kept in [0, alpha_most].", ge=0
    )
    alpha_most: float = setting(
        default=1.0,
        help="The largest weight that a residual gets, so that a mask can still be told from a token. The paper has "
        "none.",
        ge=0, le=1,
    )  # fmt: skip
    alpha_value: float = setting(default=0.3, help="The constant of the weight `fixed` (0.3 in the paper).", ge=0, le=1)
    top1_alpha: str = setting(
        default="entropy",
        help="The weight under `top1`. The paper replaces the distribution by its top token as the residual signal and "
        "does not say with which alpha (the entropy of a one-hot row would be 0): ours is that of the full "
        "distribution.",
        choices="alpha",
    )
    start: str = setting(
        default="zero", help="The first step's residual, one of tab:init-ablation (`rcd list start`).", choices="start"
    )
    concentration: float = setting(
        default=1.0, help="Of the Dirichlet start; the paper does not give it.", ge=1e-6, le=1e6
    )
    t_res: float = setting(
        default=1.0, help="T_res, the residual temperature of Sec. 3.3.", ge=1e-3, le=1e6,
        why="1 leaves the distribution as it is",
    )  # fmt: skip
    t_res_on: str = setting(
        default="alpha",
        help="`alpha`: T_res scales the entropy weight only (Algorithm 2). `both`: the residual vector too (Sec. 3.3: "
        '"the distribution used for residual calculation"). At t_res = 1 they are the same.',
        choices=("alpha", "both"),
    )
    t_res_at_start: bool = setting(
        default=False,
        help="Algorithm 2 computes the first residual without T_res; true applies it there as well.",
    )
    source: str = setting(
        default="self",
        help="`self`: the residual is the model's own last prediction. `reference`: a reference model reads the "
        "current state and gives the residual at every step (the setting of fig:ablation-on-alpha); the start is then "
        "never asked for.",
        choices=("self", "reference"),
    )

    @property
    def start_pass(self) -> str:
        return PASS.get(self.start, "none") if self.source == "self" else "none"

    @property
    def start_draws(self) -> bool:
        return self.source == "self" and self.start in DRAWS

    @property
    def step_pass(self) -> str:
        return "reference" if self.source == "reference" else "none"

    @property
    def recalls(self) -> bool:
        return self.source == "reference"

    @property
    def expects(self) -> bool:
        reads = self.source == "self" and self.alpha != "top1"
        return reads and (self.t_res_on == "alpha" or self.t_res == 1.0)

    @property
    def entropy_temperature(self) -> float:
        return self.t_res

    @property
    def strongest(self) -> float:
        return min(self.alpha_most, self.alpha_scale * (self.alpha_value if self._weight == "fixed" else 1.0))

    def for_training(self) -> Residual:
        return replace(self, source="self")

    def for_ablation(self) -> Residual:
        return self

    def for_reference(self) -> Residual:
        """Algorithm 1 reads the reference without T_res."""
        return replace(self, source="self", t_res=1.0)

    def cold(self, shape_BL: tuple[int, int], codebook_VD: Tensor) -> ResidualState:
        return ResidualState.zero(shape_BL, codebook_VD)

    def begin(self, predicted: Distribution | None, passes: Passes, codebook_VD: Tensor) -> ResidualState:
        """Algorithm 2, lines 2-5: the start's residual, without T_res unless `t_res_at_start`."""
        if self.source == "reference":
            return self.cold(passes.shape[:2], codebook_VD)
        same = self.t_res == 1.0 or self.t_res_at_start
        if predicted is not None and self.start_pass == "own" and same:
            return self.residual(predicted, codebook_VD)
        p = registry.get("start", self.start)(predicted, passes, self.concentration)
        if p is None:
            return self.cold(passes.shape[:2], codebook_VD)
        p = p.to(wide(p, codebook_VD))
        if self.t_res_at_start and self.t_res != 1.0:
            return self.residual(Distribution(p.log()), codebook_VD)
        return self._of(p, codebook_VD)

    def refresh(self, state: ResidualState, predicted: Distribution, codebook_VD: Tensor) -> ResidualState:
        """The reference's reading of now."""
        return self.residual(predicted, codebook_VD)

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
