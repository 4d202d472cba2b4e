"""Delta of Eq. 1 on a CPU without reading the whole codebook.

delta = sum_j p_j E_j. The most probable tokens enter with their own embeddings; what the others add up to is estimated
by the line E_j ~ mean + slope (z_j - mean z), the regression of embeddings on the logits of the row. Where logits are
z = W h + b, its slope is Cov(E, W) h / Var(z): one product with a small matrix. How many tokens are kept is each row's
own: so many that what is left out of a codebook without structure (sum of their p^2) and of one with structure (their
mass) both stay below a bound. A row that would need too many takes p @ E.
Shapes: P predictions, V vocabulary, D embedding, H hidden, K tokens kept of all rows, N blocks of ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rcd.residual.chunked import BLOCK, Statistics, windows
from rcd.residual.product import product

APART, TOGETHER = 0.0035, 0.0035
"""Bounds for what is left out, relative to delta: the part of which tokens' embeddings have nothing in common, and the
part that they have in common. Measured so that the mean error is below 0.5% (scripts/delta_error.py)."""
BEND = {True: 0.6, False: 1.2}
"""How far the tail's mean lies from its estimate, in standard deviations of the codebook's strong directions: with a
slope, and without one (measured, as above)."""
PEAKED = 3.0
"""So much farther it lies where one token has all mass: those next to it have more in common."""
MOST = 1 / 8
"""The largest share of the vocabulary that is kept; beyond it p @ E is as cheap."""
LEAST = 2048
"""Vocabularies below this size take p @ E: too few logits to know them by a sample."""
SAMPLE = 16384
"""Tokens from which the codebook's covariances are computed."""
HALVINGS, RANGE = 7, 22.0
"""The threshold is looked for so finely, and so far below the largest logit."""


@dataclass(frozen=True)
class Regression:
    """What is known of a codebook: enough to say where tokens lie that were not looked at."""

    mean: Tensor
    """[D]"""
    spread: float
    """Mean squared distance of an embedding from the mean."""
    directions: float
    """In how many directions it spreads evenly: (sum of the covariance's eigenvalues)^2 / sum of their squares."""
    covariance: Tensor | None = None
    """[H, D] Cov(W, E) with the head's weight W, in the codebook's dtype; None: logits without a known origin."""

    @classmethod
    def of(cls, codebook_VD: Tensor, head_VH: Tensor | None = None) -> Regression:
        every = stride(len(codebook_VD))
        return cls.sampled(codebook_VD, every, None if head_VH is None else head_VH[::every])

    @classmethod
    @torch.no_grad()
    def sampled(cls, codebook_VD: Tensor, every: int, head_SH: Tensor | None = None) -> Regression:
        """`head`: every such row of it alone, as many as are looked at."""
        wide = torch.promote_types(codebook_VD.dtype, torch.float32)
        sample_SD = codebook_VD[::every]
        embeddings = sample_SD.to(wide)
        mean = embeddings.mean(0)
        centred = embeddings - mean
        count, spread = len(centred), float(centred.pow(2).sum(-1).mean())
        own = centred.t() @ centred / count
        noise = spread**2 / count  # what a sample of independent tokens adds to the sum of squares
        squares = max(float(own.pow(2).sum()) - noise, spread**2 / own.shape[0])
        covariance = None
        if head_SH is not None:
            tied = head_SH.data_ptr() == sample_SD.data_ptr() and head_SH.shape == sample_SD.shape
            covariance = own if tied else head_SH.to(wide).t() @ centred / count
            covariance = covariance.to(codebook_VD.dtype)
        return cls(codebook_VD.mean(0, dtype=wide), spread, spread**2 / squares if spread else 1.0, covariance)


