"""The parts of a pass in plain torch: what the fused kernels compute, and what runs where there are none.

Shapes: N slots (runs of Q consecutive tokens of one row of the cache), M = N * Q tokens, D width, H query heads,
G key/value heads, C head dimension, T cache length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rcd.residual.summary import expected_embedding, probabilities, project, summarise

__all__ = [
    "Normed", "add_norm", "added", "attend", "expected_embedding", "gated", "linear", "probabilities", "project",
    "rms_norm", "rotate_store", "silu_mul", "summarise",
]  # fmt: skip


class Normed(NamedTuple):
    """Tokens on their way into a product: normed, or with the norm's division still to be done (behind the product,
    since a factor of a token is one of all its outputs)."""

    value: Tensor
    """[..., D]"""
    squares: Tensor | None = None
    """[parts, M] every token's sum of squares, to be added up, where the division is still to be done."""
    eps: float = 0.0

    def finished(self) -> Tensor:
        if self.squares is None:
            return self.value
        mean = self.squares.sum(0).view(*self.value.shape[:-1], 1) / self.value.shape[-1]
        return (self.value * torch.rsqrt(mean + self.eps)).to(self.value.dtype)


def linear(x_NQD: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Slot by slot, so that a slot's numbers do not depend on how many others there are."""
    value = x_NQD.finished() if isinstance(x_NQD, Normed) else x_NQD
    return torch.stack([functional.linear(x, weight, bias) for x in value])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()  # as the stock norms do, also for fp64
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_norm(x: Tensor, stream: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the residual stream with x added, its norm)."""
    stream = stream + x
    return stream, rms_norm(stream, weight, eps)


def added(
    x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor, norm: Tensor, eps: float, counts: Tensor
) -> tuple[Tensor, Normed]:
    """(the residual stream with a product added, its norm)."""
    stream, normed = add_norm(linear(x, weight, bias), stream, norm, eps)
    return stream, Normed(normed)


def gated(x: Tensor | Normed, gate_up: Tensor) -> Tensor:
    """silu(x gate) * (x up); both matrices in one, gate first."""
    return silu_mul(linear(x, gate_up))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def rotate_store(
    qkv_NQX: Tensor,
    keys_RGTC: Tensor,
    values_RGTC: Tensor,
    row_N: Tensor,
    start_N: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor, float] | None = None,
    looking: int = 0,
) -> Tensor:
    """Split q, k and v, norm q and k (Qwen3), turn them to their positions, and write k and v to
    the cache, where position is slot, but for the first `looking` tokens of every slot. Returns q [N, Q, H, C]."""
    (n, q, _), (_, groups, _, c) = qkv_NQX.shape, keys_RGTC.shape
    query, key, value = qkv_NQX.view(n, q, -1, c).split((heads, groups, groups), dim=2)
    if norms is not None:
        query, key = rms_norm(query, norms[0], norms[2]), rms_norm(key, norms[1], norms[2])
    position = start_N[:, None].long() + torch.arange(q, device=start_N.device)
    cos, sin = cos_TC[position].unsqueeze(2), sin_TC[position].unsqueeze(2)
    row, place = row_N.long()[:, None].expand_as(position)[:, looking:], position[:, looking:]
    keys_RGTC[row, :, place] = _rotated(key, cos, sin)[:, looking:]
    values_RGTC[row, :, place] = value[:, looking:]
    return _rotated(query, cos, sin)


def attend(
    query_NQHC: Tensor, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor, end_NQ: Tensor, scale: float,
    order_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Every query sees the slots [0, end) of its row. Returns [N, Q, H * C]. `order` is that in which a GPU takes the
    slots: those of one row together, so that its keys are read once."""
    out = []
    grouped = query_NQHC.shape[2] != keys_RGTC.shape[1]
    for query, row, end in zip(query_NQHC, row_N.tolist(), end_NQ, strict=True):
        most = int(end.max())
        seen = torch.arange(most, device=end.device) < end[:, None]
        mask = None if bool(seen.all()) else seen
        k, v = keys_RGTC[row, :, :most], values_RGTC[row, :, :most]
        one = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=grouped
        )
        out.append(one[0].transpose(0, 1).flatten(1))
    return torch.stack(out)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
