"""The plain parts of a pass, slot by slot: no bit of a slot's numbers depends on what else is in the pass."""

from __future__ import annotations

import torch
from torch import Tensor

from rcd.kernels import plain
from rcd.kernels.plain import (
    Normed,
    add_norm,
    expected_embedding,
    probabilities,
    project,
    rms_norm,
    rotate_store,
    silu_mul,
    summarise,
)

__all__ = [
    "Normed", "add_norm", "added", "attend", "expected_embedding", "gated", "linear", "probabilities", "project",
    "rms_norm", "rotate_store", "silu_mul", "summarise",
]  # fmt: skip


def linear(x_NQD: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    value = x_NQD.finished() if isinstance(x_NQD, Normed) else x_NQD
    return (
        torch.stack([plain.linear(x, weight, bias) for x in value])
        if len(value) > 1
        else plain.linear(value, weight, bias)
    )


def added(
    x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor, norm: Tensor, eps: float, counts: Tensor
) -> tuple[Tensor, Normed]:
    stream, normed = add_norm(linear(x, weight, bias), stream, norm, eps)
    return stream, Normed(normed)


def gated(x: Tensor | Normed, gate_up: Tensor) -> Tensor:
    return silu_mul(linear(x, gate_up))


def attend(
    query_NQHC: Tensor, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor, end_NQ: Tensor, scale: float,
    order_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    one = (slice(n, n + 1) for n in range(len(query_NQHC)))
    return torch.cat([
        plain.attend(query_NQHC[n], keys_RGTC, values_RGTC, row_N[n], end_NQ[n], scale) for n in one
    ])  # fmt: skip
