"""Whether a model's weights fit into the memory that is free, from the headers of its files, before any is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from rcd.errors import RCDError
from rcd.models.checkpoint import pick_device
from rcd.models.dtypes import pick_dtype
from rcd.models.source import locate, shapes

STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


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


def needed(path: Path, dtype: Any, device: torch.device) -> int:
    """Bytes of the weights as they are computed with."""
    found = [(math.prod(shape), stored) for _, shape, stored in shapes(path)]
    parameters = sum(size for size, _ in found)
    return sum(
        size * pick_dtype(dtype, STORED.get(stored, torch.float32), device, parameters).itemsize
        for size, stored in found
    )


def check_room(
    name: str, source: str, *, device: str | None = "auto", dtype: Any = "auto", revision: str | None = None
) -> None:
    """Refuse a model that does not fit, in one sentence."""
    path, target = locate(source, revision), pick_device(device)
    free = free_memory(target)
    if free is None or not path.is_dir():
        return
    wanted = needed(path, dtype, target)
    if wanted > free:
        raise RCDError(
            f"the weights of {name} take {_shown(wanted)} and {_shown(free)} are free on {target}; serve a smaller "
            "model, fewer of them, or choose --dtype bfloat16."
        )


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
