"""`rcd bench decode` and `rcd bench train`: what a step costs on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.notes import note
from rcd.errors import RCDError, one_of, unwritable, whole

if TYPE_CHECKING:
    import torch

app = typer.Typer(no_args_is_help=True, help="What a step of decoding or training costs on this machine.")

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON object to this file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]
LARGE = ("sdar-8b", "sdar-4b", "sdar-1.7b", "sdar-30b-a3b", "llada-8b", "llada2-mini", "llada2-flash")
SHAPES = ", ".join((*LARGE, "sdar-0.6b", "llada-0.3b", "sdar-tiny", "llada2-tiny"))


@app.command()
def decode(
    shape: Annotated[
        str, typer.Option(help=f"{SHAPES} (random weights), a checkpoint's path or bundled:NAME.")
    ] = "sdar-8b",
    block_length: Annotated[
        int | None, typer.Option(help="By default a checkpoint's own; of a shape 32, or 96 of a canvas of 128.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Rows decoded together, or several such numbers: 1,8.")] = "1",
    prefix: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the prompt. By default 1,024 (a GPU) or 128 (a CPU; 32 of a canvas of 128); of a bundled "
            "model that of real prompts."
        ),
    ] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="Tokens that a step commits; by default 4, if that divides a block.")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(help="Blocks that are decoded; by default 4, or a checkpoint's usual answer.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="blockwise or d2f (SDAR); bidirectional, dual, prefix or d2f (LLaDA). By default the family's own, "
            "but dual for LLaDA's shapes on a GPU."
        ),
    ] = None,
    carry: Annotated[str | None, typer.Option(help="none or residual; by default both.")] = None,
    delta: Annotated[str | None, typer.Option(help="Of the residual: exact or kept; by default both.")] = None,
    growth: Annotated[
        str, typer.Option(help="none, or a row for each size: batch (1-128) or prefix (64-16,384).")
    ] = "none",
    stock: Annotated[
        bool, typer.Option("--stock/--no-stock", help="Also time the stock eager loop over the same block or canvas.")
    ] = True,
    threads: Annotated[str | None, typer.Option(help="Of a CPU, or several such numbers: 1,2.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="On a CPU: rounds in which every method takes one step; by default 20, or 200 short ones."),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds of whole runs instead; on a GPU 3 by default.")] = None,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Also show the process's time, which other programs disturb less.")
    ] = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Milliseconds of a decoding step: the stock loop, SeqD and RCD in turns, against what the memory allows.

    Commits are scripted, so that random weights do the work of trained ones; prefill is not timed. Random weights are
    scaled until predictions are as sure as a language model's (a mean alpha near 0.15 at masks; the table has what was
    measured). `stock` is the forward of the block behind transformers' own cache, or of the whole canvas, with softmax
    and maximum; `stock loop` also commits by a threshold. Ratios are medians over rounds, with quartiles; milliseconds
    are this machine's.
    """
    from dataclasses import replace
    from itertools import product

    from rcd.bench import decode as bench
    from rcd.bench import limits, table
    from rcd.bench import workload as loads
    from rcd.bench.shapes import SHAPES as NAMED
    from rcd.bench.shapes import checkpoint_for, settings_of
    from rcd.models.checkpoint import pick_device

    # everything is checked before a large model is made
    for name, value in (("repeats", repeats), ("rounds", rounds)):
        if value is not None:
            whole(name, value, least=1)
    check_output(output)
    one_of("growth", growth, loads.GROWTH)
    loads.methods(carry, delta)
    place, settings = pick_device(device), settings_of(shape)
    if rounds is not None and (repeats is not None or place.type != "cpu"):
        raise RCDError("--rounds counts single steps, on a CPU; give either --rounds or --repeats, of whole runs.")
    plain = loads.usual(settings, shape in NAMED, place.type == "cuda", window)
    given = {"block_length": block_length, "prefix": prefix, "blocks": blocks}
    plain |= {name: value for name, value in given.items() if value is not None}
    step = tokens_per_step or loads.steps_of(plain["block_length"])
    load = loads.Workload(tokens_per_step=step, **plain)
    load.check(settings)
    sizes = [replace(load, batch=each) for each in numbers("--batch", batch)]
    counts = numbers("--threads", threads) if threads else [None]
    warn_of_size(shape, place)
    found = checkpoint_for(shape, place, dtype, quantize)
    model, chosen = found.model, loads.methods(carry, delta, found.rcd.carry)
    if prefix is None and shape not in NAMED:
        load = loads.real_prompts(found, load)
        load.check(settings)
        sizes = [replace(load, batch=each.batch) for each in sizes]
    speed = limits.bandwidth(place)
    if not as_json:
        what = f"block {load.block_length}, {step} tokens a step, {load.blocks} blocks, {load.window}"
        print(f"{about(shape, model, place)}; {what}")
        print(f"copy bandwidth {speed / 1e9:,.0f} GB/s; a step must read the weights and the cache")
    points = [
        replace(point, threads=count)
        for count, size in product(counts, sizes)
        for point in size.grown(growth, settings)
    ]
    figures: list[Any] = []
    for point in points:
        try:
            some = bench.compare(model, point, chosen, speed, repeats, rounds, stock)
        except RCDError as error:
            if len(points) == 1:
                raise
            note(f"batch {point.batch}, prefix {point.prefix}: {error}")
            continue
        if not as_json:
            print("\n".join(table.lines(some, cpu_time)[bool(figures) :]), flush=True)
        figures += some
    finish(
        {
            "shape": shape, "device": device_name(place), "dtype": str(model.codebook.dtype).removeprefix("torch."),
            "quantised": model.quantised, "weight_bytes": model.bytes,
            "window": load.window, "block_length": load.block_length, "tokens_per_step": step, "blocks": load.blocks,
            "repeats": repeats, "rounds": rounds, "bandwidth_gb_per_s": round(speed / 1e9, 1),
            "torch": torch_version(), "rows": [figure.to_json() for figure in figures],
        },
        as_json, output,
    )  # fmt: skip


