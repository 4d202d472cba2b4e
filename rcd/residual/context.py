"""Residual context: the discarded prediction as an embedding (Eq. 1), mixed into the next step's mask (Eq. 2).

Shapes: B batch, L window, V vocabulary, D embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> torch.dtype:
    """What probabilities, weights and norms of these tensors are computed in: fp32, or fp64 where one of them is."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def soft_embedding(p_BLV: Tensor, codebook_VD: Tensor) -> Tensor:
    """Delta_i = sum_j p_ij E_j (Eq. 1), in the codebook's dtype (its matmul accumulates in fp32)."""
    return p_BLV.to(codebook_VD.dtype) @ codebook_VD


def top1_embedding(p_BLV: Tensor, codebook_VD: Tensor) -> Tensor:
    """Delta_i = E of the most probable token alone: variant (5) of fig:ablation-on-alpha."""
    return codebook_VD[p_BLV.argmax(-1)]


def interpolate(embeds_BLD: Tensor, masked_BL: Tensor, alpha_BL: Tensor, delta_BLD: Tensor) -> Tensor:
    """e_i = (1 - alpha_i) E(x_i) + alpha_i Delta_i where x_i is [M], E(x_i) elsewhere (Eq. 2).

    With alpha = 0 the result is E(x_i) to the last bit, and with alpha = 1 Delta_i.
    """
    weight_BL1 = alpha_BL.unsqueeze(-1)
    if embeds_BLD.dtype == delta_BLD.dtype == alpha_BL.dtype:  # nothing to cast, and a cast costs a call
        mixed = embeds_BLD.lerp(delta_BLD, weight_BL1)
    else:
        dtype = wide(embeds_BLD, delta_BLD)
        mixed = embeds_BLD.to(dtype).lerp(delta_BLD.to(dtype), weight_BL1.to(dtype)).to(embeds_BLD.dtype)
    return torch.where(masked_BL.unsqueeze(-1), mixed, embeds_BLD)
