"""Where a checkpoint comes from: a folder, a hub name or a GGUF file, its tensors and its tokenizer.

Only safetensors and GGUF are read. Nothing is unpickled and no code of a checkpoint is run.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rcd.data import hub
from rcd.errors import RCDError, first_line, reason, told
from rcd.models import bundled
from rcd.models.settings import read_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""The dtypes that a safetensors header names."""
WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md", "LICENSE*"]


def locate(source: str | Path, revision: str | None = None) -> Path:
    """A local folder or GGUF file as it is; a bundled model, checked; a hub name is downloaded (or in the cache)."""
    if str(source).startswith(bundled.PREFIX):
        return bundled.folder_of(str(source).removeprefix(bundled.PREFIX))
    path = Path(source)
    try:
        path = path.expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, ~nobody, a zero byte
        why = reason(error) if isinstance(error, OSError) else first_line(error)
        raise RCDError(
            f"no checkpoint can be named {told(str(source))} ({why}); give a folder or a hub name."
        ) from error
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(source)):
        raise RCDError(
            f"there is no folder or file {told(str(source))}; give a checkpoint folder, a .gguf file or a hub name."
        )
    from huggingface_hub import snapshot_download

    try:
        with hub.quiet():
            return Path(snapshot_download(str(source), revision=revision, allow_patterns=WANTED))
    except Exception as error:  # the client's errors are many: no network, no such name, no access, no space
        raise RCDError(
            f"{told(str(source))} is no local folder, and the model hub did not give it ({hub.why(error)}); "
            "check the name and the network, or give a folder."
        ) from error


def read_optional(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def shards(folder: Path) -> dict[str, list[str] | None]:
    """Weight file -> the tensors that the index expects in it (None: whatever it holds)."""
    if (folder / INDEX).is_file():
        files: dict[str, list[str] | None] = {}
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise RCDError(f"{folder / INDEX} has no usable weight_map; download the checkpoint again.")
        for tensor, file in weight_map.items():
            listed = files.setdefault(file, [])
            assert listed is not None
            listed.append(tensor)
        for file in files:
            if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
                raise RCDError(f"{folder / INDEX} names the shard {told(file)}, which is outside of the checkpoint's "
                               "folder; download the checkpoint again.")  # fmt: skip
            if not os.path.isfile(folder / file):
                raise RCDError(f"the shard {told(file)} of {folder} is missing; download the checkpoint again.")
        if not files:
            raise RCDError(f"{folder / INDEX} lists no tensors; download the checkpoint again.")
        return files
    if (folder / WEIGHTS).is_file():
        return {WEIGHTS: None}
    pickles = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise RCDError(
            f"{folder} has only pickled weights ({pickles[0]}), which are not read; convert it to safetensors."
        )
    raise RCDError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX} is there.")


class Weights(Protocol):
    """The tensors of a checkpoint, in its own names."""

    def headers(self) -> Iterable[tuple[str, tuple[int, ...], torch.dtype]]:
        """(name, shape, dtype) of every tensor, before any is read."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time."""
        ...


@dataclass(frozen=True)
class Folder:
    """Those of a folder's safetensors files."""

    path: Path

    def headers(self) -> Iterable[tuple[str, tuple[int, ...], torch.dtype]]:
        for file in shards(self.path):
            with _opened(self.path, file) as content:
                for name in content.keys():  # noqa: SIM118 (a safetensors file is no dict)
                    part = content.get_slice(name)
                    yield name, tuple(part.get_shape()), STORED.get(part.get_dtype(), torch.uint8)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file, expected in shards(self.path).items():
            with _opened(self.path, file) as content:
                held = list(content.keys())
                for missing in sorted(set(expected or ()) - set(held)):
                    raise RCDError(f"the shard {file} of {self.path} lacks the tensor {missing}; download it again.")
                for name in held:
                    yield name, content.get_tensor(name)


@contextmanager
def _opened(folder: Path, file: str) -> Iterator[Any]:
    try:
        with safe_open(folder / file, framework="pt") as content:
            yield content
    except (SafetensorError, OSError) as error:
        raise RCDError(
            f"{folder / file} is truncated or is no safetensors file ({error}); download it again."
        ) from error


def tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, or None where it has none. A tokenizer class that is code in the folder is not run: its
    vocabulary files are read by a stock class, tokenizer.json as it stands."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

    readers: dict[str, Any] = {
        "tokenizer.json": PreTrainedTokenizerFast,
        "tokenizer_config.json": AutoTokenizer,
        "tokenizer.model": AutoTokenizer,
        "merges.txt": Qwen2Tokenizer,
    }
    failure: Exception | None = None
    for file, reader in readers.items():
        if (folder / file).is_file():
            try:
                with quiet():
                    return reader.from_pretrained(str(folder), trust_remote_code=False)
            except Exception as error:  # tokenizers raise whatever their files provoke
                failure = failure or error
    if failure is not None:
        raise RCDError(f"the tokenizer in {folder} cannot be read ({first_line(failure)}).") from failure
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """transformers comments on model types that are not its own, and shows bars; the families here are ours to know."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


LARGE, ENDS = 1 << 26, 1 << 20


def fingerprint(model: str | Path) -> str:
    """Of a checkpoint's content, wherever it lies: every byte of small files, size and both ends of large ones."""
    path = locate(model)
    files = [path] if path.is_file() else [*path.glob("*.json"), *path.glob("*.safetensors")]
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(size if size <= LARGE else ENDS))
            if size > LARGE:
                content.seek(-ENDS, 2)
                digest.update(content.read())
    return digest.hexdigest()
