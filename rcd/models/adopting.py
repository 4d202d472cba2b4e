"""A model that is in memory already, as a checkpoint: an object of transformers, or a `DiffusionLM`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rcd.errors import RCDError
from rcd.models.checkpoint import Checkpoint, made, pick_device, settled
from rcd.models.filling import quantise_all
from rcd.models.lm import DiffusionLM
from rcd.models.placing import move
from rcd.models.quantise import Quantisation
from rcd.models.settings import RCDFile


@dataclass(frozen=True)
class Held:
    """`rcd.models.source.Weights` that are in memory."""

    state: dict[str, Tensor]

    def headers(self) -> Iterable[tuple[str, tuple[int, ...], torch.dtype]]:
        return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.state.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.detach()) for name, tensor in self.state.items())


def adopt(
    source: Any, *, tokenizer: Any | None = None, family: str | None = None, device: Any = None, dtype: Any = None,
    quantize: str | Quantisation | None = None, **overrides: Any,
) -> Checkpoint:  # fmt: skip
    """`auto`, or None, leaves device and dtype as they are. Weights that need no change are not copied."""
    quantise = Quantisation.parse(quantize)
    if isinstance(source, DiffusionLM):
        return _own(source, tokenizer, family, device, dtype, quantise, overrides)
    config: Any = getattr(source, "config", None)
    if not isinstance(source, nn.Module) or not hasattr(config, "to_dict"):
        raise RCDError(
            f"load takes a folder, a hub name, a GGUF file or a model of transformers, not {type(source).__name__}."
        )
    if getattr(source, "hf_quantizer", None) is not None:
        raise RCDError(
            "this model is quantised by transformers; give the path of its checkpoint instead of the object."
        )
    state: dict[str, Tensor] = dict(source.state_dict())
    if any(tensor.device.type == "meta" for tensor in state.values()):
        raise RCDError("this model has weights on the meta device (offloaded, or never loaded); load them first.")
    first = next(iter(state.values()), None)
    if first is None:
        raise RCDError(f"this {type(source).__name__} has no weights.")
    generation = getattr(source, "generation_config", None)
    written, ends = config.to_dict(), {} if generation is None else {"eos_token_id": generation.eos_token_id}
    written.setdefault("architectures", [type(source).__name__])
    path = Path(str(written.get("_name_or_path") or type(source).__name__))
    opened = settled(path, written, ends, RCDFile(), tokenizer, Held(state), family, overrides)
    target = first.device if device in (None, "auto") else pick_device(device)
    floats = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    found = made(opened, target, floats if dtype in (None, "auto") else dtype, quantise)
    return replace(found, folder=None, tokenizer_changed=tokenizer is not None)


def _own(
    model: DiffusionLM, tokenizer: Any | None, family: str | None, device: Any, dtype: Any,
    quantise: Quantisation | None, overrides: dict[str, Any],
) -> Checkpoint:  # fmt: skip
    """The object itself: it is moved, cast and quantised in place."""
    if family is not None or any(value is not None for value in overrides.values()):
        raise RCDError("a DiffusionLM has its settings (`model.settings`); change them there.")
    if device not in (None, "auto") or dtype not in (None, "auto"):
        kind = None if dtype in (None, "auto") else _kind(dtype)
        move(model, model.device if device in (None, "auto") else pick_device(device), kind)
    quantise_all(model, quantise)
    return Checkpoint(model, {}, tokenizer)


def _kind(dtype: Any) -> torch.dtype:
    from rcd.models.dtypes import pick_dtype

    return pick_dtype(dtype, torch.float32, torch.device("cpu"))
