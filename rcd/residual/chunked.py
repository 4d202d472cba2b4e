"""One reading of the logits on a CPU, a few rows at a time so that they stay in the cache.

A whole array of the vocabulary's size is written and read again by every torch call. Here a chunk of rows goes
through all calls before the next one does; what is left of a row is some thousand numbers: the largest logit of
every block of neighbouring ids (from which the best token and the most probable ones are found without looking at
the others), and one logit of every block as a sample.
Shapes: P predictions, V vocabulary, N blocks, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
"""Neighbouring ids whose largest logit is kept."""
CHUNK = 2**19
"""Logits of a chunk, for each thread: few enough to stay in a cache, many enough that calls cost little."""
FLOOR = -1e4
"""Stands for logits of -inf where 0 * -inf must be 0."""


@dataclass(frozen=True)
class Statistics:
    """What is left of logits [P, V] / temperature; fp32, or fp64 where the logits are."""

    maxima: Tensor
    """[P, N] the largest logit of every block, the last one perhaps shorter than BLOCK."""
    top: Tensor
    """[P] the largest logit."""
    normaliser: Tensor
    """[P] log sum exp(z / temperature); no number where the row has a NaN or +inf."""
    peak: Tensor
    """[P] the largest probability."""
    entropy: Tensor | None = None
    """[P] in nats; with `moments`, as what follows."""
    squares: Tensor | None = None
    """[P] sum of p^2."""
    sample: Tensor | None = None
    """[P, V // BLOCK] a logit of every whole block."""


def statistics(logits_PV: Tensor, temperature: float = 1.0, moments: bool = False) -> Statistics:
    """Of a row the result depends on nothing but the row."""
    (rows, size), wide = logits_PV.shape, torch.promote_types(logits_PV.dtype, torch.float32)
    blocks, threads = -(-size // BLOCK), torch.get_num_threads()
    each = max(1, min(rows, threads * max(1, CHUNK // size)))
    on: dict[str, Any] = {"dtype": wide, "device": logits_PV.device}
    maxima = torch.empty(rows, blocks, **on)
    top, peak, total, product, squares = (torch.empty(rows, **on) for _ in range(5))
    p_CV, shifted_CV = torch.empty(each, size, **on), torch.empty(each, size, **on)
    sample = torch.empty(rows, size // BLOCK, **on) if moments else None
    copied = logits_PV.dtype != wide
    for first in range(0, rows, each):
        part = slice(first, min(first + each, rows))
        z, p, shifted = logits_PV[part], p_CV[: part.stop - first], shifted_CV[: part.stop - first]
        if copied:
            z = shifted.copy_(z)
        _block_maxima(z, maxima[part])
        torch.amax(maxima[part], -1, out=top[part])
        if sample is not None:
            sample[part] = z[:, BLOCK // 2 :: BLOCK][:, : sample.shape[1]]
        if moments or temperature != 1.0:
            z = torch.sub(z, top[part, None], out=shifted)
        if temperature != 1.0:
            z.mul_(1.0 / temperature)
        torch.softmax(z, -1, out=p)
        torch.amax(p, -1, out=peak[part])
        total[part] = _sum(p)  # torch.softmax divides by a sum that is 1e-5 off in fp32, this one is not
        if moments:
            product[part] = _sum(z.mul_(p))
            squares[part] = _sum(p.square_())
    peak /= total
    rest = -peak.log()
    normaliser = (top if temperature == 1.0 else top / temperature) + rest
    if not moments:
        return Statistics(maxima, top, normaliser, peak)
    product /= total
    ruled_out = product.isnan() & normaliser.isfinite()  # 0 * -inf
    if bool(ruled_out.any()):
        z = ((logits_PV[ruled_out].to(wide) - top[ruled_out, None]) / temperature).clamp_min(FLOOR)
        product[ruled_out] = torch.linalg.vecdot(z.softmax(-1), z)
    squares /= total.square()
    return Statistics(maxima, top, normaliser, peak, (rest - product).clamp_min(0.0), squares, sample)


def _block_maxima(z_CV: Tensor, out_CN: Tensor) -> None:
    whole = z_CV.shape[-1] // BLOCK
    if whole:
        torch.amax(z_CV[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK)), -1, out=out_CN[:, :whole])
    if whole < out_CN.shape[-1]:
        torch.amax(z_CV[:, whole * BLOCK :], -1, out=out_CN[:, whole])


def _sum(x_CV: Tensor) -> Tensor:
    """Of every row. The threads share the sum of one row alone, which would then have other last digits than among
    others: it is added up twice instead."""
    return x_CV.sum(-1) if len(x_CV) > 1 else x_CV.expand(2, -1).sum(-1)[:1]


def windows(logits_PV: Tensor, row_H: Tensor, block_H: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [H, BLOCK], ids [H, BLOCK]) of some blocks. The last block, if it is a shorter one, begins with ids of
    the block before it."""
    rows, size = logits_PV.shape
    width = min(BLOCK, size)
    begin = (block_H * BLOCK).clamp_max(size - width)
    stride, unit = logits_PV.stride() if rows else (size, 1)
    assert unit == 1, "a row's logits lie behind one another"
    every = max(0, (rows - 1) * stride + size - width + 1)
    found = logits_PV.as_strided((every, width), (1, 1)).index_select(0, row_H * stride + begin)
    return found, begin[:, None] + torch.arange(width, device=begin.device)


def best(logits_PV: Tensor, maxima_PN: Tensor, never: tuple[int, ...] = ()) -> Tensor:
    """[P] the most probable token but those of `never`; of equals, the first."""
    rows = torch.arange(len(maxima_PN), device=maxima_PN.device)
    if never:
        maxima_PN = maxima_PN.clone()
        for block in {one // BLOCK for one in never}:
            z, ids = windows(logits_PV, rows, torch.full_like(rows, block))
            own = ids >= block * BLOCK  # the last block's window may begin in the one before
            maxima_PN[:, block] = _without(z, ids, never).masked_fill(~own, float("-inf")).amax(-1)
    z, ids = windows(logits_PV, rows, maxima_PN.argmax(-1))
    return ids.gather(-1, _without(z, ids, never).argmax(-1, keepdim=True)).squeeze(-1)


def _without(z: Tensor, ids: Tensor, never: tuple[int, ...]) -> Tensor:
    for one in never:
        z = z.masked_fill(ids == one, float("-inf"))
    return z
