"""Checkpoints of a run: written whole or not at all, so that whatever kills a run leaves the last good one.

`step-00000120/` appears by a rename once every process has written its part (torch's distributed checkpoint format,
sharded or not). What training needs besides weights and optimizer is the number of steps: order and noise are
functions of it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from rcd.errors import RCDError

STATE = "state.json"
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Store:
    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        if _first():
            for half in folder.glob(".writing-*"):  # of a save that was killed
                shutil.rmtree(half, ignore_errors=True)

    def steps(self) -> list[int]:
        """The steps whose checkpoints are complete."""
        found = self.folder.glob("step-*/" + STATE) if self.folder.is_dir() else []
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    @property
    def last(self) -> int | None:
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Every process calls this; the first one renames."""
        scratch, target = self.folder / f".writing-{step:08d}", self.path(step)
        if _first():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        _wait()
        model, optim = get_state_dict(module, optimizer)
        try:
            dcp.save({"model": model, "optimizer": optim}, checkpoint_id=scratch, no_dist=not dist.is_initialized())
        except (OSError, dcp.api.CheckpointException) as error:
            if _first():
                shutil.rmtree(scratch, ignore_errors=True)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:160]
            raise RCDError(
                f"the checkpoint of step {step} could not be written ({reason}); the last good one is of step "
                f"{self.last or 'none'}; free some disk and go on with --resume."
            ) from error
        if _first():
            (scratch / STATE).write_text(json.dumps({"step": step, **state}))
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.path(old), ignore_errors=True)
        _wait()

    def load(self, step: int, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        model, optim = get_state_dict(module, optimizer)
        content: dict[str, Any] = {"model": model, "optimizer": optim}
        dcp.load(content, checkpoint_id=self.path(step), no_dist=not dist.is_initialized())
        set_state_dict(module, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        state: dict[str, Any] = json.loads((self.path(step) / STATE).read_text())
        return state


def whole_state(module: nn.Module) -> dict[str, Any]:
    """The full, unsharded parameters on the CPU (empty on all processes but the first)."""
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _wait() -> None:
    if dist.is_initialized():
        dist.barrier()
