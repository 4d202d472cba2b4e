"""Writing a checkpoint: an ordinary Hugging Face folder in the family's own parameter names, plus rcd.json (and
carry.safetensors, where the carry has learnt something)."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from torch import Tensor

from rcd.errors import RCDError
from rcd.models import learnt
from rcd.models.checkpoint import Checkpoint
from rcd.models.settings import RCD_JSON


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
    from huggingface_hub import save_torch_state_dict

    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())) and not overwrite:
        raise RCDError(f"{target} is not empty; choose another folder or allow it to be overwritten.")
    spec, state = checkpoint.model.spec, checkpoint.model.state_dict() if state is None else state
    family = {name: tensor for name, tensor in state.items() if not name.startswith(learnt.PREFIX)}
    stored = checkpoint.stored or {spec.from_stock(name): tensor.dtype for name, tensor in family.items()}
    learnt.check_held(checkpoint.model, learnt.carry_of(checkpoint.rcd))
    out = {}
    for name, dtype in stored.items():
        tensor = state[spec.to_stock(name)].detach()
        # as on disk, unless the model was loaded narrower: then what is left of the precision is what is written
        out[name] = tensor.to("cpu", dtype if dtype.itemsize <= tensor.dtype.itemsize else tensor.dtype).contiguous()
    if len({tensor.untyped_storage().data_ptr() for tensor in out.values()}) < len(out):  # tied, or an engine's views
        out = {name: tensor.clone() for name, tensor in out.items()}
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
        save_torch_state_dict(out, scratch, max_shard_size=max_shard_size, metadata={"format": "pt"})
        codebook = out[spec.from_stock("backbone.embed_tokens.weight")]
        learnt.write(state, checkpoint.rcd, scratch, codebook)
        _usual_permissions(scratch)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    except OSError as error:
        raise RCDError(f"writing {target} failed ({error.strerror or error}); nothing was changed.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


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
