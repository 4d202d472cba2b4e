"""The load-balancing loss of models with experts, as SDAR-MoE's own code has it (Switch Transformer, eqs. 4-6).

Shapes: N tokens that a router saw, of all layers together; E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rcd.models.experts import Router, routers
from rcd.models.lm import DiffusionLM

Routed = list[tuple[Router, tuple[Tensor, Tensor, Tensor]]]
"""What each router of a pass gave, in the order of the layers."""


@contextmanager
def watched(model: DiffusionLM, wanted: bool = True) -> Iterator[Routed]:
    """What the routers give while this is open, if it is wanted."""
    found: Routed = []

    def note(router: Router, _: object, given: tuple[Tensor, Tensor, Tensor]) -> None:
        found.append((router, given))

    hooks = [router.register_forward_hook(note) for router in (routers(model.backbone) if wanted else ())]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def balance(routed: Routed, real: Tensor) -> Tensor:
    """E * sum_e f_e P_e, with f_e how many of the K choices fall on expert e, and P_e its probability, both the means
    over all layers' tokens. It is K where all experts are used alike, and E * K / K = E where K experts get everything.

    Two experts, K = 1, two tokens with the probabilities (.9, .1) and (.6, .4): f = (1, 0), P = (.75, .25), and the
    loss is 2 * .75 = 1.5; with (.9, .1) and (.1, .9) it is 1. Padding (`real`, of the pass's tokens) counts nowhere.
    """
    flat = real.flatten()
    chosen = torch.cat([given[2][flat] for _, given in routed])
    p_NE = torch.cat([router.probabilities(given[0][flat]) for router, given in routed])
    f_E = torch.zeros_like(p_NE[0]).index_add_(0, chosen.flatten(), p_NE.new_ones(chosen.numel())) / max(1, len(p_NE))
    return p_NE.shape[1] * (f_E * p_NE.sum(0) / max(1, len(p_NE))).sum()
