"""Products of activations with weights on a CPU, by the library that is fast there."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


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


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times the transposed weight."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() and not torch.is_grad_enabled():
        fast = onednn()
        if fast is not None:
            found: Tensor = fast(x, weight, bias, "none", [], "")
            return found
    return functional.linear(x, weight, bias)


def product_by(counts: list[int] | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same; where `counts` says how many of x belong together, so many at a time, by themselves."""
    parts = [] if counts is None else [part for part in x.split(counts) if len(part)]
    return product(x, weight, bias) if len(parts) < 2 else torch.cat([product(part, weight, bias) for part in parts])
