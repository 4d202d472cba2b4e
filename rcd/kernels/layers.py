"""The small parts of a layer as Triton kernels. Each has a twin in `rcd.kernels.plain`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rcd.kernels.launching import begin, launch


@triton.jit
def _add_norm(
    x, stream, weight, out_stream, out, D, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keep = at < D
    factor = tl.load(weight + at, mask=keep, other=0.0).to(tl.float32)
    begin(PDL)
    kind = out.dtype.element_ty
    value = tl.load(x + row * D + at, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(stream + row * D + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(out_stream + row * D + at, value.to(kind), mask=keep)
        value = value.to(kind).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    normed = (value * scale).to(kind).to(tl.float32) * factor
    tl.store(out + row * D + at, normed.to(kind), mask=keep)


def _warps(width: int) -> int:
    return 16 if width >= 4096 else 8 if width >= 2048 else 4


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    d, out = x.shape[-1], torch.empty_like(x)
    _add_norm[(x.numel() // d,)](
        x, x, weight, out, out, d, eps,
        ADD=False, BLOCK=triton.next_power_of_2(d), num_warps=_warps(d), **launch(),
    )  # fmt: skip
    return out


def add_norm(x: Tensor, stream: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    d, added, out = stream.shape[-1], torch.empty_like(stream), torch.empty_like(stream)
    _add_norm[(stream.numel() // d,)](
        x, stream, weight, added, out, d, eps,
        ADD=True, BLOCK=triton.next_power_of_2(d), num_warps=_warps(d), **launch(),
    )  # fmt: skip
    return added, out


@triton.jit
def _silu_mul(source, out, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < F
    gate = tl.load(source + row * 2 * F + at, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(source + row * 2 * F + F + at, mask=keep, other=0.0)
    value = (gate / (1.0 + tl.exp(-gate))).to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * F + at, value.to(out.dtype.element_ty), mask=keep)


def silu_mul(gate_up: Tensor) -> Tensor:
    f = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], f)
    block = min(1024, triton.next_power_of_2(f))
    _silu_mul[(out.numel() // f, triton.cdiv(f, block))](gate_up, out, f, BLOCK=block, num_warps=4)
    return out
