"""What a decoding step costs, against what the memory allows.

Commits are scripted (so many tokens a step, the leftmost first), so that random weights, SeqD and RCD do equal work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rcd.carry.base import Carry, make
from rcd.decode.config import DecodeConfig
from rcd.engine.engine import Engine, Request
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM


@dataclass(frozen=True)
class Workload:
    """One point of a benchmark."""

    block_length: int = 32
    batch: int = 1
    prefix: int = 1024
    tokens_per_step: int = 4
    blocks: int = 4
    """New tokens are so many blocks."""
    window: str = "blockwise"

    def __post_init__(self) -> None:
        if self.block_length % self.tokens_per_step:
            raise RCDError(
                f"tokens_per_step {self.tokens_per_step} does not divide the block length {self.block_length}; "
                "every block must take equally many steps."
            )

    @property
    def new_tokens(self) -> int:
        return self.blocks * self.block_length

    def config(self, carry: Carry, delta: str | None) -> DecodeConfig:
        return DecodeConfig(
            max_new_tokens=self.new_tokens, block_length=self.block_length, carry=carry, delta=delta, window=self.window,
            commit="sequential", num_inference_steps=self.block_length // self.tokens_per_step, eos_early_stop=False,
            carry_scope="block",
        )  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """What was measured."""

    name: str
    ms_per_step: float
    """Wall time of the decoding loop over the steps launched, prefill left out."""
    steps: int
    tokens_per_second: float
    limit_share: float
    """The time to read the weights and the cache once at the measured bandwidth, over ms_per_step."""
    peak_gib: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bandwidth(device: torch.device, gib: float = 4.0) -> float:
    """Bytes a second, read and written, of a large copy: the median of several."""
    if device.type != "cuda":
        gib = 0.05
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = sorted(_timed(lambda: target.copy_(source), device) for _ in range(7))[3]
    return 2 * source.numel() / seconds


def _timed(work: Any, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def weight_bytes(model: DiffusionLM) -> int:
    """What every step must read: layers and head; of the embeddings only a few rows."""
    count = sum(p.numel() for name, p in model.named_parameters() if name != "backbone.embed_tokens.weight")
    return count * model.codebook.element_size()


def prefix_bytes(model: DiffusionLM, load: Workload) -> int:
    """Keys and values that a step reads, in the middle of the answer."""
    config: Any = model.backbone.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * head * model.codebook.element_size()
    return each * load.batch * (load.prefix + load.new_tokens // 2)


def requests(model: DiffusionLM, load: Workload, seed: int = 0) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    most = min(model.settings.mask_token_id, 1000)
    return [
        Request(k, torch.randint(most, (load.prefix,), generator=generator).tolist(), load.new_tokens)
        for k in range(load.batch)
    ]


def measure(
    model: DiffusionLM, load: Workload, carry: str | Carry, speed: float, *, delta: str | None = None, name: str = "",
    repeats: int = 3, graphs: bool | None = None,
) -> Figure:  # fmt: skip
    """The median of `repeats` runs, behind a first that compiles and captures."""
    rule = make(carry) if isinstance(carry, str) else carry
    config = load.config(rule, delta).resolved(model.settings)
    engine = Engine(model, config, rows=load.batch, capacity=load.prefix + load.new_tokens, graphs=graphs)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    asked = requests(model, load)
    for _ in range(3):  # sizes are captured at their second use
        list(engine.run(asked))
    runs = sorted(once(engine, asked) for _ in range(repeats))
    seconds, steps = runs[len(runs) // 2]
    floor = (weight_bytes(model) + prefix_bytes(model, load)) / speed
    peak = torch.cuda.max_memory_allocated() / 2**30 if model.device.type == "cuda" else 0.0
    made = load.batch * load.new_tokens
    return Figure(
        name or type(rule).__name__, 1e3 * seconds / steps, steps, made / seconds, floor * steps / seconds, peak
    )


def once(engine: Engine, asked: list[Request]) -> tuple[float, int]:
    """(seconds, steps) of the decoding loop alone: every row is prefilled before the clock starts."""
    with torch.inference_mode():
        for request in asked:
            engine._admit(request)
    if engine.on_gpu:
        torch.cuda.synchronize()
    before, began = engine.stats.passes, time.perf_counter()
    done = sum(1 for _ in engine.run(()))
    if engine.on_gpu:
        torch.cuda.synchronize()
    assert done == len(asked)
    return time.perf_counter() - began, engine.stats.passes - before


def grown(load: Workload, over: str, values: list[int]) -> Iterator[Workload]:
    for value in values:
        yield replace(load, **{over: value})
