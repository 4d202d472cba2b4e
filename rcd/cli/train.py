"""`rcd train`: both stages of Algorithm 1, or one of them."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.errors import RCDError, one_of

if TYPE_CHECKING:
    from rcd.train.config import TrainConfig

STAGES = ("reference", "target", "all")


def train(
    recipe: Annotated[str, typer.Argument(help="A name (rcd list recipe) or a YAML file.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The run's folder.")] = None,
    stage: Annotated[str, typer.Option(help="reference, target or all.")] = "all",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, both stages; reference.key or target.key for one.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="An existing model as the reference; stage 1 is skipped.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and leave.")] = False,
    device: opt.Device = "auto",
) -> None:
    """Train a recipe: stage 1 (the reference) and stage 2 (the target on its residuals)."""
    from rcd.recipes.base import find

    one_of("stage", stage, STAGES)
    found = find(recipe)
    stages: dict[str, TrainConfig] = {}
    if found.reference is not None and reference is None and stage in ("reference", "all"):
        stages["reference"] = found.reference
    if stage in ("target", "all"):
        stages["target"] = found.target
    if not stages:
        raise RCDError(f"the recipe {found.name} has no stage {stage!r}.")
    stages = {name: config.with_settings(_parsed(settings or [], name)) for name, config in stages.items()}
    if dry_run:
        from rcd.train.plan import plan

        for name, config in stages.items():
            print("\n".join(plan(name, config)))
        return
    if output is None:
        raise RCDError("name the run's folder with --output.")
    _run(stages, output, reference, resume, device)


def _run(stages: dict[str, TrainConfig], output: Path, reference: str | None, resume: bool, device: str) -> None:
    from accelerate import Accelerator

    from rcd.models.checkpoint import pick_device
    from rcd.train.loop import Stage, Stopped, Trainer

    trackers = sorted({tracker for config in stages.values() for tracker in config.trackers})
    for tracker in trackers:
        one_of("tracker", tracker, ("tensorboard", "wandb"))
        if find_spec(tracker) is None:
            raise RCDError(f"the tracker {tracker} is not installed: pip install {tracker}.")
    accelerator = Accelerator(cpu=pick_device(device).type == "cpu", log_with=trackers or None, project_dir=output)
    main = accelerator.is_main_process

    def say(text: str) -> None:
        if main:
            print(text, flush=True)

    for name, config in stages.items():
        folder = output / name
        finished = (folder / "model" / "config.json").is_file()
        if main:
            _claim(folder, config, resume)
        accelerator.wait_for_everyone()
        if name == "target" and reference is None and (output / "reference" / "model").is_dir():
            reference = str(output / "reference" / "model")
        if resume and finished:
            say(f"{name}: already trained")
            continue
        built = Stage.of(config, reference if name == "target" else None, accelerator.device)
        for line in built.report.lines():
            say(f"{name}: {line}")
        if config.total_batch % (config.device_batch * accelerator.num_processes):
            raise RCDError(
                f"total_batch {config.total_batch} is no multiple of device_batch {config.device_batch} x "
                f"{accelerator.num_processes} processes; change one of them with --set."
            )
        rounds = config.total_batch // (config.device_batch * accelerator.num_processes)
        say(f"{name}: {accelerator.num_processes} process(es) x {config.device_batch} x {rounds} accumulation steps")
        if trackers:
            settings = {
                k: v if isinstance(v, (int, float, str)) else json.dumps(v) for k, v in config.to_json().items()
            }
            accelerator.init_trackers(name, config=settings)
        trainer = Trainer(built, folder, accelerator, say)
        try:
            written = trainer.run(resume)
        except Stopped as stopped:
            say(f"{name}: stopped at step {stopped}; go on with --resume")
            return
        say(f"{name}: trained, exported to {written}")
    accelerator.end_training()


def _claim(folder: Path, config: TrainConfig, resume: bool) -> None:
    """A run's folder belongs to one configuration."""
    path = folder / "train.json"
    wanted = config.to_json()
    if path.is_file():
        held = json.loads(path.read_text())
        if not resume:
            raise RCDError(f"{folder} holds a run; go on with --resume, or choose another --output.")
        differing = [f"{k}: {held.get(k)!r} -> {wanted[k]!r}" for k in wanted if held.get(k) != wanted[k]]
        if differing:
            raise RCDError(
                f"{folder} was begun with other settings ({'; '.join(differing)}); use those, or a new --output."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted, indent=2) + "\n")


def _parsed(settings: list[str], stage: str) -> dict[str, Any]:
    """--set key=value; a value is JSON where it can be, else a text."""
    out: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise RCDError(f"--set takes key=value, not {text!r}.")
        which, _, rest = key.partition(".")
        if which in ("reference", "target") and rest:
            if which != stage:
                continue
            key = rest
        try:
            out[key] = json.loads(value)
        except json.JSONDecodeError:
            out[key] = {"None": None, "True": True, "False": False}.get(value, value)
    return out


def _main() -> None:
    """So that `accelerate launch -m rcd.cli.train` works, too."""
    from rcd.cli.main import main

    sys.argv.insert(1, "train")
    main()


if __name__ == "__main__":
    _main()
