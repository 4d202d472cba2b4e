"""Who may attend to whom: boolean masks [B, 1, queries, keys], True where attention is allowed, None for everywhere.

`sdpa` is the one attention function that every backbone uses: exactly what the mask says, nothing causal added.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

ATTENTION = "rcd_sdpa"


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention under a boolean mask.

    Registered without a mask function of its own: transformers then hands a 4D mask through as it is and makes none
    where there is none, so that None means "everything is visible".
    """
    grouped = query.shape[1] != key.shape[1]
    if isinstance(attention_mask, BlockMask):
        attend = flex_attention if torch.compiler.is_compiling() else _flex()
        sparse = attend(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped)
        return sparse.transpose(1, 2).contiguous(), None
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


@cache
def _flex() -> Any:
    """Flex attention, which skips what a BlockMask leaves out; it must be compiled to do so."""
    return torch.compile(flex_attention)


AttentionInterface.register(ATTENTION, sdpa)


def block_causal(query_BQ: Tensor, key_BK: Tensor, block_length: int) -> Tensor:
    """A position sees its own block, whole, and all earlier ones; SDAR's grid is absolute: block = position // b.

    Given as positions; padding stands at negative ones, is seen by no real position and sees only padding.
    """
    query, key = query_BQ // block_length, key_BK // block_length
    allowed = query[:, :, None] >= key[:, None, :]
    same_kind = (query_BQ >= 0)[:, :, None] == (key_BK >= 0)[:, None, :]
    return (allowed & same_kind).unsqueeze(1)


def visible(key_BK: Tensor, queries: int) -> Tensor:
    """Every real position is visible to every query: a cached block's window, or a bidirectional canvas."""
    return (key_BK >= 0)[:, None, None, :].expand(-1, 1, queries, -1)
