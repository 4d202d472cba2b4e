"""Delta at the price of nothing: the most probable tokens exactly, all others through a few directions of the codebook.

p @ E reads the whole codebook at every step, 1.2 GB for a vocabulary of 152k and a width of 4,096. Here one reading of
the logits gives the token, its confidence, the normaliser, the entropy, and the K most probable tokens; delta is
sum_k p_k E_k over these, and the rest of the mass enters through E ~ mean + A B, where B holds the R strongest
directions of the codebook and A the tokens' coordinates in it (R = 16: 5 MB instead of 1.2 GB).
docs/results/engine.md has its error.

Everything here is plain torch; `rcd.kernels.fused` has the same functions as Triton kernels.
Shapes: P predictions, V vocabulary, D embedding, K tokens kept, R directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rcd.residual.distribution import Distribution

CHUNK, PER_CHUNK, LINE = 2048, 8, 64
"""The tokens kept are the most probable among the PER_CHUNK most probable of each CHUNK of ids. A chunk is made of
lines of 64 neighbouring ids from all over the vocabulary, because a tokenizer's frequent tokens are neighbours."""


def chunk_for(vocabulary: int, keep: int) -> int:
    """How many ids are looked at together, a power of two: fewer for a small vocabulary, so that there are four
    candidates and more for every token kept."""
    size = CHUNK
    while size > PER_CHUNK and size * 4 * keep > vocabulary * PER_CHUNK:
        size //= 2
    return size


class Reading(NamedTuple):
    """One pass over logits [P, V]."""

    token: Tensor
    """[P] the most probable token that may be sampled; of equals, the first."""
    log_p: Tensor
    """[P] its log probability."""
    normaliser: Tensor
    """[P] log sum exp."""
    peak: Tensor
    """[P] the largest probability of all."""
    entropy: Tensor
    """[P] at the residual's temperature, in nats."""
    kept_p: Tensor
    """[P, K] probabilities of the tokens that are kept, largest first."""
    kept_ids: Tensor
    """[P, K]"""


@dataclass(frozen=True)
class Tail:
    """E ~ mean + A B: what stands for the tokens that are not kept."""

    mean: Tensor
    """[D]"""
    coordinates: Tensor
    """A [V, R]"""
    directions: Tensor
    """B [R, D]"""

    @classmethod
    @torch.no_grad()
    def of(cls, codebook_VD: Tensor, rank: int, rounds: int = 4) -> Tail:
        """The strongest directions, by subspace iteration from a fixed start: the same for the same codebook."""
        wide = torch.promote_types(codebook_VD.dtype, torch.float32)
        mean = codebook_VD.to(wide).mean(0)
        rank = min(rank, *codebook_VD.shape)
        guess = torch.randn(codebook_VD.shape[1], min(rank + 8, *codebook_VD.shape), generator=torch.Generator())
        basis = torch.linalg.qr(guess.to(mean)).Q
        for _ in range(rounds):
            projected = _centred(codebook_VD, mean, basis)
            pulled = sum(
                (part.to(wide) - mean).t() @ x
                for part, x in zip(codebook_VD.split(16384), projected.split(16384), strict=True)
            )
            assert isinstance(pulled, Tensor)
            basis = torch.linalg.qr(pulled).Q
        projected = _centred(codebook_VD, mean, basis)
        _, vectors = torch.linalg.eigh(projected.t() @ projected)
        basis = basis @ vectors.flip(-1)[:, :rank]
        coordinates = _centred(codebook_VD, mean, basis)
        kind = codebook_VD.dtype
        return cls(mean.to(kind), coordinates.to(kind), basis.t().contiguous().to(kind))


def _centred(codebook_VD: Tensor, mean_D: Tensor, basis_DX: Tensor) -> Tensor:
    return torch.cat([(part.to(mean_D.dtype) - mean_D) @ basis_DX for part in codebook_VD.split(16384)])


def summarise(
    logits_PV: Tensor, never: int, t_res: float = 1.0, keep: int = 0, chunk: int | None = None,
    per_chunk: int = PER_CHUNK,
) -> Reading:  # fmt: skip
    """Read the logits once. The `per_chunk` most probable tokens of all are always kept, and all the `keep` most
    probable unless one chunk holds more than `per_chunk` of them."""
    z = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
    normaliser = z.logsumexp(-1)
    allowed = z.index_fill(-1, torch.full((1,), never, device=z.device), float("-inf"))
    token = allowed.argmax(-1)
    log_p = z.gather(-1, token[:, None]).squeeze(-1) - normaliser
    peak = (z.amax(-1) - normaliser).exp()
    entropy = torch.special.entr((z if t_res == 1.0 else z / t_res).softmax(-1)).sum(-1)
    keep = min(keep, z.shape[-1])
    value, index = _kept(z, keep, chunk or chunk_for(z.shape[-1], keep), per_chunk)
    return Reading(token, log_p, normaliser, peak, entropy, (value - normaliser[:, None]).exp(), index)


