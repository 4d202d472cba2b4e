"""Put trained models into rcd/assets, in bfloat16, with a manifest of checksums.

    python scripts/bundle.py sdar-seqd=runs/set/seqd sdar-rcd=runs/set/rcd ...

Each entry is NAME=RUN, where RUN is a checkpoint or holds `model` (or `target/model`, or `reference/model`); of `model`
and `model-bfloat16` (scripts/compare.py --store bfloat16) the newer one is taken. A new model takes the old one's place
when it is written whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rcd import api
from rcd.errors import RCDError, whole
from rcd.models import bundled

FAMILIES = {
    "sdar": "SDAR-style, blocks of 64; 6x6 sudoku",
    "llada": "LLaDA-style, the whole canvas; 6x6 sudoku",
    "words": "SDAR-style, blocks of 32; arithmetic word problems",
}
PARTS = {"seqd": "without residual context", "rcd": "with residual context", "reference": "the smaller reference"}


def about(name: str) -> str:
    """One line for the manifest and `rcd list model`."""
    models, _, part = name.partition("-")
    return f"{FAMILIES[models]}; {PARTS[part]}" if models in FAMILIES and part in PARTS else name


def find(run: Path) -> Path:
    """The trained model of a run."""
    for places in ((".",), ("model-bfloat16", "model"), ("target/model",), ("reference/model",)):
        there = [run / place for place in places if (run / place / "config.json").is_file()]
        if there:
            return max(there, key=lambda place: (place / "config.json").stat().st_mtime_ns)
    raise RCDError(f"{run} holds no trained model; name a checkpoint or the folder of a finished run.")


def entries_of(texts: Sequence[str]) -> dict[str, Path]:
    """Name -> the model that is to be bundled."""
    found: dict[str, Path] = {}
    for text in texts:
        name, _, run = text.partition("=")
        if not (name and run) or "/" in name or name.startswith("."):
            raise RCDError(f"{text!r} should be NAME=RUN, such as sdar-rcd=runs/set/rcd.")
        if name in found:
            raise RCDError(f"two entries are named {name!r}; leave one out.")
        found[name] = find(Path(run))
    return found


def bundle(name: str, source: Path, max_new_tokens: int | None) -> dict[str, Any]:
    """Write one model; returns its entry of the manifest."""
    folder = bundled.ASSETS / name
    pipeline = api.load(source, device="cpu", dtype="bfloat16")
    held = pipeline.checkpoint.rcd
    kept = {"recipe": f"tasks-{name}", "data": held.provenance.get("data"), "steps": held.provenance.get("steps")}
    # written beside the old one, which goes only when the new one is whole
    pipeline.save(folder, overwrite=True, provenance=kept, max_new_tokens=max_new_tokens or held.max_new_tokens)
    files = sorted(file for file in folder.iterdir() if file.is_file())
    print(f"{name}: {sum(file.stat().st_size for file in files) / 1e6:.1f} MB from {source}")
    return {
        "about": about(name),
        "parameters": sum(p.numel() for p in pipeline.model.parameters()),
        "files": {file.name: bundled.checksum(file) for file in files},
    }


def write_manifest(models: dict[str, Any]) -> None:
    path = bundled.ASSETS / bundled.MANIFEST
    scratch = path.with_name(f".{path.name}.writing")
    scratch.write_text(json.dumps({"models": dict(sorted(models.items()))}, indent=1) + "\n")
    scratch.replace(path)


def run(options: argparse.Namespace) -> None:
    entries = entries_of(options.models)
    if options.max_new_tokens is not None:
        whole("--max-new-tokens", options.max_new_tokens, least=1)
    models = bundled.manifest() if (bundled.ASSETS / bundled.MANIFEST).is_file() else {}
    for name, source in entries.items():
        models[name] = bundle(name, source, options.max_new_tokens)
        write_manifest(models)  # after each, so that it is true of those before one that fails
    total = sum(file.stat().st_size for file in bundled.ASSETS.rglob("*") if file.is_file())
    print(f"together {total / 1e6:.1f} MB")


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="NAME=RUN")
    parser.add_argument("--max-new-tokens", type=int, help="the answers' default length; else the model's own")
    try:
        run(parser.parse_args(args))
    except RCDError as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
