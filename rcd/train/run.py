"""A run: the stages of a recipe one after the other, in folders that belong to one configuration each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator

from rcd.errors import RCDError, one_of
from rcd.models.checkpoint import pick_device
from rcd.models.settings import read_json
from rcd.terminal import show
from rcd.train.config import RESUMABLE, TrainConfig
from rcd.train.loop import Sigterm, Stopped, Trainer
from rcd.train.stage import REFERENCE, Stage


def run(
    stages: dict[str, TrainConfig],
    output: Path,
    reference: str | None = None,
    resume: bool = False,
    device: str = "auto",
) -> None:
    """Train `base`, `reference` and `target`, or some of them; the trained models are in output/STAGE/model."""
    trackers = sorted({tracker for config in stages.values() for tracker in config.trackers})
    for tracker in trackers:
        one_of("tracker", tracker, ("tensorboard", "wandb"))
        if find_spec(tracker) is None:
            raise RCDError(f"the tracker {tracker} is not installed: pip install {tracker}.")
    chosen = pick_device(device)
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)
    accelerator = Accelerator(cpu=chosen.type == "cpu", log_with=trackers or None, project_dir=output)
    main = accelerator.is_main_process

    def say(text: str) -> None:
        if main:
            show(text)

    with Sigterm() as sigterm:
        for name, config in stages.items():
            folder = output / name
            if name == "target" and config.needs_reference:
                own = REFERENCE if (output / REFERENCE / "model").is_dir() else None
                config = replace(config, reference=reference or own)
            if main:
                _check_folder(folder, config, resume, say)
            accelerator.wait_for_everyone()
            if resume and (folder / "model" / "config.json").is_file():
                say(f"{name}: already trained")
                continue
            built = Stage.of(config, accelerator.device, output)
            for line in built.report.lines():
                say(f"{name}: {line}")
            if config.total_batch % (config.device_batch * accelerator.num_processes):
                raise RCDError(
                    f"total_batch {config.total_batch} is no multiple of device_batch {config.device_batch} x "
                    f"{accelerator.num_processes} processes; change one of them with --set."
                )
            rounds = config.total_batch // (config.device_batch * accelerator.num_processes)
            say(
                f"{name}: {accelerator.num_processes} process(es) x {config.device_batch} x {rounds} accumulation steps"
            )
            trainer = Trainer(built, folder, accelerator, say, sigterm.asked)
            if main:
                claim(folder, config)
            accelerator.wait_for_everyone()
            if trackers:
                flat = {
                    k: v if isinstance(v, (int, float, str)) else json.dumps(v) for k, v in config.to_json().items()
                }
                accelerator.init_trackers(name, config=flat)
            try:
                written = trainer.run(resume)
            except Stopped as stopped:
                say(f"{name}: stopped at step {stopped}; go on with --resume")
                return
            say(f"{name}: trained, exported to {written}")
            asked = trainer.sum(torch.tensor(float(sigterm.asked()), device=accelerator.device))
            if bool(asked > 0) and name != list(stages)[-1]:
                say(f"{name}: asked to stop; go on with --resume")
                return
    accelerator.end_training()


def _check_folder(folder: Path, config: TrainConfig, resume: bool, say: Callable[[str], None]) -> None:
    """A run's folder belongs to one configuration, but for what does not change the result."""
    if not (folder / "train.json").is_file():
        return
    if not resume:
        raise RCDError(f"{folder} holds a run; go on with --resume, or choose another --output.")
    held, wanted = read_json(folder / "train.json"), config.to_json()
    differing = {k: f"{k}: {held.get(k)!r} -> {wanted[k]!r}" for k in wanted if held.get(k) != wanted[k]}
    # pass by pass the load-balancing loss is another, so that the result depends on how a step is split
    free = [key for key in RESUMABLE if key != "device_batch" or not config.router_balance]
    fixed = [text for key, text in differing.items() if key not in free]
    if fixed:
        raise RCDError(f"{folder} was begun with other settings ({'; '.join(fixed)}); use them, or a new --output.")
    if differing:
        say(f"changed since the run began: {'; '.join(differing.values())}")


def claim(folder: Path, config: TrainConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / "train.json.writing"
    scratch.write_text(json.dumps(config.to_json(), indent=2) + "\n")
    scratch.replace(folder / "train.json")
