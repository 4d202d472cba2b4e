"""Products of activations with weights on a CPU, by the library that is fast there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

HALVES = (torch.bfloat16, torch.float16)


@cache
def onednn() -> Any | None:
    """oneDNN's own product for fp32 on chips where torch's default (MKL) takes about twice as long: AMD's. It is a
    private operator of torch, so that it may be missing or other than it was: then None, as on all other chips."""
    if not (torch.backends.mkldnn.is_available() and maker() == "AuthenticAMD"):
        return None
    try:
        found = torch.ops.mkldnn._linear_pointwise
        x, weight = torch.rand(1, 3, 8), torch.rand(5, 8)
        with torch.no_grad():
            same = torch.allclose(found(x, weight, None, "none", [], ""), functional.linear(x, weight), atol=1e-5)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return found if same else None


def maker() -> str:
    """Of the CPU, as Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def padded_rows(rows: int) -> int:
    """How many rows are multiplied for so many. oneDNN compiles a product for every number of rows and keeps it, half a
    megabyte each: a server, whose numbers change from step to step, would grow by hundreds of megabytes. So there are
    four numbers between a power of two and the next (9 -> 10, 70 -> 80), and above 512 the multiples of 128."""
    step = 1 << min(7, max(0, (rows - 1).bit_length() - 3))
    return -(-rows // step) * step


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times the transposed weight."""
    if x.device.type != "cpu" or torch.is_grad_enabled() or not x.numel():
        return functional.linear(x, weight, bias)
    fast = onednn() if x.dtype == torch.float32 else None
    if fast is None and x.dtype not in HALVES:
        return functional.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    more = padded_rows(rows) - rows
    given = functional.pad(x.reshape(rows, -1), (0, 0, 0, more)) if more else x
    found: Tensor = (
        functional.linear(given, weight, bias) if fast is None else fast(given, weight, bias, "none", [], "")
    )
    return found[:rows].view(*x.shape[:-1], -1) if more else found


def product_by(counts: list[int] | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same; where `counts` says how many of x belong together, so many at a time, by themselves."""
    return by(counts, x, lambda part: product(part, weight, bias))


def by(counts: list[int] | None, x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """`multiply`, so many at a time as belong together."""
    parts = [] if counts is None else [part for part in x.split(counts) if len(part)]
    return multiply(x) if len(parts) < 2 else torch.cat([multiply(part) for part in parts])
