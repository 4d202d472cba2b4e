"""Helpers of the tests that run `rcd train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rcd.cli.train import train

QUICK = (
    "max_steps=12 save_every=3 log_every=1 validate_every=6 data=sums:300 validation=20 total_batch=8 device_batch=4"
)


def smoke(output: Path, *extra: str, stage: str = "all") -> list[str]:
    """The arguments of `rcd` for what `run` does."""
    settings = [part for setting in (*QUICK.split(), *extra) for part in ("--set", setting)]
    return ["train", "smoke", "--stage", stage, "--output", str(output), "--device", "cpu", *settings]


def run(output: Path, *extra: str, stage: str = "all", resume: bool = False) -> None:
    """In this process."""
    settings = [*QUICK.split(), *extra]
    train(
        "smoke",
        output=output,
        stage=stage,
        settings=settings,
        reference=None,
        resume=resume,
        dry_run=False,
        device="cpu",
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "model" / "model.safetensors"))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
