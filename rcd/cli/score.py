"""`rcd score`: how likely continuations of a prompt are, or a file of them."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.flags import Given, decoding
from rcd.cli.notes import Unknown, note_model, note_unknown, unknown_words
from rcd.cli.progress import progress
from rcd.errors import RCDError
from rcd.terminal import neutral_json, show

if TYPE_CHECKING:
    from rcd.api import Pipeline, Score, ScoreConfig
    from rcd.batch.lines import Input

BATCH, LIKELIHOOD = "Batch", "Likelihood"
DOUBTFUL = "their figures may mean nothing"


@decoding(pairs=False, also={LIKELIHOOD: "rcd.likelihood.settings:ScoreConfig"})
def score(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; may be empty ('').")] = None,
    continuation: Annotated[
        list[str] | None, typer.Argument(help="What may follow it; of several, the likeliest is told first.")
    ] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    carry: opt.CarryOf = opt.TRAINED,
    *,
    decoding: Given,
    also: dict[str, dict[str, Any]],
    mean: Annotated[bool, typer.Option("--mean", help="Rank by the mean over tokens instead of their sum.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show every token's part.")] = False,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Wrap the prompt in the chat template, if there is one.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="All texts are token ids, parted by spaces or commas.")] = False,
    as_json: opt.Json = False,
    input: Annotated[
        str | None,
        typer.Option(help="Instead: a JSONL file (docs/evaluation.md); - is a pipe.", rich_help_panel=BATCH),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", help="The file of the records; the same one goes on; - is a pipe.", rich_help_panel=BATCH
        ),
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
    """Score CONTINUATION behind PROMPT: a lower bound of its log likelihood, in nats."""
    from rcd.batch.lines import Input
    from rcd.likelihood.settings import ScoreConfig

    config = ScoreConfig(carry=carry, **also[LIKELIHOOD])  # checked before a large model is read
    files = input is not None or output is not None
    if files:
        _check_files(prompt, input, output, as_json or ids or tokens or mean)
    elif prompt is None or not continuation:
        raise RCDError("give a prompt and at least one continuation, or a file of them with --input and --output.")
    given = Input(input) if input is not None else None

    from rcd.api import load
    from rcd.models.threads import limit_threads

    overrides: dict[str, Any] = dict(
        family=family, revision=revision, mask_token_id=mask_token_id, eos_token_ids=eos_token_id or None,
        attention=attention, shift=shift,
    )  # fmt: skip
    place = device if given is None else _place(device)
    pipeline = load(model, device=place, dtype=dtype, quantize=quantize, **overrides)
    limit_threads([pipeline], threads)
    if os.environ.get("RANK", "0") == "0":
        note_model(model, pipeline, pipeline.settings.window)
    if given is not None and output is not None:
        _files(pipeline, model, given, output, config, chat, overrides)
        return
    assert prompt is not None and continuation is not None
    _one(pipeline, model, prompt, continuation, config, chat, ids, as_json, mean, tokens)


def _check_files(prompt: str | None, input: str | None, output: str | None, other: bool) -> None:
    if prompt is not None:
        raise RCDError("a prompt and --input or --output exclude one another; leave the prompt out.")
    if input is None or output is None:
        raise RCDError("a file of texts needs both --input and --output; - stands for a pipe.")
    if other:
        raise RCDError(
            "--json, --ids, --tokens and --mean are for a single prompt; the lines of files are JSON anyway."
        )


def _place(device: str) -> Any:
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    return state.device if state.num_processes > 1 and device == "auto" else device


# -- one prompt ---------------------------------------------------------------------------------------------------


def _one(
    pipeline: Pipeline, model: str, prompt: str, continuations: list[str], config: ScoreConfig, chat: bool | None,
    ids: bool, as_json: bool, mean: bool, tokens: bool,
) -> None:  # fmt: skip
    from rcd import scoring
    from rcd.cli.generate import parse_ids

    texts: list[Any] = [prompt, *continuations]
    if ids:
        texts = [parse_ids(text) for text in texts]
    else:
        note_unknown(unknown_words(texts, pipeline.tokenizer), DOUBTFUL)
    pairs = [scoring.pair(pipeline, texts[0], each, chat) for each in texts[1:]]
    began, scores = time.perf_counter(), list[Any]()
    with progress(len(pairs), "continuations") if len(pairs) > 1 else nullcontext(lambda done, bad: None) as shown:
        for number, each in enumerate(pairs, 1):
            scores.append(scoring.score(pipeline, *each, config))
            shown(number, 0)
    order = scoring.ranked(scores, per_token=mean)
    if as_json:
        found = [{"continuation": continuations[k], **scores[k].to_dict()} for k in order]
        told = {"model": model, "prompt_tokens": len(pairs[0][0]), "scores": found}
        print(neutral_json(json.dumps(told | {"seconds": round(time.perf_counter() - began, 4)}, ensure_ascii=False)))
        return
    for k in order:
        show("\n".join([line(scores[k], continuations[k]), *(_parts(pipeline, scores[k]) if tokens else [])]))


def line(found: Score, text: str) -> str:
    """A score in a line: the bound, its error, the mean over tokens."""
    error = "" if found.standard_error is None else f" ± {found.standard_error:.3f}"
    error = " (exact bound)" if found.enumerated else error
    greedy = {None: "", True: "  greedy", False: "  not greedy"}[found.greedy]
    count = f"{len(found.ids)} token{'s' * (len(found.ids) != 1)}"
    return f"{found.log_likelihood:10.3f}{error}  {found.per_token:.3f} a token of {count}{greedy}  {text.strip()}"


def _parts(pipeline: Pipeline, found: Score) -> list[str]:
    known = [] if found.enumerated else found.token_errors or []
    errors = [f" ± {error:.3f}" for error in known] or [""] * len(found.ids)
    return [
        f"{value:14.3f}{error}  {pipeline.token_text(token) or token}"
        for token, value, error in zip(found.ids, found.tokens, errors, strict=True)
    ]


# -- files --------------------------------------------------------------------------------------------------------


def _files(
    pipeline: Pipeline, model: str, given: Input, output: str, config: ScoreConfig, chat: bool | None,
    overrides: dict[str, Any],
) -> None:  # fmt: skip
    """This process's share of the lines that have no record yet; the last process to end puts all in order."""
    from accelerate import PartialState

    from rcd.batch.lines import STREAM
    from rcd.batch.output import Output
    from rcd.batch.scoring import records, settings_of
    from rcd.cli.batch import kept, tell

    settings = settings_of(pipeline, model, config, chat, overrides)
    if output == STREAM or not given.again:
        _piped(pipeline, given, output, config, chat)
        return
    state, scan = PartialState(cpu=pipeline.model.device.type == "cpu"), given.scan()
    target = Output(output, settings, scan)
    if state.is_main_process:
        target.claim()
    state.wait_for_everyone()
    held = target.held()
    state.wait_for_everyone()  # before anyone writes
    mine = scan.without(held, state.process_index, state.num_processes)
    unknown = Unknown(pipeline.tokenizer)
    found = records(pipeline, given.at(mine.numbers, mine.offsets), config, chat, unknown.hear)
    outcome = kept(
        found, target, mine.count, held.count, process=state.process_index, speaks=state.is_main_process
    )  # fmt: skip
    unknown.note(DOUBTFUL)
    if outcome is not None:
        tell(outcome, output)


def _piped(pipeline: Pipeline, given: Input, output: str, config: ScoreConfig, chat: bool | None) -> None:
    from rcd.batch.output import Ordered
    from rcd.batch.scoring import records
    from rcd.cli.batch import stream_to, tell

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RCDError("several processes cannot share a pipe; name a file with --input and one with --output.")
    with stream_to(output) as out, progress(None) as shown:
        ordered, unknown = Ordered(out), Unknown(pipeline.tokenizer)
        with closing(records(pipeline, ordered.noted(given), config, chat, unknown.hear)) as found:
            for number, record in enumerate(found, 1):
                ordered.append(record)
                shown(number, len(ordered.bad))
    unknown.note(DOUBTFUL)
    tell(ordered.outcome(), output)
    sys.stdout.flush()
