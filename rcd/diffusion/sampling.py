"""From a predicted distribution to one token and its confidence per position.

Shapes: B batch, L window, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rcd.residual.distribution import Distribution, without

NEVER = float("-inf")


@dataclass(frozen=True)
class SamplingSettings:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    tempered_confidence: bool = True
    """Confidence from softmax(z / temperature), as SDAR's evaluator has it; false: from softmax(z), as LLaDA's."""
    never: tuple[int, ...] = ()
    """Ids that are never sampled: the mask, always."""
    last: tuple[int, ...] = ()
    """Ids that may be sampled, but with confidence 0: committed only when nothing else is left. The other tokens'
    confidences are renormalised without them, as LLaDA's `confidence_eos_eot_inf` does."""


def filter_top_k(logits: Tensor, k: int) -> Tensor:
    """Everything below the k-th largest logit is out; ties with it stay."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k, dim=-1).values[..., -1:], NEVER)


def filter_top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of most probable tokens whose mass reaches p; at least one."""
    if p >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    outside = probabilities.cumsum(-1) - probabilities >= p
    outside[..., 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), NEVER)


def gumbel_argmax(logits_BLV: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
    """One exact draw from softmax(logits) per position; row r draws from generators[r] alone, so that a row's tokens
    do not depend on its neighbours, and a row without one (nothing left to sample) draws nothing. The noise is fp64:
    in fp32 its tail is cut, which favours likely tokens."""
    tokens = []
    for row, generator in zip(logits_BLV, generators, strict=True):
        if generator is None:
            tokens.append(row.argmax(-1))
            continue
        noise = torch.empty(row.shape, dtype=torch.float64, device=generator.device).exponential_(generator=generator)
        tokens.append((row.double() - noise.log_().to(row.device)).argmax(-1))
    return torch.stack(tokens)


def sample(
    predicted: Distribution, settings: SamplingSettings, generators: Sequence[torch.Generator | None]
) -> tuple[Tensor, Tensor]:
    """(token [B, L], confidence [B, L]).

    The confidence is the token's probability before top-k, top-p and exclusions, so that a filter never raises it.
    """
    basis = Distribution(without(predicted.logits, settings.last)) if settings.last else predicted
    if settings.temperature == 0.0:
        token = predicted.best(settings.never)
    else:
        logits = without(predicted.logits, settings.never)
        tempered = logits.float() / settings.temperature
        token = gumbel_argmax(filter_top_p(filter_top_k(tempered, settings.top_k), settings.top_p), generators)
        if settings.tempered_confidence:
            basis = basis.at(settings.temperature)
    return token, basis.log_p(token).exp()
