"""The trained models that come with the package: `bundled:NAME` wherever a checkpoint is named.

`rcd/assets/manifest.json` lists them with a checksum of every file; a file that is missing or was changed is refused.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import rcd
from rcd.errors import RCDError, unknown_name
from rcd.models.settings import read_json

PREFIX = "bundled:"
ASSETS = Path(rcd.__file__).parent / "assets"
MANIFEST = "manifest.json"


def manifest() -> dict[str, Any]:
    """Name -> {about, parameters, files: {file: sha256}}."""
    path = ASSETS / MANIFEST
    if not path.is_file():
        raise RCDError(
            "the bundled models are not in this installation (rcd/assets has no manifest.json); install the full "
            "package, or name a checkpoint of your own with --model."
        )
    models = read_json(path).get("models")
    good = isinstance(models, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("files"), dict) and "about" in entry
        for entry in models.values()
    )
    if not good or models is None:
        raise RCDError(f"{path} is damaged; install the package again.")
    return dict(models)


def holds(folder: Path | None) -> bool:
    """Whether a checkpoint's folder is a bundled model's."""
    return folder is not None and ASSETS in folder.resolve().parents


def names() -> list[str]:
    """As checkpoints are named by them; none where the installation has none."""
    return [PREFIX + name for name in manifest()] if (ASSETS / MANIFEST).is_file() else []


def folder_of(name: str) -> Path:
    """The checkpoint's folder, every file of it checked."""
    models = manifest()
    if name not in models:
        raise unknown_name("bundled model", name, models)
    folder = ASSETS / name
    for file, expected in models[name]["files"].items():
        if not (folder / file).is_file():
            raise RCDError(f"{file} of the bundled model {name} is missing from {folder}; install the package again.")
        if checksum(folder / file) != expected:
            raise RCDError(
                f"{file} of the bundled model {name} is not the file that was shipped (its checksum differs); install "
                "the package again."
            )
    return folder


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
