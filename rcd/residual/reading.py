"""How a run reads its logits: as a plain distribution, through kernels on a GPU, or in chunks on a CPU.

Shapes: B batch, L window, V vocabulary, D embedding, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rcd.residual.chunked import FLOOR, Statistics, best, statistics
from rcd.residual.distribution import Distribution
from rcd.residual.product import product_by
from rcd.residual.shortcut import Counts, Regression, delta
from rcd.residual.summary import Summariser, Tail

LARGE = 16_384
"""Vocabularies up to this size are read as plain distributions and have an exact delta: there both cost nothing."""


class Reader(Protocol):
    def __call__(
        self, logits_BLV: Tensor, hidden_BLH: Tensor | None = None, counts: list[int] | None = None
    ) -> Distribution:
        """The distribution of logits, which the head computed of `hidden` (where that is known); of `counts` rows at a
        time, where no bit may depend on how many others there are."""
        ...


class Readable(Protocol):
    """What is asked of a model (`rcd.models.lm.DiffusionLM`)."""

    @property
    def codebook(self) -> Tensor: ...
    def tail(self, rank: int) -> Tail: ...
    def regression(self) -> Regression: ...


def reader_for(
    model: Readable, parts: Any, never: tuple[int, ...], *, carries: bool, expects: bool, t_res: float = 1.0,
    method: str | None = None, tokens: int = 64, rank: int = 16, row_by_row: bool = False,
) -> Reader | None:  # fmt: skip
    """What is cheap on this device; None: a plain `Distribution`.

    `method` is that of delta: `exact` (p @ E), `kept` (the short cut of the device) or None (the short cut where the
    vocabulary is large). fp64 is always exact on a CPU."""
    codebook = model.codebook
    vocabulary = codebook.shape[0]
    short = expects and (method == "kept" or (method is None and vocabulary > LARGE))
    if parts.__name__.endswith(".fused"):
        tail = model.tail(rank) if short else None
        return Summariser(parts, never[0], t_res, tokens if short else 0, tail) if len(never) == 1 else None
    if codebook.device.type != "cpu":
        return None
    if vocabulary <= LARGE and not short:
        return Small
    known = model.regression() if short and codebook.dtype != torch.float64 else None
    return ChunkedReader(known, carries, row_by_row)


@dataclass(frozen=True)
class ChunkedReader:
    """On a CPU, a few rows of the logits at a time (`rcd.residual.chunked`)."""

    known: Regression | None = None
    """Of the codebook, for the short cut to delta; None: p @ E."""
    carries: bool = True
    """Whether entropies and deltas will be asked for."""
    row_by_row: bool = False
    """Multiply each row alone, so that its last digits do not depend on how many others there are."""
    counts: Counts = field(default_factory=Counts, compare=False)
    """How all deltas of this run were computed."""

    def __call__(
        self, logits_BLV: Tensor, hidden_BLH: Tensor | None = None, counts: list[int] | None = None
    ) -> Distribution:
        return Chunked(logits_BLV, self, hidden_BLH)


class Small(Distribution):
    """On a CPU, a small vocabulary, with as few calls as there can be: they cost more than what they compute."""

    def __init__(self, logits_BLV: Tensor, hidden_BLH: Tensor | None = None, counts: list[int] | None = None):
        super().__init__(logits_BLV)
        self._counts = counts
        z = logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32))
        self._top, self._best = z.max(-1)
        self._shifted = z - self._top.unsqueeze(-1)
        self._mass = self._shifted.exp()
        self._total = self._mass.sum(-1)
        self._log_total = self._total.log()
        self.normaliser = self._top + self._log_total

    @cached_property
    def p(self) -> Tensor:
        return self._mass / self._total.unsqueeze(-1)

    @property
    def peak(self) -> Tensor:
        return self._total.reciprocal()

    def best(self, never: tuple[int, ...] = ()) -> Tensor:
        for one in never:
            if bool((self._best == one).any()):
                return super().best(never)
        return self._best

    def entropy_at(self, temperature: float) -> Tensor:
        if temperature != 1.0:
            return super().entropy_at(temperature)
        product = torch.linalg.vecdot(self._mass, self._shifted.clamp_min_(FLOOR))
        return self._log_total.addcdiv(product, self._total, value=-1)

    def expectation(self, codebook_VD: Tensor) -> Tensor:
        """p @ E, divided by the sum behind the product; of `counts` rows at a time."""
        kind = codebook_VD.dtype
        found = product_by(self._counts, self._mass.to(kind), codebook_VD.t())
        return (found / self._total.unsqueeze(-1)).to(kind)

    def mixed(self, weight_BLV: Tensor, codebook_VD: Tensor) -> Tensor:
        if self._counts is None:
            return super().mixed(weight_BLV, codebook_VD)
        return product_by(self._counts, weight_BLV.to(codebook_VD.dtype), codebook_VD.t())

    def at(self, temperature: float) -> Distribution:
        if self._counts is None or temperature == 1.0:
            return super().at(temperature)
        return Counted(self.logits, temperature, self._counts)


class Counted(Distribution):
    """At another temperature, where products are of so many rows at a time."""

    def __init__(self, logits_BLV: Tensor, temperature: float, counts: list[int]):
        super().__init__(logits_BLV, temperature)
        self._counts = counts

    def expectation(self, codebook_VD: Tensor) -> Tensor:
        return self.mixed(self.p, codebook_VD)

    def mixed(self, weight_BLV: Tensor, codebook_VD: Tensor) -> Tensor:
        return product_by(self._counts, weight_BLV.to(codebook_VD.dtype), codebook_VD.t())


class Chunked(Distribution):
    """A distribution of which p itself, an array of the vocabulary's size, is not computed unless it is asked for."""

    def __init__(
        self, logits_BLV: Tensor, how: ChunkedReader, hidden_BLH: Tensor | None = None, temperature: float = 1.0
    ):
        super().__init__(logits_BLV, temperature)
        self.how = how
        self.flat = logits_BLV.flatten(0, -2)
        self.hidden = hidden_BLH
        self.counts = Counts()
        """How the deltas of this distribution were computed."""
        self._others: dict[float, Chunked] = {}

    @cached_property
    def read(self) -> Statistics:
        return statistics(self.flat, self.temperature, moments=self.how.carries)

    @cached_property
    def scaled(self) -> Tensor:
        z = self.logits.to(self.read.top.dtype)
        return z if self.temperature == 1.0 else z / self.temperature

    @cached_property
    def normaliser(self) -> Tensor:
        return self._shaped(self.read.normaliser)

    @property
    def peak(self) -> Tensor:
        return self._shaped(self.read.peak)

    def best(self, never: tuple[int, ...] = ()) -> Tensor:
        return self._shaped(best(self.flat, self.read.maxima, never))

    def log_p(self, token_BL: Tensor) -> Tensor:
        z = self.logits.gather(-1, token_BL.unsqueeze(-1)).squeeze(-1).to(self.read.top.dtype)
        return (z if self.temperature == 1.0 else z / self.temperature) - self.normaliser

    def entropy_at(self, temperature: float) -> Tensor:
        entropy = self.at(temperature).read.entropy
        return super().entropy_at(temperature) if entropy is None else self._shaped(entropy)

    def at(self, temperature: float) -> Chunked:
        if temperature == self.temperature:
            return self
        if temperature not in self._others:
            self._others[temperature] = Chunked(self.logits, self.how, self.hidden, temperature)
        return self._others[temperature]

    def expectation(self, codebook_VD: Tensor) -> Tensor:
        known, shape = self.how.known, self.logits.shape[:-1]
        if known is None or self.read.squares is None:
            return self.mixed(self.p, codebook_VD)
        hidden = None if self.hidden is None else self.hidden.flatten(0, -2)
        found, counts = delta(
            self.flat, self.read, codebook_VD, known, hidden, self.temperature, row_by_row=self.how.row_by_row
        )
        self.counts.add(counts)
        self.how.counts.add(counts)
        return found.view(*shape, found.shape[-1])

    def mixed(self, weight_BLV: Tensor, codebook_VD: Tensor) -> Tensor:
        if not self.how.row_by_row:
            return super().mixed(weight_BLV, codebook_VD)
        rows = weight_BLV.to(codebook_VD.dtype).flatten(0, -2)
        return torch.stack([row @ codebook_VD for row in rows]).view(*weight_BLV.shape[:-1], -1)

    def _shaped(self, value_P: Tensor) -> Tensor:
        return value_P.view(self.logits.shape[:-1])
