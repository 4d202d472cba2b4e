"""`rcd train`: both stages of Algorithm 1, or one of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
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
    given = found.target.with_settings(_parsed(settings or [], "target", found.target)) if found.target else None
    reference = reference or (given.reference if given else None)
    own = given is not None and given.carry is not None and given.residual.recycling > 0
    stages: dict[str, TrainConfig] = {}
    if found.reference is not None and stage in ("reference", "all") and not (reference or (own and stage == "all")):
        stages["reference"] = found.reference.with_settings(_parsed(settings or [], "reference", found.reference))
    if given is not None and stage in ("target", "all"):
        stages["target"] = given
    if not stages:
        raise RCDError(f"the recipe {found.name} has no stage {stage!r} to train here.")
    if dry_run:
        from rcd.train.plan import plan

        for name, config in stages.items():
            print("\n".join(plan(name, config)))
        return
    if output is None:
        raise RCDError("name the run's folder with --output.")
    _run(stages, output, reference, resume, device)
    _leave()


def _run(stages: dict[str, TrainConfig], output: Path, reference: str | None, resume: bool, device: str) -> None:
    import torch
    from accelerate import Accelerator

    from rcd.models.checkpoint import pick_device
    from rcd.train.loop import Sigterm, Stopped, Trainer
    from rcd.train.stage import Stage

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
            print(text, flush=True)

    with Sigterm() as sigterm:
        for name, config in stages.items():
            folder = output / name
            if name == "target" and config.carry is not None and not config.residual.recycling:
                trained = output / "reference" / "model"
                config = replace(config, reference=reference or (str(trained) if trained.is_dir() else None))
            if main:
                _check_folder(folder, config, resume, say)
            accelerator.wait_for_everyone()
            if resume and (folder / "model" / "config.json").is_file():
                say(f"{name}: already trained")
                continue
            built = Stage.of(config, accelerator.device)
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
                _claim(folder, config)
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


def _leave() -> None:
    """One of several processes ends here, its work done: gloo's threads may still be closing, and now and then they
    abort an interpreter that takes itself apart meanwhile, which a launcher would report as a failed run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _check_folder(folder: Path, config: TrainConfig, resume: bool, say: Callable[[str], None]) -> None:
    """A run's folder belongs to one configuration, but for what does not change the result."""
    from rcd.models.settings import read_json
    from rcd.train.config import RESUMABLE

    if not (folder / "train.json").is_file():
        return
    if not resume:
        raise RCDError(f"{folder} holds a run; go on with --resume, or choose another --output.")
    held, wanted = read_json(folder / "train.json"), config.to_json()
    differing = {k: f"{k}: {held.get(k)!r} -> {wanted[k]!r}" for k in wanted if held.get(k) != wanted[k]}
    fixed = [text for key, text in differing.items() if key not in RESUMABLE]
    if fixed:
        raise RCDError(f"{folder} was begun with other settings ({'; '.join(fixed)}); use them, or a new --output.")
    if differing:
        say(f"changed since the run began: {'; '.join(differing.values())}")


def _claim(folder: Path, config: TrainConfig) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / "train.json.writing"
    scratch.write_text(json.dumps(config.to_json(), indent=2) + "\n")
    scratch.replace(folder / "train.json")


def _parsed(settings: list[str], stage: str, config: TrainConfig) -> dict[str, Any]:
    """--set key=value; a value is JSON where it can be, else a text. A stage without a carry passes over settings of it
    that were not given for that stage by name."""
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
        elif which in ("carry", "residual") and config.carry is None and stage == "reference":
            continue
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
