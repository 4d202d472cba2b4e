"""From a run's checkpoint to an ordinary folder, on one process, whatever number wrote it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rcd.carry.base import describe
from rcd.errors import RCDError
from rcd.models.checkpoint import Checkpoint
from rcd.models.writing import save
from rcd.train.config import TrainConfig
from rcd.train.lora import add_lora, merged_state
from rcd.train.stage import load_start
from rcd.train.store import Store


def write_trained(
    start: Checkpoint, config: TrainConfig, state: dict[str, Tensor], steps: int, folder: Path, overwrite: bool = False
) -> Path:
    """The trained parameters in the start's names, with an rcd.json that says what they were trained for."""
    if config.lora_rank:
        state = merged_state(state, config.lora_rank, config.lora_alpha)
    rcd = replace(
        start.rcd,
        carry=None if config.carry is None else describe(config.carry),
        block_length=start.model.settings.block_length,
        stage=config.method.lower(),
        max_new_tokens=config.max_new_tokens or start.rcd.max_new_tokens,
        provenance={"trained_from": config.model, "data": config.data, "steps": steps, "reference": config.reference},
    )
    return save(replace(start, rcd=rcd), folder, overwrite=overwrite, state=state)


def export_checkpoint(run: Path, content: dict[str, Any], output: Path, step: int | None) -> int:
    """Returns the step that was written."""
    store = Store(run / "checkpoints", keep=1)
    if not store.steps():
        raise RCDError(f"{run} has no checkpoint yet.")
    step = store.steps()[-1] if step is None else step
    if step not in store.steps():
        raise RCDError(f"{run} has no checkpoint of step {step}; there are: {', '.join(map(str, store.steps()))}.")
    config = TrainConfig.from_json(content)
    start = load_start(config, torch.device("cpu"), run.parent)
    if config.lora_rank:
        add_lora(start.model, config.lora_rank, config.lora_alpha, config.seed)
    state = {f"model.{name}": tensor for name, tensor in start.model.state_dict().items()}
    dcp.load({"model": state}, checkpoint_id=store.path(step), no_dist=True)
    trained = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    write_trained(start, config, trained, step, output)
    return step
