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
    confidence: str = "tempered"
    """What it is a probability under: softmax(z / temperature), as SDAR's evaluator has it; `untempered`, softmax(z),
    as LLaDA's; `filtered`, softmax(z / temperature) after top-k and top-p, as Dream's."""
    never: tuple[int, ...] = ()
    """Ids that are never sampled: the mask, always."""
    last: tuple[int, ...] = ()
    """Ids that may be sampled, but with confidence 0: committed only when nothing else is left. The other tokens'
    confidences are renormalised without them, as LLaDA's `confidence_eos_eot_inf` does."""
    most_k: int = 0
    """The largest top_k."""
    sorts: bool = True
    """Whether some row has a top_p and no top_k, so that all of its vocabulary must be sorted."""

    @property
    def greedy(self) -> bool:
        """Whether every row is, for certain."""
        return not isinstance(self.temperature, Tensor) and self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """Whether some row may have a top-k or a top-p."""
        few, p = isinstance(self.top_k, Tensor) or self.top_k > 0, self.top_p
        return few or isinstance(p, Tensor) or p < 1.0


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


def filtered(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Top-k, then top-p."""
    k, few = settings.top_k, isinstance(settings.top_k, Tensor)
    logits = filter_top_k(logits, k, settings.most_k if few else None)
    return filter_top_p(logits, settings.top_p, 0 if settings.sorts and few else settings.most_k if few else k)  # type: ignore[arg-type]


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
    z = filtered(z, settings)
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

    The confidence is the token's probability before top-k, top-p and exclusions, so that a filter never raises it; but
    after the filters where the setting `confidence` says so.
    """
    basis, temperature, greedy = _basis(predicted, settings), settings.temperature, predicted.best(settings.never)
    narrow = settings.confidence == "filtered" and settings.filters
    if settings.greedy:
        return greedy, (_filtered_log_p(basis, greedy, settings) if narrow else basis.log_p(greedy)).exp()
    assert noise_BL is not None, "a draw needs noise"
    token = drawn(predicted.logits, settings, noise_BL)
    draws = temperature > 0
    if isinstance(draws, Tensor):
        token = torch.where(draws, token, greedy)
    if narrow:
        return token, _filtered_log_p(basis, token, settings).exp()
    log_p = basis.log_p(token)
    if settings.confidence != "untempered":
        tempered = tempered_log_p(basis.logits, token, _divisor(temperature))
        log_p = torch.where(draws, tempered, log_p) if isinstance(draws, Tensor) else tempered
    return token, log_p.exp()


def _basis(predicted: Distribution, settings: SamplingSettings) -> Distribution:
    return Distribution(without(predicted.logits, settings.last)) if settings.last else predicted


def ranked(predicted: Distribution, settings: SamplingSettings) -> Distribution:
    """The distribution under which the confidence is the token's probability."""
    basis, narrow = _basis(predicted, settings), settings.confidence == "filtered" and settings.filters
    if settings.confidence == "untempered" or (settings.greedy and not narrow):
        return basis
    z = _tempered(basis.logits, settings)
    return Distribution(filtered(z, settings) if narrow else z)


def _tempered(logits_BLV: Tensor, settings: SamplingSettings) -> Tensor:
    z = logits_BLV.to(wide(logits_BLV))
    return z if settings.greedy else z / _divisor(settings.temperature)


def _filtered_log_p(basis: Distribution, token_BL: Tensor, settings: SamplingSettings) -> Tensor:
    """log p of the given tokens after the filters, [B, L]. A token that only the mask's exclusion has let in is counted
    among those that pass."""
    z = _tempered(basis.logits, settings)
    own = z.gather(-1, token_BL.unsqueeze(-1))
    kept = filtered(z, settings).scatter(-1, token_BL.unsqueeze(-1), own)
    return own.squeeze(-1) - kept.logsumexp(-1)


def _divisor(temperature: float | Tensor) -> float | Tensor:
    """[B, 1, 1] what logits are divided by: 1 for a row that is greedy."""
    if not isinstance(temperature, Tensor):
        return temperature
    return torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)


def tempered_log_p(logits_BLV: Tensor, token_BL: Tensor, divisor: float | Tensor) -> Tensor:
    """log softmax(z / T) of the given tokens, [B, L]."""
    z = logits_BLV.to(wide(logits_BLV)) / divisor
    return z.gather(-1, token_BL.unsqueeze(-1)).squeeze(-1) - z.logsumexp(-1)
