"""`rcd demo`: the mechanism on a small model, without and with residual context."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rcd.decode.events import Event

PROMPT = "the old fox finds a box near the river and"


def demo(
    prompt: Annotated[str, typer.Option(help="Words for the model to go on from.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 64,
    threshold: Annotated[float, typer.Option(help="Commit every token above this confidence.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    pause: Annotated[float, typer.Option(min=0, help="Seconds to rest after each step, in a terminal.")] = 0.25,
    save: Annotated[Path | None, typer.Option(help="Write the demo's model to this folder and leave.")] = None,
) -> None:
    """Watch a small random model decode, without and with residual context."""
    from rich.console import Console
    from rich.table import Table

    from rcd.api import Pipeline
    from rcd.cli.live import SHADES, follow
    from rcd.decode.config import DecodeConfig
    from rcd.models.toy import WORDS, toy, toy_tokenizer

    vocab = len(WORDS) + 7
    model = toy("sdar", seed=seed, spread=6.0, vocab=vocab, width=128, layers=4, block_length=32)
    model.tokenizer = toy_tokenizer(vocab)
    pipeline, console = Pipeline(model), Console()
    if save is not None:
        pipeline.save(save)
        console.print(f"The random model is in {save}; try: rcd generate 'the old fox' --model {save} --carry residual")
        return
    configs = {
        carry: DecodeConfig(max_new_tokens=max_new_tokens, threshold=threshold, carry=carry, eos_suppression="logits")
        for carry in ("none", "residual")
    }
    ids = pipeline.encode(prompt)
    console.print(
        "[bold]Residual Context Diffusion[/bold]: the mechanism on a 4-layer model.\n"
        "[yellow]Its weights are random, so the words mean nothing and neither way is better here:[/yellow] no trained "
        "model is bundled yet. What you see is how decoding goes: every step predicts all masks, commits the confident "
        "ones, and (RCD) keeps the rest as residual context.\n"
    )
    rest = pause if sys.stdout.isatty() else 0.0
    results = {}
    for name, carry, words in (
        ("SeqD", "none", f"SeqD: the other predictions are thrown away; a mask is a plain mask ({SHADES[0]})."),
        ("RCD", "residual", f"RCD: a mask carries its last prediction, shaded by its weight alpha ({SHADES[1:]})."),
    ):
        console.print(f"[bold]{words}[/bold]")
        console.print(prompt, style="dim", highlight=False, markup=False)
        began = time.perf_counter()
        done = follow(pipeline, _slowly(pipeline.stream(ids, configs[carry]), rest), console)
        results[name] = pipeline.generation(done, time.perf_counter() - began)
        if not sys.stdout.isatty():
            console.print(results[name].text, highlight=False)
        console.print()
    table = Table(box=None, pad_edge=False, title="Counted (random weights: no comparison)", title_justify="left")
    for column in ("", "tokens", "denoising steps", "forwards"):
        table.add_column(column, justify="left" if not column else "right")
    for name, r in results.items():
        table.add_row(name, *map(str, (r.tokens, r.denoising_steps, r.forwards)))
    console.print(table)
    console.print(
        "\nNext: [bold]rcd demo --save DIR[/bold] writes this model; [bold]rcd generate --help[/bold] says how to "
        "decode it, or a checkpoint of your own."
    )


def _slowly(events: Iterator[Event], rest: float) -> Iterator[Event]:
    for event in events:
        yield event
        time.sleep(rest)
