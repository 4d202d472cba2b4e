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
SHAPES = "sdar-8b, sdar-4b, sdar-1.7b, llada-8b, sdar-tiny"


@app.command()
def decode(
    shape: Annotated[
        str, typer.Option(help=f"{SHAPES} (random weights), a checkpoint's path or bundled:NAME.")
    ] = "sdar-8b",
    block_length: Annotated[int, typer.Option()] = 32,
    batch: Annotated[int, typer.Option(help="Rows decoded together.")] = 1,
    prefix: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1024,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens that a step commits.")] = 4,
    blocks: Annotated[int, typer.Option(help="Blocks that are decoded.")] = 4,
    window: Annotated[str | None, typer.Option(help="blockwise or d2f (SDAR); dual, prefix or d2f (LLaDA).")] = None,
    carry: Annotated[str | None, typer.Option(help="none or residual; by default both.")] = None,
    delta: Annotated[str | None, typer.Option(help="Of the residual: exact or kept; by default both.")] = None,
    growth: Annotated[
        str, typer.Option(help="none, or a row for each size: batch (1-128) or prefix (64-16,384).")
    ] = "none",
    stock: Annotated[bool, typer.Option("--stock", help="Also time the stock eager forward of a block.")] = False,
    repeats: Annotated[int, typer.Option(help="Runs, of which the median counts.")] = 3,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Milliseconds of a decoding step, SeqD and RCD in the same run, against what the memory allows.

    Commits are scripted, so that random weights do the work of trained ones; prefill is not timed.
    """
    from rcd.bench import decode as bench
    from rcd.bench.shapes import model_for, settings_of
    from rcd.models.checkpoint import pick_device

    # everything is checked before a large model is made
    whole("repeats", repeats, least=1)
    check_output(output)
    one_of("growth", growth, bench.GROWTH)
    chosen, place, settings = bench.methods(carry, delta), pick_device(device), settings_of(shape)
    usual = "blockwise" if settings.attention == "block_causal" else "dual"
    load = bench.Workload(block_length, batch, prefix, tokens_per_step, blocks, window or usual)
    load.check(settings)
    warn_of_cpu(place)
    if place.type != "cuda" and shape in SHAPES.split(", ")[:-1]:
        note(f"a model of the size of {shape} takes minutes and much memory on a CPU; --shape sdar-tiny takes seconds")
    model = model_for(shape, place, dtype)
    points, speed = list(load.grown(growth, settings)), bench.bandwidth(place)
    if not as_json:
        print(f"{about(shape, model, place)}; block {block_length}, {tokens_per_step} tokens a step, {blocks} blocks")
        print(f"copy bandwidth {speed / 1e9:,.0f} GB/s; a step must read the weights and the cache")
    figures: list[Any] = []
    for point in points:
        try:
            found = bench.compare(model, point, chosen, speed, repeats, stock)
        except RCDError as error:
            if len(points) == 1:
                raise
            note(f"batch {point.batch}, prefix {point.prefix}: {error}")
            continue
        if not as_json:
            print("\n".join(bench.lines(found)[bool(figures) :]), flush=True)
        figures += found
    finish(
        {
            "shape": shape, "device": device_name(place), "dtype": str(model.codebook.dtype).removeprefix("torch."),
            "window": load.window, "block_length": block_length, "tokens_per_step": tokens_per_step, "blocks": blocks,
            "repeats": repeats, "bandwidth_gb_per_s": round(speed / 1e9, 1), "torch": torch_version(),
            "rows": [figure.to_json() for figure in figures],
        },
        as_json, output,
    )  # fmt: skip


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
    count = sum(parameter.numel() for parameter in model.parameters())
    size = f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"
    return f"{shape}, {size} parameters, {str(model.codebook.dtype).removeprefix('torch.')} on {device_name(place)}"


def device_name(place: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(place) if place.type == "cuda" else str(place)


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
