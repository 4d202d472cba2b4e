"""`rcd generate`: decode one prompt, with a live view in a terminal, plain text in a pipe, or one JSON object."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from rcd.cli import options as opt
from rcd.cli.notes import note, note_unknown, note_window, unknown_words

if TYPE_CHECKING:
    from rcd.api import Generation


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: opt.Model = opt.DEFAULT_MODEL,
    carry: Annotated[
        str | None, typer.Option(help="rcd list carry; by default what rcd.json says.", rich_help_panel=opt.CARRY)
    ] = None,
    alpha: Annotated[
        str | None, typer.Option(help="The residual's weight: rcd list alpha.", rich_help_panel=opt.CARRY)
    ] = None,
    alpha_scale: Annotated[float | None, typer.Option(help="Multiplies alpha.", rich_help_panel=opt.CARRY)] = None,
    alpha_most: Annotated[float | None, typer.Option(help="The largest alpha.", rich_help_panel=opt.CARRY)] = None,
    alpha_value: Annotated[float | None, typer.Option(help="Of --alpha fixed.", rich_help_panel=opt.CARRY)] = None,
    start: Annotated[
        str | None, typer.Option(help="zero (cold), dirichlet, self, reference (warm).", rich_help_panel=opt.CARRY)
    ] = None,
    concentration: Annotated[
        float | None, typer.Option(help="Of --start dirichlet.", rich_help_panel=opt.CARRY)
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="A reference checkpoint (for --start reference).", rich_help_panel=opt.CARRY)
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="reference: the reference gives the residual at every step.", rich_help_panel=opt.CARRY),
    ] = None,
    t_res: Annotated[float | None, typer.Option(help="Residual temperature.", rich_help_panel=opt.CARRY)] = None,
    t_res_on: Annotated[str | None, typer.Option(help="alpha or both.", rich_help_panel=opt.CARRY)] = None,
    t_res_at_start: Annotated[
        bool | None, typer.Option("--t-res-at-start", help="T_res in the start's residual.", rich_help_panel=opt.CARRY)
    ] = None,
    top1_alpha: Annotated[
        str | None, typer.Option(help="The weight under --alpha top1.", rich_help_panel=opt.CARRY)
    ] = None,
    carry_scope: Annotated[
        str, typer.Option(help="canvas or block (bidirectional models).", rich_help_panel=opt.CARRY)
    ] = "canvas",
    commit: Annotated[str, typer.Option(help="rcd list commit.", rich_help_panel=opt.COMMIT)] = "threshold",
    threshold: Annotated[float, typer.Option(help="In [0, 1].", rich_help_panel=opt.COMMIT)] = 0.85,
    factor: Annotated[float, typer.Option(help="Of --commit factor.", rich_help_panel=opt.COMMIT)] = 1.0,
    num_inference_steps: Annotated[
        int | None,
        typer.Option("--num-inference-steps", "--steps", help="At most so many a block.", rich_help_panel=opt.COMMIT),
    ] = None,
    block_length: Annotated[
        int | None, typer.Option(help="By default the checkpoint's.", rich_help_panel=opt.COMMIT)
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="rcd list window; by default the model's own.", rich_help_panel=opt.COMMIT)
    ] = None,
    settings_given: opt.Settings = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="The most to generate; by default what rcd.json says, else 256.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=opt.SAMPLING)] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=opt.SAMPLING)] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=opt.SAMPLING)] = 1.0,
    seed: Annotated[int, typer.Option(rich_help_panel=opt.SAMPLING)] = 0,
    eos_suppression: Annotated[
        str, typer.Option(help="none, logits or confidence (LLaDA).", rich_help_panel=opt.SAMPLING)
    ] = "none",
    eos_early_stop: Annotated[
        bool, typer.Option(help="Stop once the text is settled.", rich_help_panel=opt.SAMPLING)
    ] = True,
    confidence: Annotated[
        str | None, typer.Option(help="tempered or untempered; by default as the family.", rich_help_panel=opt.SAMPLING)
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Wrap the prompt in the chat template, if there is one.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is token ids, separated by spaces or commas.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    family: opt.Family = None,
    mask_token_id: opt.MaskId = None,
    eos_token_id: opt.EosId = None,
    attention: opt.Attention = None,
    shift: opt.Shift = None,
    revision: opt.Revision = None,
) -> None:
    """Decode PROMPT with a diffusion language model."""
    from rcd.api import load

    question = sys.stdin.read() if prompt == "-" else prompt
    common = dict(
        max_new_tokens=max_new_tokens, block_length=block_length, num_inference_steps=num_inference_steps,
        carry_scope=carry_scope, commit=commit, threshold=threshold, factor=factor, temperature=temperature,
        top_k=top_k, top_p=top_p, seed=seed, eos_suppression=eos_suppression, eos_early_stop=eos_early_stop,
        confidence=confidence, window=window,
    )  # fmt: skip
    settings = dict(
        alpha=alpha, alpha_scale=alpha_scale, alpha_most=alpha_most, alpha_value=alpha_value, start=start,
        concentration=concentration, source=source, t_res=t_res, t_res_on=t_res_on, t_res_at_start=t_res_at_start,
        top1_alpha=top1_alpha,
    )  # fmt: skip
    # flags are checked before a large model is read
    asked = opt.decode_settings(settings_given, common)
    opt.carry_of(carry, None, settings)
    tokens = _parse_ids(question) if ids else None

    pipeline = load(
        model, device=device, dtype=dtype, family=family, revision=revision, mask_token_id=mask_token_id,
        eos_token_ids=eos_token_id or None, attention=attention, shift=shift,
    )  # fmt: skip
    second = load(reference, device=device, dtype=dtype) if reference else None
    chosen, idle = opt.carry_of(carry, pipeline.checkpoint.rcd.carry, settings)
    encoded = pipeline.encode(tokens if tokens is not None else question, chat)
    config = pipeline.resolve(replace(asked, carry=chosen), len(encoded[0]))
    if pipeline.untrained:
        note(f"{model} is a causal model, not trained for diffusion; its text means nothing")
    note_window(model, config.window, pipeline.settings.attention, pipeline.checkpoint.rcd.provenance)
    if idle:
        flags = ", ".join("--" + name.replace("_", "-") for name in idle)
        note(f"{flags}: no effect with --carry none")
    if second is not None and not config.carry.needs_reference:  # type: ignore[union-attr]
        note("--reference: no effect without --start reference or --source reference")
    if tokens is None:
        note_unknown(unknown_words([question], pipeline.tokenizer), "the answer may be nonsense")

    if as_json:
        result = pipeline.generate(encoded, config, reference=second).results[0]
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        _note_empty(result)
        return

    from rcd.cli.live import follow, strongest, summary

    began = time.perf_counter()
    done = follow(pipeline, pipeline.stream(encoded, config, reference=second), most=strongest(config.carry))
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
