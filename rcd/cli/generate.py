"""`rcd generate`: decode one prompt, with a live view in a terminal, plain text in a pipe, or one JSON object."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from rcd import blanks
from rcd.cli import options as opt
from rcd.cli.flags import ALL, Given, decoding, flag_of
from rcd.cli.notes import note, note_empty, note_model, note_rule, note_unknown, unknown_words
from rcd.errors import RCDError
from rcd.terminal import neutral_json

BATCH = "Batch"


@decoding(ALL, carry=True)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
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
    canvas: Annotated[
        str | None,
        typer.Option(
            help="The answer's beginning with tokens given: a text with [MASK] or [MASK:12] where they are wanted "
            "(with --ids, token ids); its words come first where there is no PROMPT."
        ),
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Wrap the prompt in the chat template, if there is one.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is token ids, separated by spaces or commas.")] = False,
    as_json: opt.Json = False,
    input: Annotated[
        str | None,
        typer.Option(
            help="Instead of PROMPT: a JSONL file of prompts (docs/batch.md); - is a pipe.", rich_help_panel=BATCH
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", help="The file of the answers; the same one goes on; - is a pipe.", rich_help_panel=BATCH
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows at once, on a GPU.", rich_help_panel=BATCH)] = 32,
    ray: Annotated[
        bool, typer.Option("--ray", help="Over the Ray cluster of RAY_ADDRESS.", rich_help_panel=BATCH)
    ] = False,
    actors: Annotated[
        int | None,
        typer.Option(help="With --ray: models held; by default one a GPU, else one a machine.", rich_help_panel=BATCH),
    ] = None,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
    threads: opt.Threads = None,
    family: opt.Family = None,
    mask_token_id: opt.MaskId = None,
    eos_token_id: opt.EosId = None,
    attention: opt.Attention = None,
    shift: opt.Shift = None,
    revision: opt.Revision = None,
) -> None:
    """Decode PROMPT, or a file of prompts, with a diffusion language model."""
    overrides: dict[str, Any] = dict(
        family=family, revision=revision, mask_token_id=mask_token_id, eos_token_ids=eos_token_id or None,
        attention=attention, shift=shift,
    )  # fmt: skip
    if input is not None or output is not None or ray:
        given, answers = _batch_files(prompt, input, output, ids, as_json, canvas)
        from rcd.batch.running import Source
        from rcd.cli.batch import Batch, run

        source = Source(model, reference, device, dtype, threads, overrides, quantize)
        run(Batch(given, answers, source, decoding, carry, chat, batch, ray, actors))
        return
    if prompt is None and canvas is None:
        raise RCDError("there is no prompt; give one, or a file of prompts with --input.")

    from rcd.api import load
    from rcd.models.threads import limit_threads

    question = _read() if prompt == "-" else prompt
    if not question and canvas is not None:
        question = None  # the canvas has it
    asked = decoding.config()  # flags are checked before a large model is read
    if carry is None or not carry.startswith(opt.TRAINED):
        decoding.chosen(carry, None)
    tokens = parse_ids(question) if ids and question is not None else None

    pipeline = load(model, device=device, dtype=dtype, quantize=quantize, **overrides)
    second = load(reference, device=device, dtype=dtype, quantize=quantize) if reference else None
    limit_threads([pipeline, second], threads)
    chosen, idle = decoding.chosen(carry, pipeline.checkpoint.rcd.carry)
    layout: Any = canvas
    if ids and canvas is not None:
        facts = pipeline.settings
        layout = blanks.read(canvas, lambda ids, _: parse_ids(ids), facts.mask_token_id, facts.context_length)
    encoded, canvases = pipeline.encode_both(tokens if tokens is not None else question, chat, layout)
    config = pipeline.resolve(replace(asked, carry=chosen), len(encoded[0]), len(canvases[0]))
    note_model(model, pipeline, config.window)
    if idle:
        note(f"{', '.join(map(flag_of, idle))}: no effect with --carry none")
    note_rule(decoding.values, config.commit)
    if second is not None and not config.travelling.needs_reference:
        note("--reference: no effect without --start reference or --source reference")
    if not ids:
        _note_words(question, canvas, pipeline.tokenizer)

    if as_json:
        result = pipeline.generate(encoded, config, reference=second, canvas=canvases).results[0]
        print(neutral_json(json.dumps(result.to_dict(pipeline.token_text), ensure_ascii=False)))
        note_empty(result)
        return

    if config.logprobs is not None:
        note("--logprobs: shown with --json alone")
    from rcd.cli.live import Stopped, follow, summary

    began = time.perf_counter()
    events = pipeline.stream(encoded, config, reference=second, canvas=canvases)
    try:
        before = encoded[0] if question is None else ()
        done = follow(pipeline, events, most=config.travelling.strongest, canvas=canvases[0], before=before)
    except Stopped as stopped:
        raise opt.Interrupted(stopped.told) from stopped
    result = pipeline.generation(done, time.perf_counter() - began)
    note_empty(result)
    print(summary(result), file=sys.stderr)


def _note_words(question: str | None, canvas: str | None, tokenizer: Any) -> None:
    """What the model cannot know of what it is asked."""
    words = [] if question is None else [question]
    if question is not None and any(not found[1] for found in blanks.MASK.finditer(question)):
        note("[MASK] in a prompt is text like any other; give masks with --canvas")
    if canvas is not None:
        words += blanks.Spelling(tokenizer).contexts(canvas)
    note_unknown(unknown_words(words, tokenizer), "the answer may be nonsense")


def _batch_files(
    prompt: str | None, input: str | None, output: str | None, ids: bool, as_json: bool, canvas: str | None
) -> tuple[str, str]:
    if prompt is not None:
        raise RCDError("a prompt and --input, --output or --ray exclude one another; leave the prompt out.")
    if canvas is not None:
        raise RCDError("--canvas is for a single prompt; a line of --input has a canvas of its own.")
    if input is None or output is None:
        raise RCDError("a batch needs both --input and --output; - stands for a pipe.")
    if ids or as_json:
        flag = "--ids" if ids else "--json"
        raise RCDError(f"{flag} is for a single prompt; the lines of --input and --output are JSON anyway.")
    return input, output


def _read() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RCDError("what standard input holds is no text in UTF-8; give a text.") from error


def parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise RCDError("--ids takes whole numbers separated by spaces or commas, such as '12 7 99'.") from error
