"""Classifier-free guidance (LLaDA's cfg_scale): what two passes predict together, with the prompt and without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def guided(cond: Tensor, uncond: Tensor, scale: Any) -> Tensor:
    """cond + s (cond - uncond), which is uncond + (s + 1) (cond - uncond); in fp32 or wider. s = 0 is `cond`. A head is
    linear, so that of hidden states this gives the hidden states of the combined logits.

    cond 2, uncond 1:    s 0 -> 2    s 0.5 -> 2.5    s 1 -> 3
    """
    wide = torch.promote_types(cond.dtype, torch.float32)
    return (cond.to(wide) + scale * (cond.to(wide) - uncond.to(wide))).to(cond.dtype)
