"""Products of tokens with weights: Triton kernels for few, which only read the weight; the library's for many."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rcd.kernels.launching import early, foresee, launch
from rcd.kernels.layers import add_norm, silu_mul
from rcd.kernels.plain import Normed

SKINNY = 64
"""Up to so many tokens a product only reads its weights, and is done here; above, the library's is faster."""


@triton.jit
def _product(x, rows, real, weight, places, inside, K, share, BK: tl.constexpr):
    """The first `share` columns of weight [places, K] times those of x [rows, K], transposed. The weights stand on the
    left, where the matrix units want 64 rows and more: tokens are few."""
    k = tl.arange(0, BK)
    x_at = x + rows[None, :] * K + k[:, None]
    w_at = weight + places[:, None].to(tl.int64) * K + k[None, :]
    total = tl.zeros((places.shape[0], rows.shape[0]), tl.float32)
    for _ in range(0, share, BK):
        w = tl.load(w_at, mask=inside[:, None], other=0.0)
        t = tl.load(x_at, mask=real[None, :], other=0.0)
        total = tl.dot(w, t, total)
        x_at += BK
        w_at += BK
    return total


@triton.jit
def _fetch(weight, columns, inside, K, AHEAD: tl.constexpr):
    """Ask for the first AHEAD columns of a weight's tile, which no kernel before this one can change."""
    line = tl.arange(0, AHEAD // 64) * 64
    at = weight + columns[:, None].to(tl.int64) * K + line[None, :]
    foresee(tl.where(inside[:, None], at, weight))


@triton.jit
def _divided(
    x, rows, real, weight, places, inside, squares, M, K, eps, COUNT,
    BK: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The product, its tokens normed: the parts of their sums of squares [TILES, M] are asked for before it, and added
    up behind it."""
    if PDL:
        _fetch(weight, places, inside, K, AHEAD)
        tl.extra.cuda.gdc_wait()
    if TILES > 0:
        tile = tl.arange(0, TILES)
        there = (tile < COUNT)[:, None] & real[None, :]
        found = tl.load(squares + tile[:, None] * M + rows[None, :], mask=there, other=0.0)
    total = _product(x, rows, real, weight, places, inside, K, K, BK)
    if TILES > 0:
        total = total * tl.rsqrt(tl.sum(found, axis=0) / K + eps)[None, :]
    return total


@triton.jit
def _linear(
    x, weight, bias, squares, out, M, N, K, eps, COUNT,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, TILES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of columns: out [M, N]."""
    columns, rows = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    inside, real = columns < N, rows < M
    total = _divided(x, rows, real, weight, columns, inside, squares, M, K, eps, COUNT, BK, TILES, AHEAD, PDL)
    if BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    target = out + rows[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[None, :] & inside[:, None])


@triton.jit
def _added(
    x, weight, bias, stream, factor, out_stream, out, squares, parts, counts, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of columns, added to the residual stream: the new stream, the same times the next norm's weight, and the
    tile's part of the sum of squares that the norm divides by. Whoever comes last of the inner sum's parts adds up."""
    tile, part = tl.program_id(0), tl.program_id(1)
    columns, rows = tile * BN + tl.arange(0, BN), tl.arange(0, BM)
    inside, real = columns < N, rows < M
    both = real[None, :] & inside[:, None]
    at = rows[None, :].to(tl.int64) * N + columns[:, None]
    share = K // PARTS
    if PDL:
        _fetch(weight + part * share, columns, inside, K, AHEAD)
        tl.extra.cuda.gdc_wait()
    before = tl.load(stream + at, mask=both, other=0.0)
    times = tl.load(factor + columns, mask=inside, other=0.0).to(tl.float32)
    total = _product(x + part * share, rows, real, weight + part * share, columns, inside, K, share, BK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    last = True
    if PARTS > 1:
        scratch = parts + tile * PARTS * BN * BM + tl.arange(0, BN)[:, None] * BM + rows[None, :]
        tl.store(scratch + part * BN * BM, total)
        tl.debug_barrier()
        last = tl.atomic_add(counts + tile, 1, sem="acq_rel") == PARTS - 1
        if last:
            total = tl.zeros((BN, BM), tl.float32)
            for one in tl.static_range(PARTS):
                total += tl.load(scratch + one * BN * BM, cache_modifier=".cg")
            tl.store(counts + tile, 0)
    if last:
        if BIAS:
            total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
        kind = out.dtype.element_ty
        now = (total.to(kind).to(tl.float32) + before.to(tl.float32)).to(kind)
        tl.store(out_stream + at, now, mask=both)
        wide = now.to(tl.float32)
        tl.store(out + at, (wide * times[:, None]).to(kind), mask=both)
        tl.store(squares + tile * M + rows, tl.sum(wide * wide, axis=0), mask=real)


@triton.jit
def _gated(
    x, weight, squares, out, M, F, K, eps, COUNT,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same BN / 2 columns of gate and of up in one tile, and silu(gate) * up of them."""
    HALF: tl.constexpr = BN // 2
    both, rows = tl.arange(0, BN), tl.arange(0, BM)
    column = tl.program_id(0) * HALF + both % HALF
    places, inside, real = column + (both // HALF) * F, column < F, rows < M
    total = _divided(x, rows, real, weight, places, inside, squares, M, K, eps, COUNT, BK, TILES, AHEAD, PDL)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, BM)), (1, 2, 0)))
    kind = out.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    mine = tl.program_id(0) * HALF + tl.arange(0, HALF)
    tl.store(out + rows[None, :] * F + mine[:, None], value.to(kind), mask=real[None, :] & (mine < F)[:, None])


