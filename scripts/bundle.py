"""Put trained models into rcd/assets, in bfloat16, with a manifest of checksums.

    python scripts/bundle.py sdar-seqd=runs/set/seqd sdar-rcd=runs/set/rcd ... --max-new-tokens 48

Each entry is NAME=RUN, where RUN holds `model` (or `target/model`, or `reference/model`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from rcd import api
from rcd.errors import RCDError
from rcd.models import bundled

ABOUT = {
    "sdar-seqd": "SDAR-style, without residual context; word problems and sudoku",
    "sdar-rcd": "SDAR-style, with residual context; word problems and sudoku",
    "sdar-reference": "SDAR-style, the smaller reference",
    "llada-seqd": "LLaDA-style, without residual context; sudoku",
    "llada-rcd": "LLaDA-style, with residual context; sudoku",
    "llada-reference": "LLaDA-style, the smaller reference",
}


def find(run: Path) -> Path:
    for place in (run, run / "model-bfloat16", run / "model", run / "target" / "model", run / "reference" / "model"):
        if (place / "config.json").is_file():
            return place
    raise RCDError(f"{run} holds no trained model.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="NAME=RUN")
    parser.add_argument("--recipe", help="the recipe's name, for rcd.json", default=None)
    parser.add_argument("--max-new-tokens", type=int, default=None, help="the answers' default length")
    options = parser.parse_args()
    path = bundled.ASSETS / bundled.MANIFEST
    models = json.loads(path.read_text())["models"] if path.is_file() else {}
    for entry in options.models:
        name, _, run = entry.partition("=")
        folder = bundled.ASSETS / name
        pipeline = api.load(find(Path(run)), device="cpu", dtype="bfloat16")
        held = pipeline.checkpoint.rcd.provenance
        kept = {"recipe": f"tasks-{name}", "data": held.get("data"), "steps": held.get("steps")}
        shutil.rmtree(folder, ignore_errors=True)
        pipeline.save(folder, provenance=kept, max_new_tokens=options.max_new_tokens)
        files = sorted(file for file in folder.iterdir() if file.is_file())
        models[name] = {
            "about": ABOUT.get(name, name),
            "parameters": sum(p.numel() for p in pipeline.model.parameters()),
            "files": {file.name: bundled.checksum(file) for file in files},
        }
        print(f"{name}: {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")
    path.write_text(json.dumps({"models": dict(sorted(models.items()))}, indent=1) + "\n")
    total = sum(file.stat().st_size for file in bundled.ASSETS.rglob("*") if file.is_file())
    print(f"together {total / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except RCDError as error:
        print(f"bundle: {error}", file=sys.stderr)
        sys.exit(2)
