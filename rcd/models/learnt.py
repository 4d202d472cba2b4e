"""carry.safetensors: what a carry has learnt, beside the weights and in their dtype.

Only a checkpoint whose rcd.json names such a carry has the file; everything else in its folder is as without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rcd.carry.base import Carry, learnt_by, make
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM
from rcd.models.settings import RCDFile

CARRY_FILE = "carry.safetensors"
PREFIX = "carry_parameters."


def carry_of(rcd: RCDFile) -> Carry:
    """The carry that a checkpoint was trained for."""
    settings: dict[str, Any] = dict(rcd.carry or {"name": "none"})
    return make(settings.pop("name"), settings)


def read(model: DiffusionLM, rcd: RCDFile, folder: Path) -> None:
    """Give the model what its carry has learnt; a file that is missing or does not fit is refused."""
    wanted = learnt_by(carry_of(rcd), model.codebook.shape[1])
    if wanted is None:
        return
    assert rcd.carry is not None
    path, name = folder / CARRY_FILE, rcd.carry["name"]
    if not path.is_file():
        raise RCDError(
            f"{folder} was trained with the carry {name!r} and lacks {CARRY_FILE}, which holds what it has learnt; "
            "download it again."
        )
    try:
        held = load_file(path)
    except (SafetensorError, OSError) as error:
        raise RCDError(f"{path} is truncated or is no safetensors file ({error}); download it again.") from error
    _check(wanted, held, path, name)
    wanted.load_state_dict(held)
    model.carry_parameters = wanted.to(model.device, model.codebook.dtype).requires_grad_(False)


def _check(wanted: nn.Module, held: dict[str, Tensor], path: Path, name: str) -> None:
    expected = {key: list(tensor.shape) for key, tensor in wanted.state_dict().items()}
    found = {key: list(tensor.shape) for key, tensor in held.items()}
    if found != expected:
        raise RCDError(f"{path} holds {found}, but the carry {name!r} of this model has {expected}.")
    for key, tensor in held.items():
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise RCDError(f"the tensor {key} of {path} holds NaN, inf or no floats; the checkpoint is damaged.")


def check_held(model: DiffusionLM, carry: Carry | None) -> None:
    """A carry that learns cannot work with a model that has not learnt it."""
    if carry is not None and not model.holds(carry):
        raise RCDError(
            f"the carry {carry.method} has parameters of its own, and this model has not learnt them; take a "
            "checkpoint that was trained with it."
        )


def write(state: dict[str, Tensor], rcd: RCDFile, folder: Path, width: int, dtype: torch.dtype) -> None:
    """The carry's part of a model's state, in the codebook's dtype, if its carry learns anything."""
    if learnt_by(carry_of(rcd), width) is None:
        return
    own = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    kept = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in own.items()}
    save_file(kept, folder / CARRY_FILE, metadata={"format": "pt"})
