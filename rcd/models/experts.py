"""Mixtures of experts: which experts a token goes to, and their products.

The stock routers are replaced by the same in fp32 or, where the model is wider, in its own dtype: fp64 is then fp64.
Shapes: N tokens, E experts, K experts of a token, S = N x K, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rcd.models.dtypes import wide

EXPERTS = "rcd_experts"
ALIGNED = 8
"""Numbers of a row, of 16 bits each or more: torch's grouped products want multiples of 16 bytes."""


class Router(nn.Module):
    """What both kinds share; they give (router logits [N, E], weights [N, K], numbers of the experts [N, K])."""

    def __init__(self, stock: Any):
        super().__init__()
        self.weight: nn.Parameter = stock.weight
        self.top_k, self.normalised = int(stock.top_k), bool(stock.norm_topk_prob)
        self.count = int(stock.num_experts)

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
        logits = linear(hidden.flatten(0, -2), self.weight)
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
        with torch.autocast(hidden.device.type, enabled=False):  # fp32 in bf16 training, too
            logits = linear(hidden.flatten(0, -2).to(dtype), self.weight.to(dtype))
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


def mixtures(backbone: nn.Module) -> Iterator[tuple[Router, nn.Module]]:
    """(router, experts) of every layer that has some."""
    for module in backbone.modules():
        if isinstance(getattr(module, "gate", None), Router):
            yield module.gate, module.experts  # type: ignore[misc]


def by_expert(experts: Any, hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """[N, D] the weighted sum of every token's experts: the tokens sorted by expert, then products expert by expert."""
    expert, order = chosen_NK.flatten().sort(stable=True)
    computed = _grouped if _groups(experts, hidden_ND) else _one_by_one
    weighted = computed(experts, hidden_ND[order // chosen_NK.shape[1]], expert) * weights_NK.flatten()[order, None]
    back = torch.empty_like(weighted).index_copy(0, order, weighted)
    return back.unflatten(0, chosen_NK.shape).sum(1).to(hidden_ND.dtype)


def products(experts: Tensor | nn.ModuleList) -> Sequence[Callable[[Tensor], Tensor]]:
    """The product with each expert's matrix; quantised ones are a layer each."""
    if isinstance(experts, nn.ModuleList):
        return list(experts)
    # unbind, whose gradient is one tensor; that of an index would be as large as all experts, for each of them
    return [partial(linear, weight=matrix) for matrix in experts.unbind()]


def _one_by_one(experts: Any, x_SD: Tensor, expert_S: Tensor) -> Tensor:
    """[S, D] one product for each expert that has any token."""
    up, down = products(experts.gate_up_proj), products(experts.down_proj)
    rows = x_SD.split(expert_S.bincount(minlength=len(down)).tolist())
    return torch.cat([down[e](_gated(experts, up[e](x))) for e, x in enumerate(rows) if len(x)])


def _groups(experts: Any, hidden_ND: Tensor) -> bool:
    """Whether torch's grouped products know the dtype (compiled, bf16 alone) and the device, and rows of such lengths;
    quantised matrices they do not."""
    kind = hidden_ND.device.type
    if kind not in ("cpu", "cuda") or not isinstance(experts.down_proj, Tensor):
        return False
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
    known = dtype == torch.bfloat16 or (dtype != torch.float64 and not torch.compiler.is_compiling())
    return known and all(size % ALIGNED == 0 for size in experts.down_proj.shape[1:])


def _grouped(experts: Any, x_SD: Tensor, expert_S: Tensor) -> Tensor:
    """The same without host syncs: grouped products, which know no autocast."""
    kind, every = x_SD.device.type, torch.arange(len(experts.down_proj), device=x_SD.device)
    ends = torch.searchsorted(expert_S, every, right=True).int()
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def product(x: Tensor, matrices: Tensor) -> Tensor:
        dtype = half or matrices.dtype
        return nn.functional.grouped_mm(x.to(dtype), matrices.to(dtype).transpose(1, 2), offs=ends)

    return product(_gated(experts, product(x_SD, experts.gate_up_proj)), experts.down_proj)


def _gated(experts: Any, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    mixed: Tensor = experts.act_fn(gate) * up
    return mixed


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, by_expert)
