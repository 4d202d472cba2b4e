"""From a predicted distribution to one token and its confidence per position.

Shapes: B batch, L window, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rcd.residual.context import wide
from rcd.residual.distribution import Distribution, without
from rcd.settings import setting, settings

NEVER = float("-inf")
CHUNK = 512
"""Ids whose mass is added up before one of them is looked for."""


@settings
class SamplingSettings:
    temperature: float = setting(default=0.0, help="0: the most probable token.", ge=0, why="0 is greedy")
    top_k: int = setting(default=0, help="Draw from the k most probable tokens alone; 0: from all.", ge=0)
    top_p: float = setting(
        default=1.0, help="Draw from the most probable tokens that reach this mass together.", ge=1e-6, le=1,
        why="1 keeps every token",
    )  # fmt: skip
    tempered_confidence: bool = setting(
        default=True,
        help="Confidence from softmax(z / temperature), as SDAR's evaluator has it; false: from softmax(z), as "
        "LLaDA's.",
    )
    never: tuple[int, ...] = setting(default=(), help="Ids that are never sampled: the mask, always.")
    last: tuple[int, ...] = setting(
        default=(),
        help="Ids that may be sampled, but with confidence 0: committed only when nothing else is left. The other "
        "tokens' confidences are renormalised without them, as LLaDA's `confidence_eos_eot_inf` does.",
    )


def filter_top_k(logits: Tensor, k: int) -> Tensor:
    """Everything below the k-th largest logit is out; ties with it stay."""
    if k <= 0 or k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(logits < logits.topk(k, dim=-1).values[..., -1:], NEVER)


def filter_top_p(logits: Tensor, p: float, k: int = 0) -> Tensor:
    """The smallest set of most probable tokens whose mass reaches p, at least one; ties with the last stay. Of logits
    that `filter_top_k` has left, k spares the sorting of the whole vocabulary."""
    if p >= 1.0:
        return logits
    few = 0 < k < logits.shape[-1]
    ordered = logits.topk(k, dim=-1).values if few else logits.sort(dim=-1, descending=True).values
    probabilities = (ordered - logits.logsumexp(-1, keepdim=True)).exp_()
    inside = (probabilities.cumsum(-1) - probabilities < p).sum(-1, keepdim=True)
    return logits.masked_fill(logits < ordered.gather(-1, (inside - 1).clamp_min(0)), NEVER)


def drawn(logits_BLV: Tensor, settings: SamplingSettings, noise_BL: Tensor) -> Tensor:
    """One exact draw per position [B, L] from softmax(logits / temperature), filtered, without the ids of `never`; the
    one with which the cumulated mass exceeds the noise (U[0, 1), fp64) as a share of all.

    One number a position instead of one for each id (Gumbel), which would cost a random array of the vocabulary's size:
    the mass is added up by chunks of ids, the noise falls into one of them, and only there the ids are looked at. Sums
    are fp64: in fp32, 150k cumulated numbers would lose the unlikely ones."""
    size = logits_BLV.shape[-1]
    chunk = min(CHUNK, size)
    z = logits_BLV.new_empty(*logits_BLV.shape[:-1], -(-size // chunk) * chunk, dtype=wide(logits_BLV))
    z[..., :size] = logits_BLV
    z[..., size:] = NEVER
    for one in settings.never:
        z[..., one] = NEVER
    if settings.temperature != 1.0:
        z /= settings.temperature
    z = filter_top_p(filter_top_k(z, settings.top_k), settings.top_p, settings.top_k)
    mass = z.sub_(z.amax(-1, keepdim=True)).exp_().unflatten(-1, (-1, chunk))
    sums = mass.sum(-1, dtype=torch.float64)
    edge = sums.cumsum(-1)
    aim = noise_BL.unsqueeze(-1) * edge[..., -1:]
    part = _first(sums, edge, aim)
    before = (edge - sums).gather(-1, part)
    inner = mass.gather(-2, part.unsqueeze(-1).expand(*part.shape, chunk)).squeeze(-2)
    return (part * chunk + _first(inner, inner.cumsum(-1, dtype=torch.float64), aim - before)).squeeze(-1)


def _first(mass: Tensor, edge: Tensor, aim: Tensor) -> Tensor:
    """The first place with mass whose edge lies beyond the aim, [..., 1]; where rounding has put the aim behind all,
    the last with mass."""
    place = torch.arange(mass.shape[-1], device=mass.device)
    rank = torch.where(edge > aim, 2 * mass.shape[-1] - place, place)
    return rank.masked_fill(mass <= 0, -1).argmax(-1, keepdim=True)


def sample(
    predicted: Distribution, settings: SamplingSettings, noise_BL: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token [B, L], confidence [B, L]). `noise` is one U[0, 1) a position; at temperature 0 it is not asked for.

    The confidence is the token's probability before top-k, top-p and exclusions, so that a filter never raises it.
    """
    basis = Distribution(without(predicted.logits, settings.last)) if settings.last else predicted
    if settings.temperature == 0.0:
        token = predicted.best(settings.never)
    else:
        assert noise_BL is not None, "a draw needs noise"
        token = drawn(predicted.logits, settings, noise_BL)
        if settings.tempered_confidence:
            basis = basis.at(settings.temperature)
    return token, basis.log_p(token).exp()
