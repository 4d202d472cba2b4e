"""`scripts/compare.py`: recipes trained, swept and compared by one command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = (
    "--set data=tasks:mixed:200 --set base.toy.width=32 --set base.toy.heads=2 --set base.toy.kv_heads=2 "
    "--set reference.toy.width=32 --set max_steps=2 --set total_batch=4 --set device_batch=4 --set validation=4 "
    "--set precision=float32 --problems 4 --thresholds 0.5 1.0 --jobs 2 --snapshots 2 --store bfloat16"
)


def compare(*args: str) -> str:
    command = [sys.executable, str(ROOT / "scripts/compare.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_recipes_are_trained_swept_and_compared(tmp_path: Path) -> None:
    half = "half=tasks-sdar-rcd,carry.alpha_scale=0.5,residual.trajectory_share=0.5"
    out = str(tmp_path / "runs")
    shown = compare("--output", out, *TINY.split(), "--base", "tasks-sdar-seqd", half)
    assert "FAILED" not in shown and "half against tasks-sdar-seqd" in shown
    run = tmp_path / "runs" / "half"
    assert json.loads((run / "train.json").read_text())["carry"]["alpha_scale"] == 0.5
    assert len((run / "snapshots.jsonl").read_text().splitlines()) == 2
    assert json.loads((run / "compare.json").read_text())["all"]["items"] == 4
    assert {path.name.split("-")[0] for path in (tmp_path / "runs").iterdir() if path.is_dir()} >= {"base", "reference"}
    assert (tmp_path / "runs" / "frontier.png").is_file() and (tmp_path / "runs" / "tokens.png").is_file()

    models = [f"{name}={tmp_path / 'runs' / name / 'model'}" for name in ("tasks-sdar-seqd", "half")]
    again = compare("--output", str(tmp_path / "again"), "--trained", "--problems", "4", "--thresholds", "0.5", "1.0",
                    "--jobs", "1", "--base", *models)  # fmt: skip
    assert "half against tasks-sdar-seqd" in again
    assert "| threshold | tasks-sdar-seqd | half |" in (tmp_path / "again" / "report.md").read_text()