def numbers(flag: str, text: str) -> list[int]:
    """Whole numbers, split by commas."""
    out = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise RCDError(f"{flag} should be a whole number, not {part.strip()!r}.")
        out.append(whole(flag.removeprefix("--"), int(part), least=1))
    return out


def warn_of_size(shape: str, place: torch.device) -> None:
    if place.type != "cuda" and shape in LARGE:
        note(f"a model of the size of {shape} takes minutes and much memory on a CPU; take sdar-0.6b or sdar-tiny")


@app.command()
def train(
    shape: Annotated[str, typer.Option(help=f"{SHAPES} (random weights).")] = "sdar-1.7b",
    reference: Annotated[str | None, typer.Option(help="The shape of RCD's reference; by default the same.")] = None,
    method: Annotated[str, typer.Option(help="seqd, rcd or both.")] = "both",
    length: Annotated[int, typer.Option(help="Tokens of a row, a quarter of them the prompt.")] = 2048,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 4,
    block_length: Annotated[int, typer.Option(help="Of SDAR's shapes.")] = 32,
    steps: Annotated[int, typer.Option(help="Steps that are timed, behind three that compile.")] = 8,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Recompute activations.")] = False,
    device: opt.Device = "auto",
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Milliseconds of a training step of both objectives, on random data, with the trainer's own step."""
    from rcd.bench import train as bench
    from rcd.models.checkpoint import pick_device

    one_of("method", method, bench.METHODS)
    check_output(output)
    place = pick_device(device)
    job = bench.Job(shape, reference, length, batch, block_length, steps, checkpointing)
    warn_of_cpu(place)
    figures = list(bench.compare(job, method, place))
    if not as_json:
        print(f"{shape} on {device_name(place)}; {batch} rows of {length:,} tokens, block {block_length}")
        print("\n".join(bench.lines(figures)))
    finish(
        {
            "shape": shape, "reference": reference or shape, "device": device_name(place), "length": length,
            "batch": batch, "block_length": block_length, "steps": steps, "checkpointing": checkpointing,
            "torch": torch_version(), "rows": [figure.to_json() for figure in figures],
        },
        as_json, output,
    )  # fmt: skip


def warn_of_cpu(place: torch.device) -> None:
    if place.type != "cuda":
        note("timings on a CPU say little: a small model there is bound by other things than a large one on a GPU")


def about(shape: str, model: Any, place: torch.device) -> str:
    count = model.size
    size = f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"
    dtype = str(model.codebook.dtype).removeprefix("torch.")
    dtype = f"{model.quantised} in {dtype}" if model.quantised else dtype
    return f"{shape}, {size} parameters, {dtype} on {device_name(place)}"


def device_name(place: torch.device) -> str:
    import torch

    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"{place} ({processor()})" if place.type == "cpu" else str(place)


def processor() -> str:
    """What a CPU is called, as far as it can be found out, and how wide its instructions are."""
    import os
    import platform

    import torch

    name = platform.processor() or platform.machine()
    told = Path("/proc/cpuinfo")
    if told.is_file():
        pairs = (line.partition(":") for line in told.read_text().splitlines())
        name = next((value.strip() for key, _, value in pairs if key.strip() == "model name"), name)
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def torch_version() -> str:
    import torch

    return str(torch.__version__)


def check_output(output: Path | None) -> None:
    if output is not None and output.is_dir():
        raise RCDError(f"--output is a file for the figures, and {output} is a folder; name a file in it.")


def finish(found: dict[str, Any], as_json: bool, output: Path | None) -> None:
    if as_json:
        print(json.dumps(found))
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritable("the figures", output, error, "give another file") from error
