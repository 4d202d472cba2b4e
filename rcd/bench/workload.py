"""What is decoded in a benchmark of decoding: how long, in which window, and by which methods.

Commits are scripted (so many tokens of a block a step, the leftmost first) and no text ends early, so that random
weights, SeqD and RCD do equal work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import torch

from rcd.carry.base import Carry, make
from rcd.carry.none import NoCarry
from rcd.carry.residual import Residual
from rcd.data.examples import prompt_ids
from rcd.data.tasks.base import problems
from rcd.decode.config import DecodeConfig, fitting
from rcd.decode.probe import Look
from rcd.decode.requests import Request
from rcd.errors import RCDError, one_of, whole
from rcd.models.checkpoint import Checkpoint
from rcd.models.lm import DiffusionLM, ModelSettings

CARRIES = ("none", "residual")
DELTAS = ("exact", "kept")
WINDOWS = ("blockwise", "bidirectional", "d2f", "dual", "prefix")
STEPWISE = ("blockwise", "bidirectional")
"""Windows whose steps are all of one kind, but for those that also store a finished block."""
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
    threads: int | None = None
    """Of a CPU; None: as many as torch takes."""
    prompts: tuple[tuple[int, ...], ...] = ()
    """Real ones, of `prefix` tokens each, that the rows take in turn; without any they are random."""

    def __post_init__(self) -> None:
        for name in ("block_length", "batch", "prefix", "tokens_per_step", "blocks"):
            whole(name, getattr(self, name), least=1)
        if self.threads is not None:
            whole("threads", self.threads, least=1)
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
            eos_early_stop=False, carry_scope="canvas" if self.window == "bidirectional" else "block",
            block_add_threshold=FLYING, decoded_token_threshold=FLYING,
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
            point = replace(self, batch=value) if over == "batch" else replace(self, prefix=value, prompts=())
            if point.length <= model.context_length:
                yield point

    def requests(
        self, model: DiffusionLM, method: Method, probe: Callable[[Look], None] | None = None, seed: int = 0
    ) -> list[Request]:
        """Equal for all methods; `probe` is shown the first row."""
        generator = torch.Generator().manual_seed(seed)
        most = min(model.settings.mask_token_id, model.settings.vocab_size, 1000)
        asked = self.config(method).resolved(model.settings).request
        rows = [
            list(self.prompts[k % len(self.prompts)])
            if self.prompts
            else torch.randint(most, (self.prefix,), generator=generator).tolist()
            for k in range(self.batch)
        ]
        return [Request(ids, asked, k, probe=None if k else probe) for k, ids in enumerate(rows)]


def usual(settings: ModelSettings, named: bool, on_gpu: bool, window: str | None = None) -> dict[str, Any]:
    """What is measured where nothing else is asked for. `named`: a shape with random weights, not a checkpoint."""
    if window is None:
        large_canvas = named and on_gpu and settings.attention != "block_causal"
        window = "dual" if large_canvas else settings.window
    alone = window == "bidirectional"
    if named or settings.max_new_tokens is None:
        prefix = 32 if alone else 128  # together with the block a canvas of 128
        block, blocks = (96, 1) if alone else (32, 4)
        return {"window": window, "block_length": block, "blocks": blocks, "prefix": 1024 if on_gpu else prefix}
    new = settings.max_new_tokens
    block = min(settings.block_length or new, new)
    return {"window": window, "block_length": block, "blocks": -(-new // block), "prefix": 64}


def real_prompts(found: Checkpoint, load: Workload) -> Workload:
    """The same with test problems of the task that a checkpoint of this package was trained on, of the median length;
    the point itself where it knows of none."""
    kind, _, rest = str(found.rcd.provenance.get("data", "")).partition(":") if found.rcd.provenance else ("", "", "")
    task = rest.partition(":")[0]
    if kind != "tasks" or found.tokenizer is None or task not in ("words", "sudoku"):
        return load
    asked = [one.question for one in problems(task, "test", 64)]
    rows = prompt_ids(asked, found.tokenizer, None)
    length = median_low(len(row) for row in rows)
    return replace(load, prefix=length, prompts=tuple(tuple(row) for row in rows if len(row) == length))


def steps_of(block: int, most: int = 4) -> int:
    """Tokens a step: the largest number up to `most` that divides the block."""
    return next(count for count in range(most, 0, -1) if block % count == 0)


@dataclass(frozen=True)
class Method:
    """What is compared."""

    name: str
    carry: Carry
    delta: str | None = None


SEQD = Method("SeqD", NoCarry())


def methods(carry: str | None = None, delta: str | None = None, trained: dict[str, Any] | None = None) -> list[Method]:
    """SeqD and RCD with both deltas, or those of them that are asked for. `trained`: rcd.json's carry."""
    one_of("carry", carry or "none", CARRIES)
    one_of("delta", delta or "exact", DELTAS)
    if carry == "none" and delta is not None:
        raise RCDError("--delta is of the residual, and --carry none has none; drop one of them.")
    own = dict(trained or {})
    residual = make("residual", own) if own.pop("name", None) == "residual" else Residual()
    found = [Method(f"RCD {kind}", residual, kind) for kind in DELTAS if delta in (None, kind)]
    return [*([SEQD] if carry in (None, "none") else []), *(found if carry in (None, "residual") else [])]
