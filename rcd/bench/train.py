"""What a training step costs: SeqD's objective and RCD's, with the trainer's own step on random data."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator

from rcd.bench.limits import timed
from rcd.bench.shapes import check_shape, described, random_model
from rcd.carry.residual import Residual
from rcd.data.examples import Example, Report
from rcd.errors import RCDError, one_of, whole
from rcd.models.checkpoint import Checkpoint
from rcd.train.config import TrainConfig
from rcd.train.loop import Trainer
from rcd.train.stage import Stage

METHODS = ("seqd", "rcd", "both")
WARM = 3


@dataclass(frozen=True)
class Job:
    """What is trained: every step has `batch` rows of `length` tokens, a quarter of them the prompt."""

    shape: str = "sdar-1.7b"
    reference: str | None = None
    """The shape of RCD's frozen reference; None: the same."""
    length: int = 2048
    batch: int = 4
    block_length: int = 32
    steps: int = 8
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "block_length", "steps"):
            whole(name, getattr(self, name), least=1)
        whole("length", self.length, least=4)
        for shape in (self.shape, self.reference or self.shape):
            check_shape(shape, paths=False)
            settings = described(shape)[3]
            if self.length > settings.context_length:
                raise RCDError(f"{self.length} tokens are longer than {shape}'s context of {settings.context_length}.")
        if described(self.shape)[3].vocab_size != described(self.reference or self.shape)[3].vocab_size:
            raise RCDError(f"the reference {self.reference} does not have the tokens of {self.shape}; take another.")

    def config(self, method: str, device: torch.device) -> TrainConfig:
        """The trainer's settings: bf16 computation on a GPU, fp32 elsewhere."""
        return TrainConfig(
            carry=Residual() if method == "rcd" else None, max_length=self.length, total_batch=self.batch,
            device_batch=self.batch, max_steps=WARM + self.steps, gradient_checkpointing=self.checkpointing,
            precision="bfloat16" if device.type == "cuda" else "float32",
        )  # fmt: skip

    def model(self, shape: str, device: torch.device, dtype: torch.dtype) -> Checkpoint:
        changes = {"block_size": self.block_length} if shape.startswith("sdar") else {}
        return random_model(shape, device, dtype, **changes)

    def stage(self, method: str, device: torch.device) -> Stage:
        """The models and the examples of a stage."""
        start = self.model(self.shape, device, torch.float32)
        for parameter in start.model.parameters():
            parameter.requires_grad_(True)
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        reference = self.model(self.reference or self.shape, device, half) if method == "rcd" else None
        return Stage(self.config(method, device), start, reference, self.examples(start), [], Report())

    def examples(self, start: Checkpoint) -> list[Example]:
        settings = start.model.settings
        most = min(settings.mask_token_id, settings.vocab_size)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(most, (4 * self.batch, self.length), generator=generator).tolist()
        return [Example(f"random {number}", row, self.length // 4) for number, row in enumerate(ids)]


@dataclass(frozen=True)
class Figure:
    """What was measured of one objective."""

    method: str
    ms_per_step: float
    """Median over the steps: forward, backward, clipping and the optimizer."""
    tokens_per_second: float
    """Tokens of the text; the layout also computes a noisy copy of the answer."""
    peak_gib: float | None
    """None on a CPU."""
    loss: float
    over_seqd: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def measure(job: Job, method: str, device: torch.device) -> Figure:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loss = [0.0]
    with tempfile.TemporaryDirectory() as folder:  # nothing is saved, and a trainer wants a place
        trainer = Trainer(job.stage(method, device), Path(folder), Accelerator(cpu=device.type == "cpu"))

        def step(number: int) -> None:
            loss[0] = trainer.step(number)["loss"]

        for number in range(WARM):
            step(number)
        seconds = median(timed(lambda k=number: step(k), device)[0] for number in range(WARM, WARM + job.steps))  # type: ignore[misc]
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return Figure(method, 1e3 * seconds, job.batch * job.length / seconds, peak, loss[0])


def compare(job: Job, method: str, device: torch.device) -> Iterator[Figure]:
    """The objectives one after another, SeqD first."""
    one_of("method", method, METHODS)
    seqd = None
    for name in ("seqd", "rcd") if method == "both" else (method,):
        figure = measure(job, name, device)
        seqd = figure.ms_per_step if name == "seqd" else seqd
        yield replace(figure, over_seqd=figure.ms_per_step / seqd if seqd else None)


def lines(figures: Sequence[Figure]) -> list[str]:
    """A readable table."""
    out = [f"{'method':8} {'ms/step':>10} {'tokens/s':>10} {'x SeqD':>7} {'GiB':>6}"]
    for one in figures:
        over = f"{one.over_seqd:.3f}" if one.over_seqd else "-"
        peak = f"{one.peak_gib:.1f}" if one.peak_gib is not None else "-"
        out.append(f"{one.method:8} {one.ms_per_step:10.2f} {one.tokens_per_second:10,.0f} {over:>7} {peak:>6}")
    return out
