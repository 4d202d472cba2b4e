"""`rcd generate`: decode one prompt, with a live view in a terminal, plain text in a pipe, or one JSON object."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from rcd.cli import options as opt
from rcd.cli.flags import ALL, Given, decoding, flag_of
from rcd.cli.notes import note, note_unknown, note_window, unknown_words

if TYPE_CHECKING:
    from rcd.api import Generation


@decoding(ALL, carry=True)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    carry: Annotated[
        str | None,
        typer.Option(
            help="rcd list carry, or NAME,setting=value,...; by default what rcd.json says.", rich_help_panel=opt.CARRY
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="A reference checkpoint (for --start reference).", rich_help_panel=opt.CARRY)
    ] = None,
    *,
    decoding: Given,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Wrap the prompt in the chat template, if there is one.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is token ids, separated by spaces or commas.")] = False,
    as_json: opt.Json = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    threads: opt.Threads = None,
    family: opt.Family = None,
    mask_token_id: opt.MaskId = None,
    eos_token_id: opt.EosId = None,
    attention: opt.Attention = None,
    shift: opt.Shift = None,
    revision: opt.Revision = None,
) -> None:
    """Decode PROMPT with a diffusion language model."""
    from rcd.api import load
    from rcd.models.threads import limit_threads

    question = sys.stdin.read() if prompt == "-" else prompt
    asked = decoding.config()  # flags are checked before a large model is read
    if carry is None or not carry.startswith(opt.TRAINED):
        decoding.chosen(carry, None)
    tokens = _parse_ids(question) if ids else None

    pipeline = load(
        model, device=device, dtype=dtype, family=family, revision=revision, mask_token_id=mask_token_id,
        eos_token_ids=eos_token_id or None, attention=attention, shift=shift,
    )  # fmt: skip
    second = load(reference, device=device, dtype=dtype) if reference else None
    limit_threads([pipeline, second], threads)
    chosen, idle = decoding.chosen(carry, pipeline.checkpoint.rcd.carry)
    encoded = pipeline.encode(tokens if tokens is not None else question, chat)
    config = pipeline.resolve(replace(asked, carry=chosen), len(encoded[0]))
    if pipeline.untrained:
        note(f"{model} is a causal model, not trained for diffusion; its text means nothing")
    note_window(model, config.window, pipeline.settings.attention, pipeline.checkpoint.rcd.provenance)
    if idle:
        note(f"{', '.join(map(flag_of, idle))}: no effect with --carry none")
    if second is not None and not config.travelling.needs_reference:
        note("--reference: no effect without --start reference or --source reference")
    if tokens is None:
        note_unknown(unknown_words([question], pipeline.tokenizer), "the answer may be nonsense")

    if as_json:
        result = pipeline.generate(encoded, config, reference=second).results[0]
        print(json.dumps(result.to_dict(pipeline.token_text), ensure_ascii=False))
        _note_empty(result)
        return

    if config.logprobs is not None:
        note("--logprobs: shown with --json alone")
    from rcd.cli.live import follow, summary

    began = time.perf_counter()
    done = follow(pipeline, pipeline.stream(encoded, config, reference=second), most=config.travelling.strongest)
    result = pipeline.generation(done, time.perf_counter() - began)
    if not sys.stdout.isatty():
        print(result.text)
    _note_empty(result)
    print(summary(result), file=sys.stderr)


def _note_empty(result: Generation) -> None:
    if not result.text.strip():
        why = "ended its text at once" if result.tokens <= 1 else "wrote tokens without text"
        note(f"the answer is empty: the model {why}")


def _parse_ids(text: str) -> list[int]:
    from rcd.errors import RCDError

    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise RCDError("--ids takes whole numbers separated by spaces or commas, such as '12 7 99'.") from error
