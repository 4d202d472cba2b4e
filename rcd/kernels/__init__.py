"""The parts of a fast pass: plain twins, Triton kernels, and the choice between them."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import torch

from rcd.errors import RCDError, one_of


def parts_for(device: torch.device, dtype: torch.dtype, apart: bool = False) -> Any:
    """The fused kernels on a GPU that has Triton, else the plain twins; said once where a GPU goes without. With
    RCD_KERNELS=plain or fused the choice is yours, but fp64 is always plain: the kernels add up in fp32."""
    wish = os.environ.get("RCD_KERNELS")
    if wish:
        one_of("RCD_KERNELS", wish, ("plain", "fused"))
    plain = import_module("rcd.kernels.plain")
    plain = plain.APART if apart else plain
    if wish == "plain" or dtype == torch.float64 or (device.type != "cuda" and wish != "fused"):
        return plain
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise RCDError(
            "RCD_KERNELS=fused needs a GPU, or TRITON_INTERPRET=1 for Triton's slow interpreter; leave it away."
        )
    try:
        return import_module("rcd.kernels.fused")
    except ImportError as error:
        _say(f"rcd: no Triton on this machine ({error}); the plain kernels decode the same, only slower.")
        return plain


@cache
def _say(text: str) -> None:
    warnings.warn(text, stacklevel=3)
