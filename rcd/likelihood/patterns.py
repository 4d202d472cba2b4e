"""Which tokens of a text are masked together, and with which weight their log probabilities count.

Shapes: N patterns, L tokens, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from rcd.diffusion.noise import uniform_of

GROUP = 8
"""Draws whose numbers of masks are spread evenly together; the standard error is that of the groups' means."""


@dataclass(frozen=True)
class Patterns:
    masked: Tensor
    """[N, L] booleans"""
    weight: Tensor
    """[N, L] fp64: what the log probability of a masked token counts."""
    groups: Tensor | None
    """[N] the group of each draw. None: these are all patterns, weighted by their probability, and the sum over them is
    the expectation."""

    def means(self, values_NL: Tensor) -> Tensor:
        """[G, L] of each group; of all patterns, the expectation as the only one."""
        if self.groups is None:
            return values_NL.sum(0, keepdim=True)
        size = torch.bincount(self.groups)
        sums = values_NL.new_zeros(len(size), values_NL.shape[1]).index_add_(0, self.groups, values_NL)
        return sums / size[:, None]


def patterns(sizes: Sequence[int], draws: int, key: int) -> Patterns:
    """Of a text whose blocks have so many tokens, each of which is masked by itself; `key` is what they are drawn by.
    All there are, where these are no more than `draws`: 2^n - 1 of n tokens, so that blocks of 4 take 15."""
    return every(sizes) if 2 ** max(sizes) - 1 <= draws else drawn(sizes, draws, key)


def every(sizes: Sequence[int]) -> Patterns:
    """All patterns: of n tokens a set of l has the probability 1 / (n C(n, l)), and counts n / l. Blocks are expected
    apart, so that row k holds the k-th set of each.

    n = 2    masked  x .  |  . x  |  x x      weight  1/2 each
    """
    most = 2 ** max(sizes) - 1
    masked, weight = [], []
    for n in sizes:
        number = torch.arange(1, most + 1)
        sets = (number[:, None] >> torch.arange(n)) & 1
        there = (number < 2**n)[:, None] & sets.bool()
        shares = torch.tensor([0.0, *(1 / (count * comb(n, count)) for count in range(1, n + 1))], dtype=torch.float64)
        masked.append(there)
        weight.append(shares[there.sum(1)][:, None].expand_as(there))
    return Patterns(torch.cat(masked, 1), torch.cat(weight, 1), None)


def drawn(sizes: Sequence[int], draws: int, key: int) -> Patterns:
    """Random patterns in groups of about `GROUP`. Within a group the numbers of masks are spread evenly over 1..n from
    a random one on, as LLaDA does within a batch (its rounding of halves to even makes some numbers more frequent;
    here each has the same probability). Every draw is a function of the key and its number alone.

    n = 5, a group of 4, from 3 on:    l  3 4 5 1
    """
    count = max(1, draws // GROUP)
    number = torch.arange(draws)
    group = number * count // draws
    first = torch.searchsorted(group, torch.arange(count))
    size = torch.bincount(group, minlength=count)
    seed = torch.tensor(key)
    masked, weight, before = [], [], 0
    for block, n in enumerate(sizes):
        turn = uniform_of(seed, torch.tensor(0), torch.arange(count), torch.tensor(block))
        start = (turn * n).long().clamp_max(n - 1)
        masks = (start[group] + (number - first[group]) * n // size[group]) % n + 1
        luck = uniform_of(seed, torch.tensor(1), number[:, None], before + torch.arange(n))
        masked.append(luck.argsort(1).argsort(1) < masks[:, None])
        weight.append((n / masks.double())[:, None].expand(-1, n))
        before += n
    return Patterns(torch.cat(masked, 1), torch.cat(weight, 1), group)
