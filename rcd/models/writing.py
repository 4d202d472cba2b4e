"""Writing a checkpoint: an ordinary Hugging Face folder in the family's own parameter names, plus rcd.json (and
carry.safetensors, where the carry has learnt something)."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rcd.errors import RCDError, first_line
from rcd.models import learnt
from rcd.models.checkpoint import Checkpoint
from rcd.models.settings import RCD_JSON
from rcd.models.source import INDEX
from rcd.models.tensors import Layout, layout_of, shape_of, taken


def save(
    checkpoint: Checkpoint,
    folder: str | Path,
    *,
    overwrite: bool = False,
    max_shard_size: str = "5GB",
    state: dict[str, Tensor] | None = None,
) -> Path:
    """Write an ordinary folder that the family's own code opens: same names, same dtypes, plus rcd.json. `state` stands
    in for the model's own parameters (a training run's, gathered).

    Written beside the target and moved into place whole, so that a broken run never leaves half a checkpoint.
    """
    quantised = checkpoint.model.quantised
    if quantised and state is None:
        raise RCDError(
            f"the weights of this model are quantised ({quantised}), and the floats they were made from are not kept; "
            "load it without quantize to save it, or copy its folder."
        )
    if checkpoint.model.spread and state is None:
        raise RCDError("the layers of this model are on several devices, or on disk; load it on one to save it.")
    if not checkpoint.config:
        raise RCDError("this model came as an object without its config.json; load it from a folder to save it.")
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not overwrite:
        raise RCDError(f"{target} is not empty; choose another folder or allow it to be overwritten.")
    spec, state = checkpoint.model.spec, checkpoint.model.state_dict() if state is None else state
    layout = layout_of(spec, {n: tuple(t.shape) for n, t in state.items() if not n.startswith(learnt.PREFIX)})
    held = {name: state[pieces[0].name].dtype for name, pieces in layout.items()}
    # as on disk, unless the model was loaded narrower: then what is left of the precision is what is written
    dtypes = {
        name: dtype if dtype.itemsize <= held[name].itemsize else held[name]
        for name, dtype in (checkpoint.stored or held).items()
    }
    learnt.check_held(checkpoint.model, learnt.carry_of(checkpoint.rcd))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise RCDError(
            f"nothing can be written to {target.parent} ({error.strerror}); choose another folder."
        ) from error
    try:
        if checkpoint.folder is not None:
            _copy_side_files(checkpoint.folder, scratch)
        if checkpoint.tokenizer is not None and (checkpoint.tokenizer_changed or checkpoint.folder is None):
            checkpoint.tokenizer.save_pretrained(scratch)
        (scratch / "config.json").write_text(json.dumps(checkpoint.config, indent=2) + "\n")
        checkpoint.rcd.write(scratch)
        _write_tensors(state, layout, dtypes, scratch, max_shard_size)
        codebook = state["backbone.embed_tokens.weight"]
        learnt.write(
            state, checkpoint.rcd, scratch, codebook.shape[1], dtypes[spec.from_stock("backbone.embed_tokens.weight")]
        )
        _usual_permissions(scratch)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RCDError(f"writing {target} failed ({reason}); nothing was changed.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_tensors(
    state: dict[str, Tensor], layout: Layout, dtypes: dict[str, torch.dtype], folder: Path, max_shard_size: str
) -> None:
    """Shard by shard, so that no more than one is in memory beside the model."""
    from huggingface_hub import split_torch_state_dict_into_shards

    out = {name: torch.empty(shape_of(layout[name]), dtype=dtype, device="meta") for name, dtype in dtypes.items()}
    plan = split_torch_state_dict_into_shards(
        out, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file, names in plan.filename_to_tensors.items():
        # of its own memory each: what is tied, or an engine's or an expert's view, shares its storage with others
        shard = {name: taken(state, layout[name]).detach().to("cpu", dtypes[name], copy=True) for name in names}
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, folder / file, {"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _usual_permissions(folder: Path) -> None:
    """What open() and mkdir() would have given: temporary folders and safetensors files are private otherwise."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)


def _copy_side_files(source: Path, target: Path) -> None:
    """Everything beside the weights travels along as it is (the tokenizer, the family's own code as plain files)."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
    for path in sorted(source.iterdir()):
        own = path.name in ("config.json", RCD_JSON) or path.name.startswith(".")
        if path.is_file() and not own and not path.name.endswith(weights):
            shutil.copyfile(path, target / path.name)
