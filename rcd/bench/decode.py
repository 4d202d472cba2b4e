"""What a decoding step costs, against what the memory allows.

Commits are scripted (so many tokens of a block a step, the leftmost first), so that random weights, SeqD and RCD do
equal work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from rcd.carry.base import Carry
from rcd.carry.none import NoCarry
from rcd.carry.residual import Residual
from rcd.decode.config import DELTAS, DecodeConfig, fitting
from rcd.decode.events import Finished
from rcd.decode.lanes import Lane
from rcd.engine.backbone import position_bytes
from rcd.engine.engine import Engine, Request
from rcd.errors import RCDError, one_of, whole
from rcd.models.lm import DiffusionLM, ModelSettings

CARRIES = ("none", "residual")
WINDOWS = ("blockwise", "d2f", "dual", "prefix")
FLYING = 0.7
"""Under `d2f` a block is added, and takes its steps, when this share of the one before it is decoded."""
GROWTH: dict[str, tuple[int, ...]] = {
    "none": (),
    "batch": (1, 2, 4, 8, 16, 32, 64, 128),
    "prefix": (64, 256, 1024, 4096, 16384),
}


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
        for name in ("block_length", "batch", "prefix", "tokens_per_step", "blocks"):
            whole(name, getattr(self, name), least=1)
        one_of("window", self.window, WINDOWS)
        if self.block_length % self.tokens_per_step:
            raise RCDError(
                f"tokens_per_step {self.tokens_per_step} does not divide the block length {self.block_length}; "
                "every block must take equally many steps."
            )

    @property
    def new_tokens(self) -> int:
        return self.blocks * self.block_length

    @property
    def length(self) -> int:
        return self.prefix + self.new_tokens

    def config(self, method: Method) -> DecodeConfig:
        return DecodeConfig(
            max_new_tokens=self.new_tokens, block_length=self.block_length, carry=method.carry, delta=method.delta,
            window=self.window, commit="sequential", num_inference_steps=self.block_length // self.tokens_per_step,
            eos_early_stop=False, carry_scope="block", block_add_threshold=FLYING, decoded_token_threshold=FLYING,
        )  # fmt: skip

    def check(self, model: ModelSettings) -> None:
        """Refuse, before a large model is made, what it cannot decode."""
        able = [window for window in fitting(model) if window in WINDOWS]
        if self.window not in able:
            raise RCDError(f"the window {self.window!r} does not fit this checkpoint; take {' or '.join(able)}.")
        self.config(SEQD).resolved(model)
        if self.length > model.context_length:
            raise RCDError(
                f"a prefix of {self.prefix} and {self.new_tokens} new tokens are {self.length} positions, but the "
                f"model has {model.context_length}; lower the prefix or the blocks."
            )

    def grown(self, over: str, model: ModelSettings) -> Iterator[Workload]:
        """This point, or the points over which `over` grows, as far as the model's context goes."""
        if over == "none":
            yield self
            return
        for value in GROWTH[over]:
            point = replace(self, batch=value) if over == "batch" else replace(self, prefix=value)
            if point.length <= model.context_length:
                yield point


@dataclass(frozen=True)
class Method:
    """What is compared."""

    name: str
    carry: Carry
    delta: str | None = None


SEQD = Method("SeqD", NoCarry())


def methods(carry: str | None = None, delta: str | None = None) -> list[Method]:
    """SeqD and RCD with both deltas, or those of them that are asked for."""
    one_of("carry", carry or "none", CARRIES)
    one_of("delta", delta or "exact", DELTAS)
    if carry == "none" and delta is not None:
        raise RCDError("--delta is of the residual, and --carry none has none; leave one of them away.")
    residual = [Method(f"RCD {kind}", Residual(), kind) for kind in DELTAS if delta in (None, kind)]
    return [*([SEQD] if carry in (None, "none") else []), *(residual if carry in (None, "residual") else [])]


@dataclass(frozen=True)
class Figure:
    """What was measured of one method at one point."""

    method: str
    batch: int
    prefix: int
    ms_per_step: float
    """Wall time of the decoding loop over the steps launched, prefill left out."""
    steps: int
    tokens_per_second: float
    limit_share: float
    """The time to read the weights and the cache once at the measured bandwidth, over ms_per_step."""
    peak_gib: float | None
    """None on a CPU."""
    over_seqd: float | None = None
    """ms_per_step over SeqD's at the same point of the same run."""
    stock_ms: float | None = None
    """The stock eager forward of the same block."""

    def to_json(self) -> dict[str, Any]:
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


# -- what the memory allows ------------------------------------------------------------------------------------------


def bandwidth(device: torch.device, gib: float = 4.0) -> float:
    """Bytes a second, read and written, of a large copy: the median of several."""
    if device.type != "cuda":
        gib = 0.05
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / median(timed(lambda: target.copy_(source), device) for _ in range(7))


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds, the device's own work included."""
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
    tied = model.head.weight is model.codebook
    return (count + tied * model.codebook.numel()) * model.codebook.element_size()


