"""Whether a model fits into the memory that is free, from the headers of its files, before any tensor is read."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from rcd.errors import RCDError
from rcd.models.dtypes import wide
from rcd.models.filling import CODEBOOK, HEAD
from rcd.models.lm import DiffusionLM
from rcd.models.quantise import Quantisation
from rcd.models.source import Weights


@dataclass(frozen=True)
class Estimate:
    """Bytes."""

    codebook: int
    """The input embeddings, which are never quantised."""
    head: int
    """0 where it is the codebook itself; a tied head that is quantised is a copy."""
    layers: int
    working: int
    """While loading: the largest tensor, as stored, as it is cast and, where it is quantised, as fp32."""

    @property
    def weights(self) -> int:
        return self.codebook + self.head + self.layers

    @property
    def peak(self) -> int:
        return self.weights + self.working


def estimate(
    model: DiffusionLM, weights: Weights, dtype: torch.dtype, quantise: Quantisation | None = None
) -> Estimate:
    """What the empty `model` will take with these weights. Example: embeddings [100, 64], tied, in bf16 take 12,800
    bytes, and the head nothing; with int8 the head is a copy of 100 * (64 + 2) bytes."""
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    held = {name for name, _, _ in weights.headers()}
    tied = bool(getattr(model.backbone.config, "tie_word_embeddings", False))
    tied = tied and model.spec.from_stock(HEAD) not in held

    def size(name: str) -> int:
        small = None if quantise is None else quantise.bytes_of(name, found[name], dtype.itemsize)
        if small is None and name == HEAD and tied:
            return 0
        kind = wide(dtype) if name.endswith(model.spec.wide) else dtype
        return prod(found[name]) * kind.itemsize if small is None else small

    largest = max(((prod(shape), stored.itemsize) for _, shape, stored in weights.headers()), default=(0, 0))
    cast = 0 if largest[1] == dtype.itemsize else dtype.itemsize
    working = largest[0] * (largest[1] + (cast if quantise is None else torch.float32.itemsize))
    layers = sum(size(name) for name in found if name not in (CODEBOOK, HEAD))
    return Estimate(size(CODEBOOK), size(HEAD), layers, working)


def check_room(
    model: DiffusionLM, weights: Weights, path: Path, device: torch.device, dtype: torch.dtype,
    quantise: Quantisation | None = None,
) -> None:  # fmt: skip
    """Refuse a model that cannot fit, in one sentence with what would."""
    free = free_memory(device)
    if free is None:
        return
    needed = estimate(model, weights, dtype, quantise).peak
    if needed <= free:
        return
    smaller = [
        (name, estimate(model, weights, kind, other).peak)
        for name, kind, other in (
            ("--dtype bfloat16", torch.bfloat16, quantise),
            ("--quantize int8", dtype, Quantisation("int8")),
            ("--quantize int4", dtype, Quantisation("int4")),
            ("--quantize int4 --dtype bfloat16", torch.bfloat16, Quantisation("int4")),
        )
    ]
    ways = [f"{name} ({shown(size)})" for name, size in smaller if size <= min(free, needed - 1)]
    ways += [] if device.type == "cpu" else ["--device cpu"]
    raise RCDError(
        f"the weights of {path} take {shown(needed)} while they are loaded, and {shown(free)} are free on {device}; "
        f"take {' or '.join(ways or ['a smaller model'])}, or free some memory."
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes; None where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return min([found, *_left_of_group()])


def _left_of_group() -> list[int]:
    """Of a container's own limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [limit - used + int(cached.get("inactive_file", 0))]
    except (OSError, ValueError):
        return []


def shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
