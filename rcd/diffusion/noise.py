"""The forward process: tokens replaced by [M] with probability t (Sec. 2.1).

Drawn on the CPU from a generator for each example, so that the noise of an example depends on the seed, the epoch and
the example alone: not on the batch it is in, the number of processes or a resume.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

EPS = 1e-3


def example_generator(*key: int | str) -> torch.Generator:
    """A generator for that key: equal keys, equal draws, on every machine."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def draw(answer_L: Tensor, block_L: Tensor, generator: torch.Generator, per: str = "sequence") -> tuple[Tensor, Tensor]:
    """(masked [L], p_mask [L]) of one example: t ~ U(0, 1) once (`sequence`, as SDAR and LLaDA train) or once a block
    (`block`, as the block diffusion loss is written), p_mask = (1 - eps) t + eps, and m_i ~ Bernoulli(p_mask) at the
    answer's positions; the prompt is never masked."""
    levels = int(block_L.max()) + 1 if per == "block" else 1
    t = torch.rand(levels, generator=generator)
    p_mask = ((1 - EPS) * t + EPS)[block_L if per == "block" else torch.zeros_like(block_L)]
    masked = (torch.rand(len(answer_L), generator=generator) < p_mask) & answer_L
    return masked, p_mask