def stride(vocabulary: int) -> int:
    """Every such token is looked at."""
    return max(1, vocabulary // SAMPLE)


@dataclass
class Counts:
    """How deltas were computed."""

    rows: int = 0
    exact: int = 0
    """Rows that took p @ E."""
    kept: int = 0
    """Tokens kept of all other rows."""

    def add(self, other: Counts) -> None:
        self.rows, self.exact, self.kept = self.rows + other.rows, self.exact + other.exact, self.kept + other.kept


def delta(
    logits_PV: Tensor, read: Statistics, codebook_VD: Tensor, known: Regression, hidden_PH: Tensor | None = None,
    temperature: float = 1.0, row_by_row: bool = False,
) -> tuple[Tensor, Counts]:  # fmt: skip
    """(delta [P, D] in the codebook's dtype, how it was computed). `hidden` is what the head computed the logits of."""
    kind, size = codebook_VD.dtype, logits_PV.shape[-1]
    if not len(logits_PV):
        return codebook_VD.new_empty(0, codebook_VD.shape[1]), Counts()
    if known.covariance is None:
        hidden_PH = None
    least_P, count_P = _threshold(read, known, size, hidden_PH is not None, temperature)
    exact_P = count_P > (MOST * size if size >= LEAST else -1.0)
    p_K, row_K, ids_K, z_K = _kept(logits_PV, read, least_P.masked_fill(exact_P, float("inf")), temperature)
    held_P = torch.bincount(row_K, minlength=len(least_P))
    out = functional.embedding_bag(
        ids_K, codebook_VD, held_P.cumsum(0) - held_P, mode="sum", per_sample_weights=p_K.to(kind)
    )
    left_P = (1.0 - _by_row(p_K, held_P)).clamp_min(0.0)
    rest = left_P[:, None] * known.mean.to(left_P.dtype)
    if hidden_PH is not None:
        rest += _slope(hidden_PH, known, row_by_row) * _steps(read, p_K, z_K, held_P, left_P, temperature)[:, None]
    out = (out.to(rest.dtype) + rest).to(kind)
    places = exact_P.nonzero().squeeze(-1)
    if len(places):
        z = logits_PV[places].to(read.normaliser.dtype)
        p = ((z if temperature == 1.0 else z / temperature) - read.normaliser[places, None]).exp_().to(kind)
        out[places] = torch.stack([row @ codebook_VD for row in p]) if row_by_row else product(p, codebook_VD.t())
    return out, Counts(len(out), len(places), len(p_K))


def _threshold(
    read: Statistics, known: Regression, vocabulary: int, sloped: bool, temperature: float
) -> tuple[Tensor, Tensor]:
    """(the smallest logit that is kept [P], about how many tokens that keeps [P]).

    The mass below a logit is that of all blocks whose largest lies below it, and of the others in a block, for which
    one of them stands."""
    assert read.squares is not None and read.sample is not None
    blocks, whole = read.maxima.shape[1], read.sample.shape[1]
    z = torch.cat([read.maxima, read.sample], -1)
    mass = (z if temperature == 1.0 else z / temperature).sub(read.normaliser[:, None]).exp_()
    found = torch.empty_like(mass)  # comparisons as numbers: a product with booleans takes four times as long
    heads, others = mass[:, :blocks], mass[:, blocks:]
    others.mul_(torch.lt(read.sample, read.maxima[:, :whole], out=found[:, blocks:]))
    hidden = (1.0 - heads.sum(-1, keepdim=True)).clamp_min(0.0)
    others.mul_(hidden / others.sum(-1, keepdim=True).clamp_min(1e-30))
    size = read.squares + float(known.mean.pow(2).sum()) / max(known.spread, 1e-30)  # of delta, as a share of `spread`
    bend = BEND[sloped] * (1.0 + PEAKED * read.squares) / math.sqrt(known.directions)
    apart, together = 2 * APART**2 * size, TOGETHER * size.sqrt() / bend
    high, low = read.top.clone(), read.top - RANGE * temperature
    for _ in range(HALVINGS):
        middle = (high + low) / 2
        left = torch.lt(z, middle[:, None], out=found).mul_(mass).sum(-1)
        p = (middle / temperature - read.normaliser).exp()
        fine = (p * left <= apart) & (left <= together)
        low, high = torch.where(fine, middle, low), torch.where(fine, high, middle)
    torch.ge(z, low[:, None], out=found)
    return low, found[:, :blocks].sum(-1) + found[:, blocks:].sum(-1) * (vocabulary / max(whole, 1) - 1)


def _kept(
    logits_PV: Tensor, read: Statistics, least_P: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(p, row, id, logit) of every logit that reaches its row's least, row by row."""
    row, block = (read.maxima >= least_P[:, None]).nonzero(as_tuple=True)
    z, ids = windows(logits_PV, row, block)
    z = z.to(read.maxima.dtype)
    chosen = z >= least_P[row, None]
    if logits_PV.shape[-1] % BLOCK:
        chosen &= ids >= (block * BLOCK)[:, None]
    window, place = chosen.nonzero(as_tuple=True)
    z, row, ids = z[window, place], row[window], ids[window, place]
    return (z / temperature - read.normaliser[row]).exp_(), row, ids, z


def _by_row(value_K: Tensor, held_P: Tensor) -> Tensor:
    return torch.segment_reduce(value_K, "sum", lengths=held_P, initial=0.0)


def _slope(hidden_PH: Tensor, known: Regression, row_by_row: bool) -> Tensor:
    """Cov(E, z) [P, D]."""
    assert known.covariance is not None
    hidden = hidden_PH.to(known.covariance.dtype)
    found = torch.stack([row @ known.covariance for row in hidden]) if row_by_row else hidden @ known.covariance
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _steps(
    read: Statistics, p_K: Tensor, z_K: Tensor, held_P: Tensor, left_P: Tensor, temperature: float
) -> Tensor:  # fmt: skip
    """How far along the slope the left-out tokens lie: sum of p (z - mean z) over them, over Var(z); [P]."""
    assert read.entropy is not None and read.sample is not None
    finite = read.sample.isfinite()
    sample, number = read.sample.masked_fill(~finite, 0.0), finite.sum(-1).clamp_min(1)
    mean = sample.sum(-1) / number
    variance = (sample.square().sum(-1) / number - mean.square()).clamp_min(1e-6)
    expected = temperature * (read.normaliser - read.entropy)  # sum of p z
    return (expected - _by_row(p_K * z_K, held_P) - left_P * mean) / variance
