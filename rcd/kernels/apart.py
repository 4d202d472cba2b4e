"""The plain parts of a pass, slot by slot: no bit of a slot's numbers depends on what else is in the pass."""

from __future__ import annotations

from functools import partial

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
from rcd.residual.product import product_by

__all__ = [
    "Normed", "add_norm", "added", "attend", "expected_embedding", "gated", "linear", "probabilities", "project",
    "rms_norm", "rotate_store", "silu_mul", "summarise",
]  # fmt: skip


def linear(x_NQD: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    value = x_NQD.finished() if isinstance(x_NQD, Normed) else x_NQD
    return product_by([1] * len(value), value, weight, bias)


added, gated = (partial(each, multiply=linear) for each in (plain.added, plain.gated))


def attend(
    query_NQHC: Tensor, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor, end_NQ: Tensor, scale: float,
    order_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    one = (slice(n, n + 1) for n in range(len(query_NQHC)))
    return torch.cat([
        plain.attend(query_NQHC[n], keys_RGTC, values_RGTC, row_N[n], end_NQ[n], scale) for n in one
    ])  # fmt: skip
