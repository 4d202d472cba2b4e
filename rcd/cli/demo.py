"""`rcd demo`: the mechanism on a small model, without and with residual context."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

PROMPT = "the old fox finds a box near the river and"


def demo(
    prompt: Annotated[str, typer.Option(help="Words for the model to go on from.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 64,
    threshold: Annotated[float, typer.Option(help="Commit every token above this confidence.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    pause: Annotated[float, typer.Option(help="Seconds to rest after each step, in a terminal.")] = 0.08,
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
        config = DecodeConfig(max_new_tokens=max_new_tokens, threshold=threshold, carry=carry, eos_suppression="logits")
        console.print(f"[bold]{words}[/bold]")
        console.print(f"[dim]{prompt}[/dim]", highlight=False)
        began, spent = time.perf_counter(), 0.0

        def slowly(events):  # type: ignore[no-untyped-def]
            nonlocal spent
            for event in events:
                yield event
                time.sleep(rest)
                spent += rest

        done = follow(pipeline, slowly(pipeline.stream(prompt, config)), console)
        results[name] = pipeline.generation(done, time.perf_counter() - began - spent)
        if not sys.stdout.isatty():
            console.print(results[name].text, highlight=False)
        console.print()
    table = Table(box=None, pad_edge=False)
    for column in ("", "tokens", "denoising steps", "tokens a step", "forwards", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    for name, r in results.items():
        numbers = (r.tokens, r.denoising_steps, f"{r.tokens_per_step:.2f}", r.forwards, f"{r.seconds:.2f}")
        table.add_row(name, *map(str, numbers))
    console.print(table)
    console.print("\nNext: [bold]rcd generate --help[/bold] decodes a checkpoint of your own; the README has examples.")
