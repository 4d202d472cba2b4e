"""Where a model's parts go (`device_map`, in transformers' spelling), and moving a model that is loaded.

One device for all is an ordinary load. Where several are named, or the disk, accelerate's hooks bring activations to
each layer, or a layer's weights to the activations, in stock passes; embeddings, the final norm and the head stay on
the main device, because decoding reads their numbers itself (the codebook, Eq. 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rcd.errors import RCDError, first_line
from rcd.models.dtypes import DTYPES, wide
from rcd.models.lm import DiffusionLM
from rcd.models.quantise import Quantisation

AUTO = ("auto", "balanced", "balanced_low_0", "sequential")
DISK = "disk"
LAYERS = "backbone.layers"


@dataclass(frozen=True)
class Placing:
    """`main`: the device of everything that no layer's entry places."""

    main: Any = "auto"
    layers: dict[str, Any] = field(default_factory=dict)
    """Names of layers (`backbone.layers.3`, or all of them, `backbone.layers`) -> device or `disk`."""
    folder: Path | None = None
    """Where layers lie that are on disk."""
    shared_out: bool = False
    """Over all GPUs, by what they have free."""

    @property
    def several(self) -> bool:
        return bool(self.layers) or self.shared_out

    @classmethod
    def parse(cls, given: Any, device: Any, folder: str | Path | None, quantise: Quantisation | None = None) -> Placing:
        if given is not None and device not in (None, "auto"):
            raise RCDError("device and device_map both say where the model goes; give one of them.")
        path = None if folder is None else Path(folder).expanduser()
        if given is None:
            return cls(device)
        if isinstance(given, (str, int, torch.device)) and not isinstance(given, bool):
            return cls("auto", {}, path, torch.cuda.device_count() > 1) if given in AUTO else cls(_device(given))
        if not isinstance(given, Mapping) or not given:
            raise RCDError(f"device_map is a device, one of {', '.join(AUTO)}, or names of parts with a device each, "
                           f"not {given!r}.")  # fmt: skip
        found = {_ours(name): _device(where) for name, where in given.items()}
        layers = {name: where for name, where in found.items() if name.startswith(LAYERS)}
        rest = {name: where for name, where in found.items() if name not in layers}
        mains = set(rest.values()) or set(layers.values())
        if len(mains) > 1 or DISK in mains:
            raise RCDError(
                "a device_map may place layers apart; embeddings, norm and head belong on one device together, which "
                f"is not the disk, and this one says {', '.join(sorted(map(str, mains)))}."
            )
        [main] = mains
        apart = {name: where for name, where in layers.items() if where != main}
        if apart and quantise is not None:
            raise RCDError("a quantised model stays on one device; leave out quantize, or name one device.")
        if DISK in apart.values() and path is None:
            raise RCDError("a device_map with 'disk' needs a folder for the weights; name it with offload_folder.")
        return cls(main, apart, path)

    def spread(self, model: DiffusionLM) -> None:
        """Put the layers where they go, with accelerate's hooks around everything."""
        import accelerate

        count, main = len(model.backbone.layers), torch.device(self.main)  # type: ignore[arg-type]
        whole = {LAYERS: main, **self.layers}
        for name in self.layers:
            number = name.removeprefix(LAYERS).lstrip(".")
            if number and not (number.isdigit() and int(number) < count):
                raise RCDError(f"device_map names {name}, and the model has the layers 0 to {count - 1}.")
        places: dict[str, Any] = {f"{LAYERS}.{n}": whole.get(f"{LAYERS}.{n}", whole[LAYERS]) for n in range(count)}
        if self.shared_out:
            places = {name: where for name, where in _by_room(model).items() if name.startswith(LAYERS)}
        rest = [f"backbone.{name}" for name, _ in model.backbone.named_children() if name != "layers"]
        rest += [name for name, _ in model.named_children() if name != "backbone"]
        try:
            accelerate.dispatch_model(
                model, {**dict.fromkeys(rest, main), **places}, main_device=main,
                offload_dir=self.folder, offload_buffers=False, force_hooks=True,
            )  # fmt: skip
        except Exception as error:  # whatever a device or a disk raises
            raise RCDError(f"the layers cannot be placed as device_map says ({first_line(error)}).") from error
        model.spread = True


def _by_room(model: DiffusionLM) -> dict[str, Any]:
    """By what every GPU has free, whole layers at a time."""
    import accelerate

    layer = type(model.backbone.layers[0]).__name__  # type: ignore[index]
    found: dict[str, Any] = accelerate.infer_auto_device_map(model, no_split_module_classes=[layer])
    return found


def _ours(name: Any) -> str:
    """Of `model.layers.3`, `backbone.layers.3`; `` is everything."""
    if not isinstance(name, str):
        raise RCDError(f"device_map names parts by texts, such as 'model.layers.0', not {name!r}.")
    if name.startswith("lm_head"):
        return "head" + name.removeprefix("lm_head")
    found = "backbone" + name.removeprefix("model") if name == "model" or name.startswith("model.") else name
    if found.split(".")[0] not in ("", "backbone", "head"):
        raise RCDError(f"device_map names {name!r}; the parts are model.embed_tokens, model.layers.N, model.norm, "
                       "model.rotary_emb and lm_head.")  # fmt: skip
    return ".".join(found.split(".")[:3])


def _device(where: Any) -> Any:
    if where == DISK:
        return DISK
    try:
        return torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    except (RuntimeError, TypeError) as error:
        raise RCDError(f"device_map says {where!r}, which is no device ({first_line(error)}).") from error


def chosen(targets: tuple[Any, ...]) -> tuple[Any | None, torch.dtype | None]:
    """(device, dtype) of what `Pipeline.to` was given."""
    device: Any = None
    dtype: torch.dtype | None = None
    for target in targets:
        kind = DTYPES.get(target) if isinstance(target, str) else target
        if isinstance(kind, torch.dtype) and kind.is_floating_point and dtype is None:
            dtype = kind
        elif isinstance(target, (str, torch.device)) and device is None and target not in DTYPES:
            device = target
        else:
            raise RCDError(f"`to` takes a device, a dtype of floats, or one of each, not {targets!r}.")
    if device is None and dtype is None:
        raise RCDError("`to` takes a device, a dtype, or one of each.")
    return device, dtype


def move(model: DiffusionLM, device: torch.device, dtype: torch.dtype | None) -> None:
    """Every tensor, where it is kept wide as wide as it was; tables of RoPE keep their dtype."""
    if model.spread:
        raise RCDError("the layers of this model are on several devices, or on disk; load it again to move it.")
    if model.quantised and (dtype not in (None, model.codebook.dtype) or device.type != model.device.type):
        raise RCDError(
            f"the weights of this model are quantised ({model.quantised}) for {model.codebook.dtype} on "
            f"{model.device.type}; load it again with another device or dtype."
        )
    before = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            kind = dtype if tensor.is_floating_point() and "rotary_emb" not in name and not model.quantised else None
            kind = wide(kind) if kind is not None and name.endswith(model.spec.wide) else kind
            tensor.data = tensor.data.to(device, kind or tensor.dtype)
    except RuntimeError as error:  # no room: as it was
        for tensor, data in before:
            tensor.data = data
        raise RCDError(f"the model cannot be moved to {device} ({first_line(error)}); it is where it was.") from error
