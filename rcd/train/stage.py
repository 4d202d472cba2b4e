"""What a stage works with: models and examples, loaded and checked before any work is done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rcd import registry
from rcd.data.examples import Example, Report, encode
from rcd.data.rows import generated_tokenizer, rows_of
from rcd.errors import RCDError, one_of
from rcd.models import checkpoint as ckpt
from rcd.models.checkpoint import Checkpoint
from rcd.models.experts import routers
from rcd.models.pairing import check_pair
from rcd.models.toy import toy
from rcd.train.batches import Batches
from rcd.train.config import TrainConfig

BASE, REFERENCE = "base", "reference"
OWN = (BASE, REFERENCE)
"""As the name of a model: what that stage of the same run has trained."""


@dataclass
class Stage:
    """Everything a stage works with."""

    config: TrainConfig
    checkpoint: Checkpoint
    reference: Checkpoint | None
    examples: list[Example]
    held_out: list[Example]
    report: Report

    @classmethod
    def of(cls, config: TrainConfig, device: torch.device, home: Path | None = None) -> Stage:
        """Load models and data; bad input is refused here, before any work. `home` is the run's folder, in which the
        models of its own stages are found."""
        checkpoint = load_start(config, device, home)
        second = None
        if config.needs_reference:
            if config.reference is None and not config.residual.trajectory:
                raise RCDError("stage 2 needs a reference: train one first (--stage all) or name one with --reference.")
            if config.reference is not None:  # without one, the steps that are no trajectories have no residual
                path = found(config.reference, home)
                second = ckpt.load(path, device=device, block_length=config.block_length)
                check_pair(checkpoint, second)
        if config.router_balance and not any(routers(checkpoint.model.backbone)):
            raise RCDError(f"router_balance is for models with experts, and {config.model} has none; leave it out.")
        if checkpoint.tokenizer is None:
            raise RCDError(f"{config.model} has no tokenizer, and training texts need one.")
        eos = checkpoint.model.settings.eos_token_ids
        examples, report = encode(
            rows_of(config.data, config.split), checkpoint.tokenizer, eos_token_id=eos[0] if eos else 0,
            max_length=min(config.max_length, checkpoint.model.settings.context_length),
            min_length=config.min_length, prompt_field=config.prompt_field, response_field=config.response_field,
            messages_field=config.messages_field, chat=config.chat,
        )  # fmt: skip
        if config.validation >= len(examples):
            raise RCDError(f"{config.validation} examples are to be held out, but only {len(examples)} are left.")
        cut = len(examples) - config.validation
        return cls(config, checkpoint, second, examples[:cut], examples[cut:], report)

    @property
    def block_length(self) -> int:
        return self.checkpoint.model.settings.block_length or 1

    def batches(self, held_out: bool = False) -> Batches:
        """Of the training examples, or of the held-out ones: all of them in one step, unpacked."""
        eos = self.checkpoint.model.settings.eos_token_ids
        pad = getattr(self.checkpoint.tokenizer, "pad_token_id", None)
        batching = self.config.batching(self.block_length, pad if pad is not None else eos[0] if eos else 0)
        if held_out:
            return Batches(self.held_out, replace(batching, total=len(self.held_out), pack=0), "validation")
        return Batches(self.examples, batching)


def found(model: str, home: Path | None) -> str:
    """Where a checkpoint is: `base` and `reference` are what those stages of the same run have trained."""
    if model not in OWN:
        return model
    path = None if home is None else home / model / "model"
    if path is None or not path.is_dir():
        raise RCDError(f"this stage starts from the run's own {model}, which is not in {home}; use --stage all.")
    return str(path)


def load_start(config: TrainConfig, device: torch.device, home: Path | None = None) -> Checkpoint:
    """The checkpoint that training starts from, with fp32 parameters that learn."""
    if config.model.startswith("toy:"):
        family, tokenizer = config.model.removeprefix("toy:"), generated_tokenizer(config.data)
        one_of("family", family, registry.names("family"))
        if config.attention is not None or config.mask_token_id is not None:
            raise RCDError("attention and mask_token_id are for checkpoints; a toy has its own.")
        shape: dict[str, Any] = {**config.toy, "vocab": len(tokenizer)}
        if config.block_length is not None:
            shape["block_length"] = config.block_length
        try:
            start = toy(family, seed=config.seed, tokenizer=tokenizer, device=device, to_train=True, **shape)
        except (TypeError, RuntimeError) as error:
            raise RCDError(f"this is no shape for a toy: {config.toy} ({error}).") from error
    else:
        start = ckpt.load(
            found(config.model, home), device=device, dtype="float32", block_length=config.block_length,
            mask_token_id=config.mask_token_id, attention=config.attention,
        )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # the same new parameters on every process
        torch.manual_seed(config.seed)
        start.model.hold(config.carry)
    for parameter in start.model.parameters():
        parameter.requires_grad_(True)
    return start
