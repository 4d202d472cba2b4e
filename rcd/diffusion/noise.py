"""The forward process: tokens replaced by [M] with probability t (Sec. 2.1).

Every draw is a pure function of a key and of counters (which example, which position), so that the noise of an example
depends on the seed, the epoch and the example alone: not on the batch it is in, the number of processes or a resume.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

EPS = 1e-3


def key_of(*parts: int | str) -> int:
    """63 bits that stand for those words and numbers, on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_of(*parts: int | str) -> torch.Generator:
    """A generator for that key: equal keys, equal draws."""
    return torch.Generator().manual_seed(key_of(*parts))


def uniform(key: int, *counters: Tensor) -> Tensor:
    """U[0, 1), one draw for each element of the (integer) counters; the mixing function is splitmix64's."""
    return (_bits(torch.full_like(counters[0], key), *counters) & 0xFFFFFF).float() * 2**-24


def finest(device: torch.device) -> torch.dtype:
    """fp64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def uniform_of(seed: Tensor, *counters: Tensor) -> Tensor:
    """U[0, 1) in fp64, one draw of 53 bits for each element of seed and counters (integers that broadcast): whoever
    asks, in whatever order and company, gets the same. No generator and no host, so a CUDA graph may hold it. Where
    there is no fp64, the same to 24 bits."""
    bits, kind = _bits(torch.zeros_like(seed), seed, *counters), finest(seed.device)
    if kind == torch.float64:
        return _shift(bits, 11).double() * 2**-53
    return _shift(bits, 40).float() * 2**-24


def signed(seed: int) -> int:
    """The same 64 bits as a tensor holds them."""
    return (seed + 2**63) % 2**64 - 2**63


def _bits(bits: Tensor, *counters: Tensor) -> Tensor:
    for counter in counters:
        bits = _mix(bits + (counter + 1) * -7046029254386353131)
    return bits


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * -4658895280553007687
    bits = (bits ^ _shift(bits, 27)) * -7723592293110705685
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Without the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def draw(
    key: int, example_N: Tensor, position_N: Tensor, block_N: Tensor, answer_N: Tensor, per: str = "sequence"
) -> tuple[Tensor, Tensor]:
    """(masked [N], p_mask [N]) of positions of any examples: t ~ U(0, 1) once an example (`sequence`, as SDAR and LLaDA
    train) or once a block (`block`, as the block diffusion loss is written), p_mask = (1 - eps) t + eps, and m_i ~
    Bernoulli(p_mask) at the answer's positions; the prompt is never masked."""
    t = uniform(key, example_N, block_N if per == "block" else torch.zeros_like(block_N))
    p_mask = (1 - EPS) * t + EPS
    masked = (uniform(key ^ 1, example_N, position_N) < p_mask) & answer_N
    return masked, p_mask
