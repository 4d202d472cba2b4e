"""What a step predicts: one categorical distribution per position, its statistics computed once, in fp32 or wider.

Shapes: B batch, L window, V vocabulary, D embedding.
"""

from __future__ import annotations

from functools import cache, cached_property

import torch
from torch import Tensor

from rcd.residual.context import soft_embedding, wide

FEW = 16_384
"""Of vocabularies up to this size, a row for every choice of ids to rule out is kept."""


class Distribution:
    """softmax(logits / temperature), in fp32, or in fp64 where the logits are; every statistic is lazy and kept."""

    def __init__(self, logits_BLV: Tensor, temperature: float = 1.0):
        self.logits = logits_BLV
        self.temperature = temperature

    @cached_property
    def scaled(self) -> Tensor:
        z = self.logits.to(wide(self.logits))
        return z if self.temperature == 1.0 else z / self.temperature

    @cached_property
    def normaliser(self) -> Tensor:
        """log sum exp, [B, L]. It is finite exactly when the row's softmax exists."""
        return torch.logsumexp(self.scaled, dim=-1)

    @cached_property
    def p(self) -> Tensor:
        return torch.softmax(self.scaled, dim=-1)

    @property
    def peak(self) -> Tensor:
        """max p, [B, L]."""
        return self.p.amax(-1)

    def best(self, never: tuple[int, ...] = ()) -> Tensor:
        """The most probable token but those of `never`, [B, L]; of equals, the first."""
        return without(self.logits, never).argmax(-1)

    def log_p(self, token_BL: Tensor) -> Tensor:
        """log p of the given tokens, [B, L]."""
        z = self.logits.gather(-1, token_BL.unsqueeze(-1)).squeeze(-1).to(wide(self.logits))
        return (z if self.temperature == 1.0 else z / self.temperature) - self.normaliser

    def entropy_at(self, temperature: float) -> Tensor:
        """H in nats of the same logits at another temperature, [B, L]."""
        return torch.special.entr(self.at(temperature).p).sum(-1)

    def expectation(self, codebook_VD: Tensor) -> Tensor:
        """The expected embedding (Eq. 1), [B, L, D]."""
        return soft_embedding(self.p, codebook_VD)

    def mixed(self, weight_BLV: Tensor, codebook_VD: Tensor) -> Tensor:
        """The embedding that other weights than p expect [B, L, D], computed as an expectation is: where no bit may
        depend on how many others there are, so many at a time."""
        return soft_embedding(weight_BLV, codebook_VD)

    def at(self, temperature: float) -> Distribution:
        """The same logits at another temperature (T_res, Sec. 3.3)."""
        return self if temperature == self.temperature else Distribution(self.logits, temperature)


@cache
def _ruled_out(size: int, ids: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """[V] 0, but -inf at the ids. One sum with it takes a third of the time of three small calls."""
    with torch.inference_mode(False):
        row = torch.zeros(size, dtype=kind)
        row[[one for one in ids if one < size]] = float("-inf")
    return row


def without(logits: Tensor, ids: tuple[int, ...]) -> Tensor:
    """The logits with some ids ruled out."""
    if ids and logits.device.type == "cpu" and logits.shape[-1] <= FEW:
        return logits + _ruled_out(logits.shape[-1], ids, logits.dtype)
    for one in ids:
        outside = torch.arange(logits.shape[-1], device=logits.device) == one
        logits = logits.masked_fill(outside, float("-inf"))
    return logits


def align_vocabulary(logits_BLV: Tensor, vocabulary: int) -> Tensor:
    """Logits over exactly `vocabulary` tokens: a wider (padded) head is cut, a narrower one is filled with -inf.

    Done on logits, so that the softmax that follows renormalises. The only place where the padded vocabularies of
    a reference and a target meet.
    """
    width = logits_BLV.shape[-1]
    if width > vocabulary:
        return logits_BLV[..., :vocabulary]
    if width < vocabulary:
        return torch.nn.functional.pad(logits_BLV, (0, vocabulary - width), value=float("-inf"))
    return logits_BLV
