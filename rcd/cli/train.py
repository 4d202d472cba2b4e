"""`rcd train`: both stages of Algorithm 1, or one of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.errors import RCDError, one_of
from rcd.jsons import guessed
from rcd.terminal import show

if TYPE_CHECKING:
    from rcd.train.config import TrainConfig

STAGES = ("base", "reference", "target", "all")


def train(
    recipe: Annotated[str, typer.Argument(help="A name (rcd list recipe) or a YAML file.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The run's folder.")] = None,
    stage: Annotated[str, typer.Option(help="base, reference, target or all.")] = "all",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value; STAGE.key=value for one stage alone."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="An existing model as the reference; stage 1 is skipped.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and leave.")] = False,
    device: opt.Device = "auto",
) -> None:
    """Train a recipe: stage 1 (the reference) and stage 2 (the target on its residuals), after a base if it has one."""
    from rcd.recipes.base import find

    one_of("stage", stage, STAGES)
    found = find(recipe)
    written = {"base": found.base, "reference": found.reference, "target": found.target}
    configs = {name: config.with_settings(_parsed(settings or [], name, config)) for name, config in written.items()
               if config is not None}  # fmt: skip
    _check_stages(settings or [], list(configs))
    target = configs.get("target")
    if target is not None and target.model == "base" and "base" not in configs:
        raise RCDError(f"the recipe {found.name} has no base, so model=base means nothing; name a checkpoint.")
    reference = reference or (target.reference if target else None)
    wanted = {
        "base": target is not None and target.model == "base",
        "reference": stage == "reference" or (reference is None and (target is None or target.needs_reference)),
        "target": True,
    }
    stages = {name: config for name, config in configs.items() if stage in (name, "all") and wanted[name]}
    if not stages:
        raise RCDError(f"the recipe {found.name} has no stage {stage!r} to train here.")
    if dry_run:
        from rcd.train.plan import plan

        for name, config in stages.items():
            show("\n".join(plan(name, config, base=configs.get("base"))))
        return
    if output is None:
        raise RCDError("name the run's folder with --output.")
    from rcd.train.run import run

    with opt.keeping(f"what was saved is in {output}, and --resume goes on from it"):
        run(stages, output, reference, resume, device)
    _leave()


def _leave() -> None:
    """One of several processes ends here, its work done: gloo's threads may still be closing, and now and then they
    abort an interpreter that takes itself apart meanwhile, which a launcher would report as a failed run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _check_stages(settings: list[str], stages: list[str]) -> None:
    """A setting that is given for one stage needs a recipe that has it."""
    for text in settings:
        which = text.partition("=")[0].partition(".")[0]
        if which in STAGES and which not in stages:
            raise RCDError(f"--set {text}: the recipe has no stage {which!r}; it has: {', '.join(stages)}.")


def _parsed(settings: list[str], stage: str, config: TrainConfig) -> dict[str, Any]:
    """--set key=value; a value is JSON where it can be, else a text. A stage without a carry passes over settings of it
    that were not given for that stage by name."""
    out: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise RCDError(f"--set takes key=value, not {text!r}.")
        which, _, rest = key.partition(".")
        if which in ("base", "reference", "target") and rest:
            if which != stage:
                continue
            key = rest
        elif which in ("carry", "residual") and config.carry is None and stage != "target":
            continue
        out[key] = guessed(value)
    return out


def _main() -> None:
    """So that `accelerate launch -m rcd.cli.train` works, too."""
    from rcd.cli.main import main

    sys.argv.insert(1, "train")
    main()


if __name__ == "__main__":
    _main()
