"""The product that makes q, k and v, and what follows it: norms, rotation, writing k and v to the cache. For few tokens
one kernel, a head a block."""

from __future__ import annotations

import os

import triton
import triton.language as tl
from torch import Tensor

from rcd.kernels.launching import launch
from rcd.kernels.layers import rotate_store
from rcd.kernels.products import AHEAD, _fetch, _product, _rows, _skinny, partial

HEAD_TILE = (128, 4, 8)
"""Inner step, stages, warps; measured on an H200."""
TOGETHER = os.environ.get("RCD_TOGETHER", "1") == "1"


@triton.jit
def _project_store(
    x, weight, bias, q_out, keys, values, row_of, start_of, cos, sin, q_weight, k_weight, eps, Q, T, M, K,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, LOOKING: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of all tokens."""
    HALF: tl.constexpr = C // 2
    head, rows = tl.program_id(0), tl.arange(0, BM)
    places, real = head * C + tl.arange(0, C), rows < M
    inside = places >= 0
    slot, low = rows // Q, tl.arange(0, HALF)
    position = tl.load(start_of + slot, mask=real, other=0).to(tl.int64) + rows % Q
    row = tl.load(row_of + slot, mask=real, other=0).to(tl.int64)
    at = position[:, None] * C + low[None, :]
    if PDL:
        _fetch(weight, places, inside, K, 0, AHEAD)
        tl.extra.cuda.gdc_wait()
    total = _product(x, rows, real, weight, places, inside, K, 0, K, BK)
    if BIAS:
        total += tl.load(bias + places).to(tl.float32)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    kind = q_out.dtype.element_ty
    one, two = tl.split(tl.permute(tl.reshape(total, (2, HALF, BM)), (2, 1, 0)))  # [BM, HALF] each
    a, b = one.to(kind).to(tl.float32), two.to(kind).to(tl.float32)
    if head < H + G:
        if NORM:
            own = q_weight
            if head >= H:
                own = k_weight
            scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / C + eps)[:, None]
            wa, wb = tl.load(own + low).to(tl.float32)[None, :], tl.load(own + HALF + low).to(tl.float32)[None, :]
            a = ((a * scale).to(kind).to(tl.float32) * wa).to(kind).to(tl.float32)
            b = ((b * scale).to(kind).to(tl.float32) * wb).to(kind).to(tl.float32)
        seen = real[:, None]
        ca, cb = tl.load(cos + at, mask=seen, other=0.0), tl.load(cos + at + HALF, mask=seen, other=0.0)
        sa, sb = tl.load(sin + at, mask=seen, other=0.0), tl.load(sin + at + HALF, mask=seen, other=0.0)
        first = a * ca.to(tl.float32) - b * sa.to(tl.float32)
        b = b * cb.to(tl.float32) + a * sb.to(tl.float32)
        a = first
    target = q_out + (rows.to(tl.int64) * H + head) * C
    writes = real
    if head >= H:
        writes = real & (rows % Q >= LOOKING)
        target = keys + ((row * G + head - H) * T + position) * C
        if head >= H + G:
            target = values + ((row * G + head - H - G) * T + position) * C
    there = target[:, None] + low[None, :]
    tl.store(there, a.to(kind), mask=writes[:, None])
    tl.store(there + HALF, b.to(kind), mask=writes[:, None])


def project_store(
    x_NQD: Tensor, weight: Tensor, bias: Tensor | None, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor,
    start_N: Tensor, cos_TC: Tensor, sin_TC: Tensor, heads: int, norms: tuple[Tensor, Tensor, float] | None = None,
    looking: int = 0,
) -> Tensor:  # fmt: skip
    n, q, _ = x_NQD.shape
    if not (TOGETHER and _skinny(n * q, weight) and keys_RGTC.shape[-1] in (64, 128)):
        parts = partial(x_NQD, weight, bias)
        return rotate_store(parts, keys_RGTC, values_RGTC, row_N, start_N, cos_TC, sin_TC, heads, norms, looking)
    return _together(
        x_NQD, weight, bias, keys_RGTC, values_RGTC, row_N, start_N, cos_TC, sin_TC, heads, norms, HEAD_TILE, looking
    )


def _together(
    x_NQD: Tensor, weight: Tensor, bias: Tensor | None, keys_RGTC: Tensor, values_RGTC: Tensor, row_N: Tensor,
    start_N: Tensor, cos_TC: Tensor, sin_TC: Tensor, heads: int, norms: tuple[Tensor, Tensor, float] | None,
    tile: tuple[int, int, int], looking: int = 0,
) -> Tensor:  # fmt: skip
    (n, q, d), (_, groups, t, c), (bk, stages, warps) = x_NQD.shape, keys_RGTC.shape, tile
    query = x_NQD.new_empty(n, q, heads, c)
    q_weight, k_weight, eps = norms if norms is not None else (query, query, 0.0)
    _project_store[(heads + 2 * groups,)](
        x_NQD, weight, query if bias is None else bias, query, keys_RGTC, values_RGTC, row_N, start_N, cos_TC, sin_TC,
        q_weight, k_weight, eps, q, t, n * q, d, H=heads, G=groups, C=c, NORM=norms is not None, BIAS=bias is not None,
        LOOKING=looking, BM=_rows(n * q), BK=bk, AHEAD=AHEAD, num_stages=stages, num_warps=warps, **launch(),
    )  # fmt: skip
    return query
