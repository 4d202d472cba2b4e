"""Clocks, and the least time that a step can take: what it must read, over the bandwidth of a large copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from rcd.bench.workload import Workload
from rcd.decode.slots import position_bytes
from rcd.models.experts import mixtures
from rcd.models.lm import DiffusionLM


def bandwidth(device: torch.device, gib: float = 4.0) -> float:
    """Bytes a second, read and written, of a large copy: the median of several."""
    if device.type != "cuda":
        gib = 0.25
    source = torch.zeros(int(gib * 2**30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / median(timed(lambda: target.copy_(source), device)[0] for _ in range(7))


def timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """(seconds, the device's own work included; seconds of the process on all cores)."""
    if device.type != "cuda":
        began, busy = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - began, time.process_time() - busy
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    torch.cuda.synchronize()
    busy = time.process_time()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3, time.process_time() - busy


def weight_bytes(model: DiffusionLM) -> int:
    """What every step must read: layers and head; of the embeddings only a few rows."""
    tied = getattr(model.head, "weight", None) is model.codebook
    return model.bytes - (not tied) * model.codebook.untyped_storage().nbytes()


def unread_bytes(model: DiffusionLM, tokens: int) -> int:
    """Of the experts that none of so many tokens goes to, if all are chosen alike: (1 - K/E)^tokens of all E."""
    unread = 0.0
    for router, experts in mixtures(model.backbone):
        kept = (*experts.parameters(), *experts.buffers())
        size = sum(each.numel() * each.element_size() for each in kept)
        unread += size * (1 - router.top_k / router.count) ** tokens
    return int(unread)


def step_bytes(model: DiffusionLM, load: Workload) -> int:
    """The weights, and the keys and values in the middle of the answer."""
    tokens = load.batch * (load.new_tokens + load.prefix if load.window == "bidirectional" else load.block_length)
    return (
        weight_bytes(model)
        - unread_bytes(model, tokens)
        + position_bytes(model) * load.batch * (load.prefix + load.new_tokens // 2)
    )
