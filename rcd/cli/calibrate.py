"""`rcd calibrate`: the residual temperature at which a model's alpha is what training with a reference showed it."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from rcd.cli import evaluate as own
from rcd.cli import options as opt
from rcd.cli.ablate import Shots, beside, configured, items
from rcd.cli.flags import Given, decoding
from rcd.errors import RCDError, one_of, whole
from rcd.evaluate.wording import counted, too_few
from rcd.terminal import show


@decoding("threshold", "max_new_tokens", max_new_tokens=opt.TASKS_LENGTH)
def calibrate(
    task: own.Task,
    model: opt.Model = opt.DEFAULT_MODEL,
    reference: Annotated[
        str | None, typer.Option(help="The model whose residuals were seen in training.", rich_help_panel=opt.CARRY)
    ] = None,
    carry: opt.CarryOf = opt.TRAINED,
    *,
    decoding: Given,
    masks: Annotated[
        str, typer.Option(help="undecided (predictions not above the threshold, on both sides) or all.")
    ] = "undecided",
    draws: Annotated[int, typer.Option(help="So many times every solution is masked.")] = 4,
    limit: own.Limit = None,
    path: own.TaskPath = None,
    shots: Shots = None,
    task_seed: own.TaskSeed = 0,
    batch: own.Batch = 32,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
    threads: opt.Threads = None,
) -> None:
    """Choose T_res (Sec. 3.3): match alpha in decoding to the reference's on randomly masked solutions."""
    one_of("--masks", masks, ("undecided", "all"))
    whole("draws", draws, least=1)
    whole("batch", batch, least=1)
    decoding.config()

    from rcd.api import load
    from rcd.carry.base import describe
    from rcd.carry.parse import parse_carry
    from rcd.evaluate import calibration
    from rcd.models.threads import limit_threads

    problems, length = items(task, limit, task_seed, path, shots)
    pipeline = load(model, device=device, dtype=dtype, quantize=quantize)
    config = configured(pipeline, decoding, length)
    base: Any = parse_carry(carry, pipeline.checkpoint.rcd.carry)
    own_t_res = describe(base).get("t_res")
    if own_t_res is None:
        raise RCDError(f"{model} carries no residual, which T_res is about; name one, such as --carry residual.")
    alone = calibration.own_training(pipeline)
    trained = {True: "its own predictions", False: "a reference", None: None}[alone]
    found: dict[str, Any] = {"model": model, "task": task, "trained_on": trained}
    if reference is None:
        if not alone:
            raise RCDError("calibration compares with the reference of the model's training; name it with --reference.")
        found["t_res"] = own_t_res
    else:
        second = beside(pipeline, reference, device, dtype, quantize)
        limit_threads([pipeline, second], threads, rows=min(batch, len(problems)))
        quiet = as_json or not sys.stderr.isatty()
        found["against"] = reference
        found |= calibration.calibrate(
            pipeline, second, problems, config, base, masks=masks, draws=draws, batch=batch,
            say=lambda text: None if quiet else show(text, sys.stderr),
        )  # fmt: skip
    if as_json:
        print(json.dumps(found))
        return
    if "after" in found:
        print("\n".join(calibration.lines(found)))
    print("\n".join(advice(found, own_t_res)))


def advice(found: dict[str, Any], trained: float) -> list[str]:
    """What to do with the result."""
    value = f"{found['t_res']:g}"
    if "after" not in found:
        return [
            f"T_res {value}: {found['model']} was trained on residuals of its own predictions with it, so there is no "
            "reference to match. --reference MODEL compares all the same."
        ]
    out = [
        f"T_res {value}, 95% interval {found['low']:g} to {found['high']:g} (bootstrap over "
        f"{counted(found['items'], 'item')})",
        f"to use it: rcd generate ... --t-res {value}, or rcd eval ... --carry trained,t_res={value}",
        f"does it help? rcd ablate --what t_res --grid {trained:g},{value} --model {found['model']} "
        f"--task {found['task']} --output DIR",
    ]
    out += too_few(found["items"])
    if found["trained_on"] == "its own predictions":
        out.append(
            f"{found['model']} was trained on residuals of its own predictions at T_res {trained:g}, not on a "
            "reference's: that is what it knows, and the match above is for comparison."
        )
    if found["at_the_edge"]:
        out.append("T_res lies at the edge of what is tried (0.25 to 4): the two distributions do not match.")
    return out
