"""The parts of a pass in plain torch: what the fused kernels compute, and what runs where there are none.

Shapes: N slots (runs of Q consecutive tokens of one row of the cache), M = N * Q tokens, D width, H query heads,
G key/value heads, C head dimension, T cache length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rcd.residual.summary import expected_embedding, probabilities, project, summarise

__all__ = [
    "add_norm", "attend", "expected_embedding", "gated", "linear", "partial", "probabilities", "project", "rms_norm",
    "rotate_store", "silu_mul", "summarise",
]  # fmt: skip


def linear(x_NQD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Slot by slot, so that a slot's numbers do not depend on how many others there are."""
    return torch.stack([functional.linear(x, weight, bias) for x in x_NQD])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()  # as the stock norms do, also for fp64
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def partial(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product as parts [S, ...] that are still to be added up; here one."""
    return linear(x, weight, bias)[None]


def add_norm(parts: Tensor, stream: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the residual stream with a product in parts added, its norm)."""
    stream = stream + _whole(parts, stream)
    return stream, rms_norm(stream, weight, eps)


def _whole(parts: Tensor, like: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(0).to(like.dtype)


def gated(x: Tensor, gate_up: Tensor) -> Tensor:
    """silu(x gate) * (x up); both matrices in one, gate first."""
    return silu_mul(linear(x, gate_up))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def rotate_store(
    parts_SNQX: Tensor,
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
    """Split q, k and v (a product in parts), norm q and k (Qwen3), turn them to their positions, and write k and v to
    the cache, where position is slot, but for the first `looking` tokens of every slot. Returns q [N, Q, H, C]."""
    (_, n, q, _), (_, groups, _, c) = parts_SNQX.shape, keys_RGTC.shape
    query, key, value = _whole(parts_SNQX, keys_RGTC).view(n, q, -1, c).split((heads, groups, groups), dim=2)
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
