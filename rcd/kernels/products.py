"""Products of tokens with weights: Triton kernels for few, which only read the weight; the library's for many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from rcd.kernels.launching import launch
from rcd.kernels.layers import silu_mul

SKINNY = 64
"""Up to so many tokens a product only reads its weights, and is done here; above, the library's is faster."""


@triton.jit
def _product(x, rows, real, weight, places, inside, K, first, share, BK: tl.constexpr):
    """weight [places, first : first + share] times the transpose of x [rows, the same]. The weights stand on the left,
    where the matrix units want 64 rows and more: tokens are few."""
    k = first + tl.arange(0, BK)
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
def _fetch(weight, columns, inside, K, first, AHEAD: tl.constexpr):
    """Ask for the first AHEAD columns of a weight's tile, which no kernel before this one can change."""
    line = first + tl.arange(0, AHEAD // 64) * 64
    at = (weight + columns[:, None].to(tl.int64) * K + line[None, :]).to(tl.int64, bitcast=True)
    at = tl.where(inside[:, None], at, (weight + first).to(tl.int64, bitcast=True))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _linear(
    x, weight, bias, out, M, N, K, share,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of columns and a part of the inner sum: out [parts, M, N]."""
    columns, part, rows = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1), tl.arange(0, BM)
    inside, real = columns < N, rows < M
    if PDL:
        _fetch(weight, columns, inside, K, part * share, AHEAD)
        tl.extra.cuda.gdc_wait()
    total = _product(x, rows, real, weight, columns, inside, K, part * share, share, BK)
    if BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    target = out + (part * M + rows)[None, :].to(tl.int64) * N + columns[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=real[None, :] & inside[:, None])


@triton.jit
def _gated(
    x, weight, out, M, F, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same BN / 2 columns of gate and of up in one tile, and silu(gate) * up of them."""
    HALF: tl.constexpr = BN // 2
    both, rows = tl.arange(0, BN), tl.arange(0, BM)
    column = tl.program_id(0) * HALF + both % HALF
    places, inside, real = column + (both // HALF) * F, column < F, rows < M
    if PDL:
        _fetch(weight, places, inside, K, 0, AHEAD)
        tl.extra.cuda.gdc_wait()
    total = _product(x, rows, real, weight, places, inside, K, 0, K, BK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, BM)), (1, 2, 0)))
    kind = out.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    mine = tl.program_id(0) * HALF + tl.arange(0, HALF)
    tl.store(out + rows[None, :] * F + mine[:, None], value.to(kind), mask=real[None, :] & (mine < F)[:, None])


def _skinny(tokens: int, weight: Tensor) -> bool:
    return tokens <= SKINNY and weight.shape[1] % 512 == 0 and weight.dtype == torch.bfloat16 and weight.is_cuda


TILES: dict[str, tuple[int, int, int, int, int]] = {
    # kind of product -> columns of a tile, inner step, parts, stages, warps; measured on an H200, 32 and 64 tokens
    "small": (64, 128, 1, 6, 4),
    "sum": (64, 128, 2, 4, 4),
    "large": (128, 128, 1, 4, 8),
    "gated": (64, 64, 1, 4, 4),
}
AHEAD = 256
"""Columns of a tile's weights that are asked for before the kernel may read its tokens."""


def _rows(tokens: int) -> int:
    return max(16, triton.next_power_of_2(tokens))


def _parts(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The product as [parts, ..., N]; several parts are fp32 and still to be added up."""
    (n, k), tokens = weight.shape, x.numel() // x.shape[-1]
    rows, (bn, bk, parts, stages, warps) = _rows(tokens), TILES[kind]
    out = torch.empty(parts, *x.shape[:-1], n, dtype=torch.float32 if parts > 1 else x.dtype, device=x.device)
    _linear[(triton.cdiv(n, bn), parts)](
        x, weight, weight if bias is None else bias, out, tokens, n, k, k // parts,
        BM=rows, BN=bn, BK=bk, BIAS=bias is not None, AHEAD=AHEAD, num_stages=stages, num_warps=warps, **launch(),
    )  # fmt: skip
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _skinny(x.numel() // x.shape[-1], weight):
        return functional.linear(x, weight, bias)
    return _parts(x, weight, bias, "large" if weight.shape[0] > 32768 else "small")[0]


def partial(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Two parts where the weight's rows alone would not keep the GPU busy."""
    if not _skinny(x.numel() // x.shape[-1], weight):
        return functional.linear(x, weight, bias)[None]
    return _parts(x, weight, bias, "sum" if weight.shape[0] <= 4096 and bias is None else "small")


def gated(x: Tensor, gate_up: Tensor) -> Tensor:
    tokens, (two, k) = x.numel() // x.shape[-1], gate_up.shape
    if not _skinny(tokens, gate_up):
        return silu_mul(functional.linear(x, gate_up))
    rows, (bn, bk, _, stages, warps) = _rows(tokens), TILES["gated"]
    out = x.new_empty(*x.shape[:-1], two // 2)
    _gated[(triton.cdiv(two, bn),)](
        x, gate_up, out, tokens, two // 2, k,
        BM=rows, BN=bn, BK=bk, AHEAD=AHEAD, num_stages=stages, num_warps=warps, **launch(),
    )  # fmt: skip
    return out