def _skinny(tokens: int, weight: Tensor) -> bool:
    """Whether a product is done here: of few tokens, in bf16, and on a GPU that the tiles are measured for."""
    few = tokens <= SKINNY and weight.shape[1] % 512 == 0
    return few and weight.dtype == torch.bfloat16 and weight.is_cuda and early()


TILES: dict[str, tuple[int, int, int, int, int]] = {
    # kind of product -> columns of a tile, inner step, parts, stages, warps; measured on an H200, 32 and 64 tokens
    "small": (64, 128, 1, 5, 4),
    "sum": (64, 128, 2, 5, 4),
    "large": (128, 128, 1, 4, 8),
    "gated": (64, 128, 1, 3, 4),
    "gated, many": (64, 64, 1, 4, 4),
}
AHEAD = 256
"""Columns of a tile's weights that are asked for before the kernel may read its tokens."""


def _tokens(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _shape(tokens: int, kind: str) -> tuple[int, dict[str, int]]:
    """(parts of the inner sum, the tile)"""
    bn, bk, parts, stages, warps = TILES[kind]
    rows = max(16, triton.next_power_of_2(tokens))
    return parts, {"BM": rows, "BN": bn, "BK": bk, "num_stages": stages, "num_warps": warps}


def _division(x: Normed) -> tuple[Tensor, float, int, int]:
    """(squares, eps, their number, the same as a power of two; 0 where there are none)."""
    if x.squares is None:
        return x.value, 0.0, 0, 0
    return x.squares, x.eps, len(x.squares), triton.next_power_of_2(len(x.squares))


def linear(x: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x if isinstance(x, Normed) else Normed(x)
    (n, k), tokens = weight.shape, _tokens(x.value)
    if not _skinny(tokens, weight):
        return functional.linear(x.finished(), weight, bias)
    _, tile = _shape(tokens, "large" if n > 32768 else "small")
    out, (squares, eps, count, tiles) = x.value.new_empty(*x.value.shape[:-1], n), _division(x)
    _linear[(triton.cdiv(n, tile["BN"]),)](
        x.value, weight, weight if bias is None else bias, squares, out, tokens, n, k, eps, count,
        BIAS=bias is not None, TILES=tiles, AHEAD=AHEAD, **tile, **launch(),
    )  # fmt: skip
    return out


def added(
    x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor, norm: Tensor, eps: float, counts: Tensor
) -> tuple[Tensor, Normed]:
    (n, k), tokens = weight.shape, _tokens(x)
    if not _skinny(tokens, weight):
        stream, normed = add_norm(functional.linear(x, weight, bias), stream, norm, eps)
        return stream, Normed(normed)
    parts, tile = _shape(tokens, "sum")
    count = triton.cdiv(n, tile["BN"])
    now, out = torch.empty_like(stream), torch.empty_like(stream)
    wide: dict[str, Any] = dict(dtype=torch.float32, device=x.device)
    squares = torch.empty(count, tokens, **wide)
    scratch = torch.empty(count * parts * tile["BN"] * tile["BM"], **wide) if parts > 1 else squares
    _added[(count, parts)](
        x, weight, weight if bias is None else bias, stream, norm, now, out, squares, scratch, counts, tokens, n, k,
        PARTS=parts, BIAS=bias is not None, AHEAD=AHEAD, **tile, **launch(),
    )  # fmt: skip
    return now, Normed(out, squares, eps)


def gated(x: Tensor | Normed, gate_up: Tensor) -> Tensor:
    x = x if isinstance(x, Normed) else Normed(x)
    tokens, (two, k) = _tokens(x.value), gate_up.shape
    if not _skinny(tokens, gate_up):
        return silu_mul(functional.linear(x.finished(), gate_up))
    (_, tile), (squares, eps, count, tiles) = _shape(tokens, "gated" if tokens <= 32 else "gated, many"), _division(x)
    out = x.value.new_empty(*x.value.shape[:-1], two // 2)
    _gated[(triton.cdiv(two, tile["BN"]),)](
        x.value, gate_up, squares, out, tokens, two // 2, k, eps, count,
        TILES=tiles, AHEAD=AHEAD, **tile, **launch(),
    )  # fmt: skip
    return out