def step_bytes(model: DiffusionLM, load: Workload) -> int:
    """The weights, and the keys and values in the middle of the answer."""
    return weight_bytes(model) + position_bytes(model) * load.batch * (load.prefix + load.new_tokens // 2)


# -- measuring -------------------------------------------------------------------------------------------------------


def requests(model: DiffusionLM, load: Workload, seed: int = 0) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    most = min(model.settings.mask_token_id, model.settings.vocab_size, 1000)
    return [
        Request(k, torch.randint(most, (load.prefix,), generator=generator).tolist(), load.new_tokens)
        for k in range(load.batch)
    ]


def measure(model: DiffusionLM, load: Workload, method: Method, speed: float, repeats: int = 3) -> Figure:
    """The median of `repeats` runs, behind three that compile and capture (sizes are captured at their second use)."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = Engine(model, load.config(method).resolved(model.settings), rows=load.batch, capacity=load.length)
    asked = requests(model, load)
    for _ in range(3):
        once(engine, asked)
    seconds, steps = sorted(once(engine, asked) for _ in range(repeats))[repeats // 2]
    return Figure(
        method.name, load.batch, load.prefix, 1e3 * seconds / steps, steps,
        tokens_per_second=load.batch * load.new_tokens / seconds,
        limit_share=step_bytes(model, load) / speed * steps / seconds,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    )  # fmt: skip


def once(engine: Engine, asked: list[Request]) -> tuple[float, int]:
    """(seconds, steps) of the decoding loop alone: every row is prefilled before the clock starts."""
    for request in asked:
        failed = engine.admit(request)
        if failed is not None:
            raise RCDError(failed.message)
    if engine.on_gpu:
        torch.cuda.synchronize()
    before, began = engine.stats.passes, time.perf_counter()
    events = list(engine.run(()))
    if engine.on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    lost = next((event for event in events if not isinstance(event, Finished)), None)
    if lost is not None:
        raise RCDError(getattr(lost, "message", "the engine watches, which takes time."))
    return seconds, engine.stats.passes - before


@torch.inference_mode()
def stock_ms(model: DiffusionLM, load: Workload, repeats: int = 3) -> float:
    """The stock transformers forward of one block behind the same prefix, eagerly, and each position's most probable
    token: no commit, no carry, no bookkeeping."""
    b, device = load.block_length, model.device
    prefix = load.prefix // b * b
    position = torch.arange(prefix + b, device=device).expand(load.batch, -1)
    lane = Lane(model, model.settings.mask_token_id, prefix + b)
    lane.prefill(torch.full((load.batch, prefix), 7, device=device), position[:, :prefix], b)
    view = lane.view(position[:, prefix:], position)
    ids = torch.full((load.batch, b), model.settings.mask_token_id, device=device)

    def forward() -> object:
        return model(ids, view).logits.float().softmax(-1).max(-1)

    for _ in range(3):
        forward()
    return 1e3 * median(timed(forward, device) for _ in range(5 * repeats))


def compare(
    model: DiffusionLM, load: Workload, chosen: Sequence[Method], speed: float, repeats: int = 3, stock: bool = False
) -> list[Figure]:
    """All methods at one point, SeqD first: later ones are told over it."""
    plain = stock_ms(model, load, repeats) if stock else None
    out: list[Figure] = []
    for method in chosen:
        figure = replace(measure(model, load, method, speed, repeats), stock_ms=plain)
        first = out[0] if out else figure
        seqd = first.ms_per_step if first.method == SEQD.name else None
        out.append(replace(figure, over_seqd=figure.ms_per_step / seqd if seqd else None))
    return out


def lines(figures: Sequence[Figure]) -> list[str]:
    """A readable table."""
    stock = any(figure.stock_ms for figure in figures)
    head = f"{'batch':>5} {'prefix':>7}  {'method':10} {'steps':>5} {'ms/step':>8} {'tokens/s':>10} {'of limit':>8}"
    head += f" {'x SeqD':>7}"
    out = [head + f" {'GiB':>6}" + (f" {'stock ms':>9} {'x faster':>8}" if stock else "")]
    for one in figures:
        over = f"{one.over_seqd:.3f}" if one.over_seqd else "-"
        peak = f"{one.peak_gib:.1f}" if one.peak_gib is not None else "-"
        row = f"{one.batch:5d} {one.prefix:7,d}  {one.method:10} {one.steps:5d} {one.ms_per_step:8.3f}"
        row += f" {one.tokens_per_second:10,.0f} {one.limit_share:8.1%} {over:>7} {peak:>6}"
        out.append(row + (f" {one.stock_ms:9.3f} {one.stock_ms / one.ms_per_step:8.2f}" if one.stock_ms else ""))
    return out
