"""Where a model's parts go (`device_map`, in transformers' spelling), and moving a model that is loaded.

One device for all is an ordinary load. Where several are named, or the disk, accelerate's hooks bring activations to
each layer, or a layer's weights to the activations, in stock passes; embeddings, the final norm and the head stay on
the main device, because decoding reads their numbers itself (the codebook, Eq. 1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rcd.errors import RCDError, first_line, told
from rcd.models.dtypes import DTYPES, FLOATS, wide
from rcd.models.lm import DiffusionLM
from rcd.models.quantise import Quantisation

AUTO = ("auto", "balanced", "balanced_low_0", "sequential")
DISK = "disk"
LAYERS = "backbone.layers"
FIXED = ("backbone.embed_tokens", "backbone.norm", "backbone.rotary_emb", "head")
"""The parts that stay together, which with the layers are the whole model."""


@dataclass(frozen=True)
class Placing:
    """`main`: the device of everything that no layer's entry places."""

    main: Any = "auto"
    layers: dict[str, Any] = field(default_factory=dict)
    """Names of layers (`backbone.layers.3`, or all that are not named, `backbone.layers`) -> device or `disk`; empty
    where all of them are on the main device."""
    named: dict[int, str] = field(default_factory=dict)
    """Numbers of the layers that a map names, each with the name in it."""
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
        if folder is not None and not isinstance(folder, (str, Path)):
            raise RCDError(f"offload_folder is the path of a folder, not {told(folder)}.")
        path = None if folder is None else Path(folder).expanduser()
        if given is None:
            return cls(device)
        if isinstance(given, (str, int, torch.device)) and not isinstance(given, bool):
            return cls("auto", {}, {}, path, torch.cuda.device_count() > 1) if given in AUTO else cls(_device(given))
        if not isinstance(given, Mapping) or not given:
            raise RCDError(f"device_map is a device, one of {', '.join(AUTO)}, or names of parts with a device each, "
                           f"not {told(given)}.")  # fmt: skip
        found: dict[str, Any] = {}
        named: dict[int, str] = {}
        for name, where in given.items():
            ours, device = _ours(name), _device(where)
            if found.setdefault(ours, device) != device:
                raise RCDError(f"device_map names the part {name!r} twice, in two spellings; leave one of them out.")
            if ours.startswith(f"{LAYERS}."):
                named[int(ours.removeprefix(f"{LAYERS}."))] = name
        layers = {name: where for name, where in found.items() if name.startswith(LAYERS)}
        mains = {_nearest(found, part) for part in FIXED} - {None} or set(layers.values())
        if len(mains) > 1 or DISK in mains:
            raise RCDError(
                "a device_map may place layers apart; embeddings, norm and head belong on one device together, which "
                f"is not the disk, and this one says {', '.join(sorted(map(str, mains)))}."
            )
        [main] = mains
        layers[LAYERS] = _nearest(found, LAYERS) or main
        apart = layers if set(layers.values()) != {main} else {}
        if apart and quantise is not None:
            raise RCDError("a quantised model stays on one device; leave out quantize, or name one device.")
        if DISK in apart.values() and path is None:
            raise RCDError("a device_map with 'disk' needs a folder for the weights; name it with offload_folder.")
        return cls(main, apart, named, path)

    def check(self, count: int) -> None:
        """Every layer that is named is one of so many."""
        for number, name in self.named.items():
            if number >= count:
                raise RCDError(f"device_map names {name!r}, and the model has {_parts(count - 1)}.")

    def spread(self, model: DiffusionLM) -> None:
        """Put the layers where they go, with accelerate's hooks around everything."""
        import accelerate

        count, main = len(model.backbone.layers), torch.device(self.main)  # type: ignore[arg-type]
        whole = {LAYERS: main, **self.layers}
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


def _nearest(found: Mapping[str, Any], part: str) -> Any | None:
    """Where the most specific entry puts it: its own, or that of the closest part around it. Example: of
    `backbone.norm`, that, else `backbone`, else `` (everything); None where nothing names it."""
    while part and part not in found:
        part = part.rpartition(".")[0]
    return found.get(part)


def _ours(name: Any) -> str:
    """Of `model.layers.3`, `backbone.layers.3`; `` is everything. Whole parts only."""
    if not isinstance(name, str):
        raise RCDError(f"device_map names parts by texts, such as 'model.layers.0', not {told(name)}.")
    ours = re.sub("^model(?![^.])", "backbone", re.sub("^lm_head(?![^.])", "head", name))
    layer = re.fullmatch(re.escape(LAYERS) + r"\.(0|[1-9][0-9]{0,8})", ours)
    if layer is None and ours not in ("", "backbone", LAYERS, *FIXED):
        raise RCDError(f"device_map names {told(name)}; the parts are {_parts()}, each as a whole.")
    return ours


def _parts(last: int | None = None) -> str:
    """As a map names them."""
    layers = "model.layers.N" if last is None else f"model.layers.0 to model.layers.{last}"
    return f"model.embed_tokens, {layers}, model.norm, model.rotary_emb and lm_head"


def _device(where: Any) -> Any:
    if where == DISK:
        return DISK
    try:
        if isinstance(where, bool):
            raise TypeError("True and False are none")
        return torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise RCDError(f"device_map says {told(where)}, which is no device ({first_line(error)}).") from error


def chosen(targets: tuple[Any, ...]) -> tuple[Any | None, torch.dtype | None]:
    """(device, dtype) of what `Pipeline.to` was given."""
    device: Any = None
    dtype: torch.dtype | None = None
    for target in targets:
        kind = DTYPES.get(target) if isinstance(target, str) else target
        if isinstance(kind, torch.dtype) and kind in FLOATS and dtype is None:
            dtype = kind
        elif isinstance(target, (str, torch.device)) and device is None and target not in DTYPES:
            device = target
        else:
            dtypes = ", ".join(map(str, FLOATS))
            raise RCDError(f"`to` takes a device, one of the dtypes {dtypes}, or one of each, not {targets!r}.")
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
