"""The masked cross-entropy of Sec. 2.1, from hidden states, without ever holding the logits of a batch.

Shapes: N positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOGITS = 2**28


def chunk_of(head_VD: Tensor) -> int:
    """Positions whose logits are held at a time."""
    return max(1, LOGITS // head_VD.shape[0])


class _LinearCrossEntropy(torch.autograd.Function):
    """sum_i w_i * -log softmax(h_i W^T)[y_i], its gradients computed chunk by chunk in the forward pass: the logits
    exist for one chunk at a time and are never recomputed."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, scale: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part] @ weight.t()).float()
            normaliser = logits.logsumexp(-1)
            losses[part] = normaliser - logits.gather(-1, target[part, None])[:, 0]
            if grad_hidden is None and grad_weight is None:
                continue
            slope = logits.sub_(normaliser[:, None]).exp_()  # p
            slope.scatter_add_(-1, target[part, None], torch.full_like(slope[:, :1], -1.0))
            slope = slope.mul_(scale[part, None]).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        slope = grads[0]
        hidden = None if grad_hidden is None else grad_hidden * slope.to(grad_hidden.dtype)
        weight = None if grad_weight is None else (grad_weight * slope).to(ctx.weight_dtype)
        return hidden, weight, None, None, None


def masked_cross_entropy(
    hidden_ND: Tensor, head_VD: Tensor, target_N: Tensor, weight_N: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """(sum of weight x cross-entropy, the cross-entropies [N] without gradient)."""
    if torch.is_autocast_enabled(hidden_ND.device.type):
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
        hidden_ND, head_VD = hidden_ND.to(dtype), head_VD.to(dtype)
    total, each = _LinearCrossEntropy.apply(hidden_ND, head_VD, target_N, weight_N.float(), chunk or chunk_of(head_VD))
    return total, each
