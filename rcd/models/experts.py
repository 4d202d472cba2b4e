"""Mixtures of experts: which experts a token goes to, and their products.

The stock routers are replaced by the same in fp32 or, where the model is wider, in its own dtype: fp64 is then fp64.
Shapes: N tokens, E experts, K experts of a token, D width, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from rcd.models.dtypes import wide

EXPERTS = "rcd_experts"


class Router(nn.Module):
    """What both kinds share; they give (router logits [N, E], weights [N, K], numbers of the experts [N, K])."""

    def __init__(self, stock: Any):
        super().__init__()
        self.weight: nn.Parameter = stock.weight
        self.top_k, self.normalised = int(stock.top_k), bool(stock.norm_topk_prob)

    @staticmethod
    def replace_all(backbone: nn.Module) -> None:
        """In the place of every stock router of the backbone, under its name."""
        for parent in list(backbone.modules()):
            for name, child in parent.named_children():
                made = ROUTERS.get(type(child).__name__)
                if made is not None:
                    setattr(parent, name, made(child))

    def probabilities(self, logits_NE: Tensor) -> Tensor:
        """[N, E] what the router gives each expert, summing up to 1 over them."""
        raise NotImplementedError


class SoftmaxRouter(Router):
    """Qwen3-MoE's: the softmax's largest K."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden.flatten(0, -2), self.weight)
        weights, chosen = self.probabilities(logits).topk(self.top_k, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    def probabilities(self, logits_NE: Tensor) -> Tensor:
        return logits_NE.softmax(-1, dtype=wide(logits_NE.dtype))


class SigmoidRouter(Router):
    """DeepSeek-V3's, which LLaDA2 has: sigmoids; a bias that is added for the choice alone; and experts in groups, of
    which only some may be chosen from, those whose two best experts have the largest sum.

    Two groups of two, one of which is chosen from, K = 1: sigmoids + bias (.9 .1 | .6 .5) sum up to 1.0 and 1.1, so
    that the third expert is chosen and not the first.
    """

    def __init__(self, stock: Any):
        super().__init__(stock)
        self.groups, self.chosen_groups = int(stock.num_group), int(stock.topk_group)
        self.scale = float(stock.routed_scaling_factor)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", stock.e_score_correction_bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = wide(hidden.dtype)
        logits = nn.functional.linear(hidden.flatten(0, -2).to(dtype), self.weight.to(dtype))
        scores = logits.sigmoid()
        wanted = (scores + self.e_score_correction_bias.to(dtype)).unflatten(-1, (self.groups, -1))
        groups = wanted.topk(2, dim=-1).values.sum(-1).topk(self.chosen_groups, dim=-1).indices
        open_ = torch.zeros_like(wanted[..., 0], dtype=torch.bool).scatter(-1, groups, True)
        chosen = wanted.masked_fill(~open_.unsqueeze(-1), float("-inf")).flatten(1).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.scale, chosen

    def probabilities(self, logits_NE: Tensor) -> Tensor:
        scores = logits_NE.sigmoid()
        return scores / scores.sum(-1, keepdim=True)


ROUTERS: dict[str, type[Router]] = {"Qwen3MoeTopKRouter": SoftmaxRouter, "Glm4MoeTopkRouter": SigmoidRouter}
"""The stock routers' classes -> ours."""


def routers(backbone: nn.Module) -> Iterator[Router]:
    return (module for module in backbone.modules() if isinstance(module, Router))


def by_expert(experts: Any, hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """[N, D] the weighted sum of every token's experts. On a CPU, and in fp64, which grouped products do not know: the
    tokens sorted by expert, one product for each expert that has any."""
    gate_ups, downs = products(experts.gate_up_proj), products(experts.down_proj)
    floats = isinstance(experts.gate_up_proj, Tensor)
    if hidden_ND.device.type == "cuda" and hidden_ND.dtype != torch.float64 and floats:
        grouped: Tensor = grouped_mm_experts_forward(experts, hidden_ND, chosen_NK, weights_NK)
        return grouped
    order = chosen_NK.flatten().argsort(stable=True)
    sizes = chosen_NK.flatten().bincount(minlength=len(downs)).tolist()
    rows = hidden_ND[order // chosen_NK.shape[1]].split(sizes)
    out = []
    for x, gate_up, down in zip(rows, gate_ups, downs, strict=True):
        if len(x):
            gate, up = gate_up(x).chunk(2, dim=-1)
            out.append(down(experts.act_fn(gate) * up))
    weighted = torch.cat(out) * weights_NK.flatten()[order, None]
    back = torch.empty_like(weighted).index_copy(0, order, weighted)
    return back.unflatten(0, chosen_NK.shape).sum(1).to(hidden_ND.dtype)


def products(experts: Tensor | nn.ModuleList) -> Sequence[Callable[[Tensor], Tensor]]:
    """The product with each expert's matrix; quantised ones are a layer each."""
    if isinstance(experts, nn.ModuleList):
        return list(experts)
    # unbind, whose gradient is one tensor; that of an index would be as large as all experts, for each of them
    return [partial(nn.functional.linear, weight=matrix) for matrix in experts.unbind()]


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, by_expert)
