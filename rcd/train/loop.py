"""The loop: one stage of a recipe, on one process or many.

accelerate gives processes, devices and trackers; FSDP2 (`fully_shard`) shards layer by layer where there is more than
one process; gradients are summed over micro-batches and processes with one normaliser, so that the loss does not depend
on how a batch was split.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from rcd.diffusion.noise import generator_of
from rcd.errors import RCDError
from rcd.train.config import TrainConfig
from rcd.train.export import write_trained
from rcd.train.layout import Batch
from rcd.train.lora import add_lora
from rcd.train.objective import Losses, Objective
from rcd.train.stage import Stage
from rcd.train.store import Store, whole_state

Say = Callable[[str], None]


def shard(objective: Objective, precision: str) -> None:
    """FSDP2: every layer a unit, the embeddings and the head with the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers: Any = objective.model.backbone.layers
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(objective, mp_policy=policy)


def schedule(config: TrainConfig, step: int, steps: int) -> float:
    """The learning rate's factor at a step."""
    warmup = math.ceil(config.warmup_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.scheduler == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    return 1.0


class Trainer:
    def __init__(
        self,
        stage: Stage,
        folder: Path,
        accelerator: Accelerator,
        say: Say = print,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ):
        self.stage, self.config, self.folder, self.say = stage, stage.config, folder, say
        self.asked_to_stop = asked_to_stop
        self.accelerator = accelerator
        self.device = accelerator.device
        config, model = stage.config, stage.checkpoint.model
        cold = None if config.carry is None else config.carry.cold((1, 1), model.codebook)
        self.weighs = cold is not None and cold.alpha is not None
        """Whether there is an alpha to log."""
        if config.lora_rank:
            add_lora(model, config.lora_rank, config.lora_alpha, config.seed)
        model.train()
        if config.gradient_checkpointing:
            model.backbone.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        flex = self.device.type == "cuda" if config.flex is None else config.flex
        self.objective = Objective(
            model, carry=config.carry, source=config.residual, block_length=stage.block_length, copy=config.copy,
            flex=flex, reference=None if stage.reference is None else stage.reference.model,
            router_balance=config.router_balance,
        )  # fmt: skip
        if self.device.type == "cuda" if config.compile is None else config.compile:
            for each in (model, self.objective.reference):
                layers: Any = [] if each is None else each.backbone.layers
                for layer in layers:
                    layer.compile()
        if accelerator.num_processes > 1:
            shard(self.objective, config.precision)
        learnt = [p for p in self.objective.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            learnt, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay,
            fused=self.device.type == "cuda",
        )  # fmt: skip
        self.batches = stage.batches()
        per_epoch = self.batches.steps(0)
        self.steps = config.max_steps or max(1, round(config.epochs * per_epoch))
        self.per_epoch = per_epoch
        self.store = Store(folder / "checkpoints", config.keep)
        self._maker = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def autocast(self) -> Any:
        half = self.config.precision == "bfloat16" and self.accelerator.num_processes == 1
        return torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext()

    @property
    def exact(self) -> torch.dtype:
        """For sums of figures: fp64 where the device has it."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def sum(self, values: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(values)
        return values

    def step(self, number: int) -> dict[str, float]:
        """One optimizer step."""
        processes = self.accelerator.num_processes
        micro = self._micro(number)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * schedule(self.config, number, self.steps)
        figures = torch.zeros(6, dtype=self.exact, device=self.device)
        for batch in micro:
            # the same choices for all passes of a step, so that they do not depend on how it is split
            generator = generator_of(self.config.seed, "step", number)
            try:
                with self.autocast():
                    losses: Losses = self.objective(batch.to(self.device), generator)
                # FSDP averages over processes; the loss is a sum over them
                (losses.total * processes).backward()
            except torch.OutOfMemoryError as error:
                raise RCDError(
                    f"step {number + 1} does not fit into the device's memory; lower device_batch (now "
                    f"{self.config.device_batch}) or max_length ({self.config.max_length}), set gradient_checkpointing="
                    f"true, use more GPUs or LoRA (lora_rank), and go on with --resume."
                ) from error
            kept = (losses.total.detach(), losses.cross_entropy, losses.masked, losses.alpha)
            tokens = torch.tensor(float((batch.document >= 0).sum()), device=self.device)
            balance = torch.as_tensor(losses.balance, device=self.device)
            figures += torch.stack([value.to(self.exact) for value in (*kept, tokens, balance)])
        self.sum(figures)
        total, cross_entropy, masked, alpha, tokens, balance = figures.tolist()
        if not math.isfinite(total):
            names = ", ".join(name for batch in micro for name in batch.names[:8])
            raise RCDError(
                f"the loss is {total} at step {number + 1} (examples of this process: {names}); the last checkpoint is "
                f"{self.store.last or 'none'}; lower learning_rate or look at those examples."
            )
        norm = nn.utils.clip_grad_norm_([p for p in self.objective.parameters() if p.requires_grad], self.config.clip)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        if not math.isfinite(float(norm)):
            raise RCDError(
                f"the gradient is {float(norm)} at step {number + 1}; it was not applied, and the last checkpoint is "
                f"{self.store.last or 'none'}; begin again with a lower learning_rate."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "loss": total,
            "cross_entropy": cross_entropy / max(1.0, masked),
            "alpha": alpha / max(1.0, masked),
            "grad_norm": float(norm),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens": tokens,
            **({"balance": balance} if self.config.router_balance else {}),
        }

    def _micro(self, number: int) -> list[Batch]:
        """The step's batches of this process; the next step's are made while it runs."""

        def make(step: int) -> list[Batch]:
            epoch, within = divmod(step, self.per_epoch)
            return self.batches.step(epoch, within, self.accelerator.process_index, self.accelerator.num_processes)

        step, waiting = self._ahead or (-1, None)
        batches = waiting.result() if waiting is not None and step == number else make(number)
        self._ahead = (number + 1, self._maker.submit(make, number + 1)) if number + 1 < self.steps else None
        return batches

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The held-out examples' loss, with the same noise every time."""
        batches = self.stage.batches(held_out=True)
        processes, process = self.accelerator.num_processes, self.accelerator.process_index
        self.objective.eval()
        figures = torch.zeros(3, dtype=self.exact, device=self.device)
        for batch in batches.step(0, 0, process, processes):
            with self.autocast():
                losses = self.objective(batch.to(self.device), generator_of(self.config.seed, "validation"))
            kept = (losses.total, losses.cross_entropy, losses.masked)
            figures += torch.stack([value.to(self.exact) for value in kept])
        self.objective.train()
        total, cross_entropy, masked = self.sum(figures).tolist()
        return {"validation_loss": total, "validation_cross_entropy": cross_entropy / max(1.0, masked)}

    def run(self, resume: bool = False) -> Path:
        """Train to the end (or to a SIGTERM, which saves); returns the exported folder."""
        done = 0
        if resume and self.store.steps():
            done = self.store.steps()[-1]
            self.store.load(done, self.objective, self.optimizer)
            self.say(f"resumed at step {done} of {self.steps}")
        if self.accelerator.is_main_process:
            keep_metrics(self.folder / "metrics.jsonl", done)
        began, seen = time.perf_counter(), 0.0
        log = self.folder / "metrics.jsonl" if self.accelerator.is_main_process else Path(os.devnull)
        with log.open("a") as metrics:
            for number in range(done, self.steps):
                figures = self.step(number)
                seen += figures["tokens"]
                last = number + 1 == self.steps
                if (number + 1) % self.config.validate_every == 0 or last:
                    figures |= self.validate() if self.stage.held_out else {}
                if (number + 1) % self.config.log_every == 0 or last or "validation_loss" in figures:
                    rate = seen / (time.perf_counter() - began)
                    self._log(metrics, number + 1, {**figures, "tokens_per_second": rate}, began, done)
                stop = bool(self.sum(torch.tensor(float(self.asked_to_stop()), device=self.device)) > 0)
                if (number + 1) % self.config.save_every == 0 or last or stop:
                    self.store.save(number + 1, self.objective, self.optimizer, {"config": self.config.to_json()})
                if stop and not last:
                    raise Stopped(number + 1)
        return self.export()

    def export(self) -> Path:
        """The trained model as an ordinary folder of its family."""
        state = whole_state(self.objective)
        target = self.folder / "model"
        if self.accelerator.is_main_process:
            trained = {name.removeprefix("model."): tensor for name, tensor in state.items()}
            write_trained(self.stage.checkpoint, self.config, trained, self.steps, target, overwrite=True)
        self.accelerator.wait_for_everyone()
        return target

    def _log(self, metrics: Any, step: int, figures: dict[str, float], began: float, done: int) -> None:
        self.accelerator.log(figures, step=step)
        if not self.accelerator.is_main_process:
            return
        metrics.write(json.dumps({"step": step, **{k: round(v, 6) for k, v in figures.items()}}) + "\n")
        metrics.flush()
        left = (time.perf_counter() - began) / max(1, step - done) * (self.steps - step)
        text = f"step {step}/{self.steps}  loss {figures['loss']:.4f}  ce {figures['cross_entropy']:.4f}"
        if self.weighs:
            text += f"  alpha {figures['alpha']:.3f}"
        if "validation_loss" in figures:
            text += f"  valid {figures['validation_loss']:.4f}"
        self.say(f"{text}  {figures['tokens_per_second']:,.0f} tokens/s  {_clock(left)} left")


class Stopped(Exception):
    """SIGTERM: the step's checkpoint is written."""


class Sigterm:
    """While it is entered, SIGTERM only asks: `asked()` says whether it has come."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def asked(self) -> bool:
        return self._asked

    def __enter__(self) -> Sigterm:
        with suppress(ValueError):  # not in the main thread: nobody sends signals there
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, *_: Any) -> None:
        self._asked = True

    def __exit__(self, *_: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def keep_metrics(path: Path, done: int) -> None:
    """Forget what was logged after the checkpoint that a run goes on from, so that no step is there twice."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # a kill may have cut the last line
            kept += [line] if json.loads(line)["step"] <= done else []
    scratch = path.with_suffix(".writing")
    scratch.write_text("".join(line + "\n" for line in kept))
    scratch.replace(path)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
