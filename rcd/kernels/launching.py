"""How Triton kernels are launched here: each may begin while the one before it ends."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@cache
def early() -> bool:
    """Whether a kernel may begin, and fetch its weights, while the one before it ends (Hopper and later)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def launch() -> dict[str, Any]:
    return {"PDL": True, "launch_pdl": True} if early() else {"PDL": False}


@triton.jit
def foresee(at):
    """Ask for the lines at these pointers, as far as the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64, bitcast=True)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def begin(PDL: tl.constexpr):
    """The next kernel may begin; what the one before has written may be read from here on."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