def _kept(z_PV: Tensor, keep: int, chunk: int, per_chunk: int) -> tuple[Tensor, Tensor]:
    """(logits [P, K], ids [P, K]) of the tokens that are kept; of equal logits, the first ids."""
    p, v = z_PV.shape
    if not keep:
        return z_PV.new_empty(p, 0), torch.empty(p, 0, dtype=torch.long, device=z_PV.device)
    index = _chunks(v, chunk, per_chunk, z_PV.device)
    padded = functional.pad(z_PV, (0, index.numel() - v), value=float("-inf"))[:, index]
    order = padded.argsort(dim=-1, descending=True, stable=True)[..., :per_chunk]
    ids = index.expand(p, *index.shape).gather(-1, order).flatten(1)
    ids, by_id = ids.sort(dim=-1)
    values = padded.gather(-1, order).flatten(1).gather(1, by_id)
    best = values.argsort(dim=-1, descending=True, stable=True)[:, :keep]
    return values.gather(1, best), ids.gather(1, best).clamp_max(v - 1)


def line_for(chunk: int, per_chunk: int) -> int:
    """Neighbouring ids that stay together in a chunk."""
    return min(LINE, max(1, chunk // per_chunk))


def _chunks(vocabulary: int, chunk: int, per_chunk: int, device: torch.device) -> Tensor:
    """[parts, chunk] the ids of every chunk, rising; those beyond the vocabulary are none."""
    parts, line = -(-vocabulary // chunk), line_for(chunk, per_chunk)
    at = torch.arange(chunk, device=device)
    return ((at // line) * parts + torch.arange(parts, device=device)[:, None]) * line + at % line


def project(logits_PV: Tensor, normaliser_P: Tensor, coordinates_VR: Tensor) -> Tensor:
    """p @ A [P, R]: where the whole distribution lies in the codebook's strongest directions."""
    p = (logits_PV.to(normaliser_P.dtype) - normaliser_P[:, None]).exp()
    return p @ coordinates_VR.to(p.dtype)


def expected_embedding(p_PK: Tensor, ids_PK: Tensor, place_PR: Tensor, codebook_VD: Tensor, tail: Tail) -> Tensor:
    """Delta of Eq. 1: sum_k p_k E_k + (1 - sum_k p_k) mean + (p A - sum_k p_k A_k) B."""
    wide = torch.promote_types(codebook_VD.dtype, torch.float32)
    p = p_PK.to(wide).unsqueeze(-1)
    rest = (1.0 - p.sum(-2)).clamp_min(0.0)
    kept = (p * codebook_VD[ids_PK].to(wide)).sum(-2) + rest * tail.mean.to(wide)
    place = place_PR.to(wide) - (p * tail.coordinates[ids_PK].to(wide)).sum(-2)
    return (kept + place @ tail.directions.to(wide)).to(codebook_VD.dtype)


def probabilities(logits_PV: Tensor, normaliser_P: Tensor, kind: torch.dtype) -> Tensor:
    return (logits_PV.to(normaliser_P.dtype) - normaliser_P[:, None]).exp().to(kind)


@dataclass(frozen=True)
class Summariser:
    """How a run reads its logits."""

    parts: Any
    """The module that computes: this one, or `rcd.kernels.fused`."""
    never: int
    """The id that is never sampled: the mask."""
    t_res: float = 1.0
    keep: int = 0
    """Tokens kept; 0: delta is exact, or there is none."""
    tail: Tail | None = None

    def __call__(
        self, logits_BLV: Tensor, hidden_BLH: Tensor | None = None, counts: list[int] | None = None
    ) -> Summary:
        return Summary(logits_BLV, self)


class Summary(Distribution):
    """A distribution of which only the reading is computed; p itself would be an array of the vocabulary's size."""

    def __init__(self, logits_BLV: Tensor, how: Summariser):
        super().__init__(logits_BLV)
        self.how = how
        self.flat = logits_BLV.flatten(0, -2)
        self.reading: Reading = how.parts.summarise(self.flat, how.never, how.t_res, how.keep)
        self.normaliser = self.reading.normaliser.view(logits_BLV.shape[:-1])

    def best(self, never: tuple[int, ...] = ()) -> Tensor:
        return self._shaped(self.reading.token) if never == (self.how.never,) else super().best(never)

    def log_p(self, token_BL: Tensor) -> Tensor:
        known = token_BL.data_ptr() == self.reading.token.data_ptr()
        return self._shaped(self.reading.log_p) if known else super().log_p(token_BL)

    def entropy_at(self, temperature: float) -> Tensor:
        return self._shaped(self.reading.entropy) if temperature == self.how.t_res else super().entropy_at(temperature)

    @property
    def peak(self) -> Tensor:
        return self._shaped(self.reading.peak)

    def expectation(self, codebook_VD: Tensor) -> Tensor:
        how, read = self.how, self.reading
        if how.tail is None:
            delta = how.parts.probabilities(self.flat, read.normaliser, codebook_VD.dtype) @ codebook_VD
        else:
            place = how.parts.project(self.flat, read.normaliser, how.tail.coordinates)
            delta = how.parts.expected_embedding(read.kept_p, read.kept_ids, place, codebook_VD, how.tail)
        return delta.view(*self.logits.shape[:-1], -1)

    def _shaped(self, value_P: Tensor) -> Tensor:
        return value_P.view(self.logits.shape[:-1])
