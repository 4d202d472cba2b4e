"""From a predicted distribution to one token and its confidence per position.

Shapes: B batch, L window, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rcd.diffusion.noise import finest
from rcd.residual.context import wide
from rcd.residual.distribution import Distribution, without

NEVER = float("-inf")
CHUNK = 512
"""Ids whose mass is added up before one of them is looked for."""


@dataclass(frozen=True)
class SamplingSettings:
    """Of all rows or, as tensors [B, 1], of each."""

    temperature: float | Tensor = 0.0
    top_k: int | Tensor = 0
    top_p: float | Tensor = 1.0
    tempered_confidence: bool = True
    """Confidence from softmax(z / temperature), as SDAR's evaluator has it; false: from softmax(z), as LLaDA's."""
    never: tuple[int, ...] = ()
    """Ids that are never sampled: the mask, always."""
    last: tuple[int, ...] = ()
    """Ids that may be sampled, but with confidence 0: committed only when nothing else is left. The other tokens'
    confidences are renormalised without them, as LLaDA's `confidence_eos_eot_inf` does."""
    most_k: int = 0
    """The largest top_k."""
    sorts: bool = True
    """Whether some row has a top_p and no top_k, so that all of its vocabulary must be sorted."""


def filter_top_k(logits: Tensor, k: int | Tensor, most: int | None = None) -> Tensor:
    """Everything below the k-th largest logit is out; ties with it stay. k = 0 is off; of each row as a tensor [B, 1],
    with the largest one beside it."""
    if most is None:
        assert isinstance(k, int)
        most = k
    if most <= 0 or (most >= logits.shape[-1] and not isinstance(k, Tensor)):
        return logits
    ordered = logits.topk(min(most, logits.shape[-1]), dim=-1).values
    if not isinstance(k, Tensor):
        return logits.masked_fill(logits < ordered[..., -1:], NEVER)
    place = (k.clamp(1, ordered.shape[-1]) - 1).expand(logits.shape[:-1]).unsqueeze(-1)
    return logits.masked_fill((logits < ordered.gather(-1, place)) & (k > 0).unsqueeze(-1), NEVER)


def filter_top_p(logits: Tensor, p: float | Tensor, k: int = 0) -> Tensor:
    """The smallest set of most probable tokens whose mass reaches p, at least one; ties with the last stay. Of logits
    that `filter_top_k` has left, k spares the sorting of the whole vocabulary."""
    if not isinstance(p, Tensor) and p >= 1.0:
        return logits
    few = 0 < k < logits.shape[-1]
    ordered = logits.topk(k, dim=-1).values if few else logits.sort(dim=-1, descending=True).values
    probabilities = (ordered - logits.logsumexp(-1, keepdim=True)).exp_()
    wanted = p.unsqueeze(-1) if isinstance(p, Tensor) else p
    inside = (probabilities.cumsum(-1) - probabilities < wanted).sum(-1, keepdim=True)
    below = logits < ordered.gather(-1, (inside - 1).clamp_min(0))
    return logits.masked_fill(below & (wanted < 1.0) if isinstance(p, Tensor) else below, NEVER)


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
    z /= _divisor(settings.temperature)
    k, few = settings.top_k, isinstance(settings.top_k, Tensor)
    z = filter_top_k(z, k, settings.most_k if few else None)
    z = filter_top_p(z, settings.top_p, 0 if settings.sorts and few else settings.most_k if few else k)  # type: ignore[arg-type]
    mass = z.sub_(z.amax(-1, keepdim=True)).exp_().unflatten(-1, (-1, chunk))
    exact = finest(z.device)
    sums = mass.sum(-1, dtype=exact)
    edge = sums.cumsum(-1)
    aim = noise_BL.unsqueeze(-1) * edge[..., -1:]
    part = _first(sums, edge, aim)
    before = (edge - sums).gather(-1, part)
    inner = mass.gather(-2, part.unsqueeze(-1).expand(*part.shape, chunk)).squeeze(-2)
    return (part * chunk + _first(inner, inner.cumsum(-1, dtype=exact), aim - before)).squeeze(-1)


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
    temperature, greedy = settings.temperature, predicted.best(settings.never)
    if not isinstance(temperature, Tensor) and temperature == 0.0:
        return greedy, basis.log_p(greedy).exp()
    assert noise_BL is not None, "a draw needs noise"
    token = drawn(predicted.logits, settings, noise_BL)
    draws = temperature > 0
    if isinstance(draws, Tensor):
        token = torch.where(draws, token, greedy)
    log_p = basis.log_p(token)
    if settings.tempered_confidence:
        tempered = tempered_log_p(basis.logits, token, _divisor(temperature))
        log_p = torch.where(draws, tempered, log_p) if isinstance(draws, Tensor) else tempered
    return token, log_p.exp()


def _divisor(temperature: float | Tensor) -> float | Tensor:
    """[B, 1, 1] what logits are divided by: 1 for a row that is greedy."""
    if not isinstance(temperature, Tensor):
        return temperature
    return torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)


def tempered_log_p(logits_BLV: Tensor, token_BL: Tensor, divisor: float | Tensor) -> Tensor:
    """log softmax(z / T) of the given tokens, [B, L]."""
    z = logits_BLV.to(wide(logits_BLV)) / divisor
    return z.gather(-1, token_BL.unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)
