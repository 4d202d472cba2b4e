"""LoRA through peft: low-rank updates of the backbone's matrices, merged into ordinary weights on export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM

ADAPTER = "default"
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Of attention, and of dense and shared MLPs. Experts, one tensor for all of a layer, and routers stay as they are."""


def add_lora(model: DiffusionLM, rank: int, alpha: int, seed: int = 0) -> None:
    """Freeze the model, but for what a carry learns, and put adapters beside the backbone's matrices; the same on every
    process."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise RCDError("LoRA needs the peft package: pip install 'residual-context-diffusion[train]'.") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config: Any = LoraConfig(r=rank, lora_alpha=alpha, target_modules=MATRICES, lora_dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # the layers, not the backbone: of an architecture whose experts it knows peft would adapt these as well
        inject_adapter_in_model(config, model.backbone.layers)
    if model.carry_parameters is not None:
        model.carry_parameters.requires_grad_(True)


def merged_state(state: dict[str, Tensor], rank: int, alpha: int) -> dict[str, Tensor]:
    """W + alpha / r * B A, under the matrices' own names."""
    merged: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        a, b = (plain.removesuffix(".weight") + f".lora_{which}.{ADAPTER}.weight" for which in "AB")
        if a in state:
            tensor = tensor + (state[b].float() @ state[a].float() * (alpha / rank)).to(tensor.dtype)
        merged[plain] = tensor
    return merged
