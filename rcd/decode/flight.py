"""The rules of D2F (Discrete Diffusion Forcing): which blocks are in flight, and what each commits at least; where in
a block that is; and how a prompt is cut into passes. `blockwise` is one block in flight.

Shapes: B rows, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rcd.decode.config import DecodeConfig
from rcd.decode.step import Rules

PREFILL_TOKENS = 512
"""Prompt tokens of one prefill pass, at most (or one block): the longest that a step of the others waits."""


def prefill_piece(unit: int) -> int:
    """Whole blocks of so many tokens."""
    return max(1, PREFILL_TOKENS // unit) * unit


def prefill_passes(tokens: int, unit: int) -> int:
    """Of so many tokens, in whole blocks."""
    return -(-tokens // prefill_piece(unit))


def decoded_share(total: Tensor, left: Tensor) -> Tensor:
    """The part of a block's masks that is decoded; all of it where it had none."""
    return torch.where(total > 0, (total - left) / total.clamp_min(1), 1.0)


def another(share_B: Tensor, flying_B: Tensor, more_B: Tensor, config: DecodeConfig) -> Tensor:
    """[B] the rows that get one more block: enough of the last one is decoded (`share`), there is room beside those in
    flight, and there are `more`."""
    return (share_B >= config.block_add_threshold) & (flying_B < config.blocks_in_flight) & more_B


def turn(needed_NL: Tensor, config: DecodeConfig) -> Tensor:
    """[N, L] where a block may commit now, by its masks that matter: in its leftmost sub-block that has one (a block
    that has none is open for editing alone), or at its first position alone.

    sub_block_length 2   . . M . | M M   needed   0 0 1 0 1 1   turn   0 0 1 1 0 0
    """
    allowed = torch.ones_like(needed_NL)
    if config.sub_block_length is not None:
        open_ = needed_NL.unflatten(-1, (-1, config.sub_block_length)).any(-1)
        leftmost = open_ & (open_.long().cumsum(-1) == 1) | ~open_.any(-1, keepdim=True)
        allowed = leftmost.repeat_interleave(config.sub_block_length, -1)
    if config.first_token_alone:
        place = torch.arange(needed_NL.shape[-1], device=needed_NL.device)
        allowed = allowed & ((place == 0) | ~needed_NL[..., :1])
    return allowed


def least(
    share_BN: Tensor, flying_BN: Tensor, step_BN: Tensor, steps_B: Tensor, config: DecodeConfig, rules: Rules,
    left_BN: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """[B, N] each: what each block commits at least, its schedule's quota once enough of its left neighbour is decoded
    (the first block's always is), nothing before; where it is so; and the same as a share, if the rule asks for it."""
    neighbour = functional.pad(share_BN[:, :-1], (1, 0), value=1.0)
    active = flying_BN & (neighbour >= config.decoded_token_threshold)
    steps_B1 = torch.where(steps_B > 0, steps_B, config.block)[:, None]
    given = (config.block, steps_B1, step_BN, lambda: left_BN)
    share = rules.schedule.share(*given) * active if rules.rule.takes_share else None
    return rules.schedule.quota(*given) * active, active, share
