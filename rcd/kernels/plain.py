"""The parts of a pass in plain torch: what the fused kernels compute, and what runs where there are none.

Shapes: N slots (runs of Q consecutive tokens of one row of the cache), M = N * Q tokens, D width, H query heads,
G key/value heads, C head dimension, T cache length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rcd.residual.product import product, product_by
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
    return product(x_NQD.finished() if isinstance(x_NQD, Normed) else x_NQD, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_norm(x: Tensor, stream: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the residual stream with x added, its norm)."""
    stream = stream + x
    return stream, rms_norm(stream, weight, eps)


def added(
    x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor, norm: Tensor, eps: float, counts: Tensor,
    multiply: Callable[..., Tensor] = linear,
) -> tuple[Tensor, Normed]:  # fmt: skip
    """(the residual stream with a product added, its norm)."""
    stream, normed = add_norm(multiply(x, weight, bias), stream, norm, eps)
    return stream, Normed(normed)


def gated(x: Tensor | Normed, gate_up: Tensor, multiply: Callable[..., Tensor] = linear) -> Tensor:
    """silu(x gate) * (x up); both matrices in one, gate first."""
    return silu_mul(multiply(x, gate_up))


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
    the cache, where position is slot, but for the first `looking` tokens of every slot (which may stand at position
    -1 and are turned as at 0). Returns q [N, Q, H, C]."""
    (n, q, _), (_, groups, _, c) = qkv_NQX.shape, keys_RGTC.shape
    query, key, value = qkv_NQX.view(n, q, -1, c).split((heads, groups, groups), dim=2)
    if norms is not None:
        query, key = rms_norm(query, norms[0], norms[2]), rms_norm(key, norms[1], norms[2])
    position = start_N[:, None].long() + torch.arange(q, device=start_N.device)
    turned = position.clamp_min(0)
    cos, sin = cos_TC[turned].unsqueeze(2), sin_TC[turned].unsqueeze(2)
    row, place = row_N.long()[:, None].expand_as(position)[:, looking:], position[:, looking:]
    keys_RGTC[row, :, place] = _rotated(key, cos, sin)[:, looking:]
    values_RGTC[row, :, place] = value[:, looking:]
    return _rotated(query, cos, sin)


def run_of(numbers: list[int]) -> slice | list[int]:
    """The numbers as an index, of which a view is made instead of a copy where they follow one another."""
    run = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    return slice(run.start, run.stop) if numbers == list(run) else numbers


def attend(
    query_NQHC: Tensor, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor, end_NQ: Tensor, scale: float,
    order_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Every query sees the slots [0, end) of its row. Returns [N, Q, H * C]. `order` is that in which a GPU takes the
    slots: those of one row together, so that its keys are read once."""
    (n, q, h, c), groups, most = query_NQHC.shape, keys_RGTC.shape[1], int(end_NQ.max())
    seen = torch.arange(most, device=end_NQ.device) < end_NQ[:, None, :, None]
    mask = None if bool(seen.all()) else seen.repeat(1, 1, h // groups, 1)
    rows = run_of(row_N.tolist())
    keys, values = keys_RGTC[rows, :, :most], values_RGTC[rows, :, :most]
    # the heads of a group see the same keys, as further queries: [N, G, heads of a group x Q, C]
    query = query_NQHC.view(n, q, groups, -1, c).permute(0, 2, 3, 1, 4).reshape(n, groups, -1, c)
    mixed = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    return mixed.view(n, groups, -1, q, c).permute(0, 3, 1, 2, 4).reshape(n, q, h * c)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


# -- slot by slot, so that no bit of a slot's numbers depends on what else is in the pass ------------------------------


def _linear_apart(x_NQD: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    value = x_NQD.finished() if isinstance(x_NQD, Normed) else x_NQD
    return product_by([1] * len(value), value, weight, bias)


def _attend_apart(
    query_NQHC: Tensor, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor, end_NQ: Tensor, scale: float,
    order_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    slots = zip(query_NQHC.split(1), row_N.split(1), end_NQ.split(1), strict=True)
    return torch.cat([attend(query, keys_RGTC, values_RGTC, row, end, scale) for query, row, end in slots])


APART = SimpleNamespace(
    **{name: globals()[name] for name in __all__}
    | {"linear": _linear_apart, "attend": _attend_apart}
    | {each.__name__: partial(each, multiply=_linear_apart) for each in (added, gated)},
    __name__=__name__,
)
"""The same parts, of which those that would multiply several slots at once take one after another."""
