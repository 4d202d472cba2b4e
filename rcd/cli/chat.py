"""`rcd chat`: turn by turn with a model, each answer shown as it is decoded."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from rcd.cli import options as opt
from rcd.cli.flags import ALL, Given, decoding
from rcd.cli.notes import note, note_empty, note_model, note_unknown, unknown_words
from rcd.cli.session import Quit, Session
from rcd.errors import RCDError
from rcd.terminal import show

PROMPT = "> "


@decoding(ALL, carry=True)
def chat(
    model: opt.Model = opt.DEFAULT_MODEL,
    carry: Annotated[
        str | None,
        typer.Option(
            help="rcd list carry, or NAME,setting=value,...; by default what rcd.json says.", rich_help_panel=opt.CARRY
        ),
    ] = None,
    *,
    decoding: Given,
    system: Annotated[str, typer.Option(help="A text that stands before the conversation.")] = "",
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    quantize: opt.Quantize = None,
    threads: opt.Threads = None,
    revision: opt.Revision = None,
) -> None:
    """Talk with a diffusion language model; /help lists what can be changed on the way."""
    from rcd.api import load
    from rcd.models import bundled
    from rcd.models.threads import limit_threads

    asked = decoding.config()  # flags are checked before a large model is read
    pipeline = load(model, device=device, dtype=dtype, quantize=quantize, revision=revision)
    if pipeline.tokenizer is None:
        raise RCDError("a chat is in text, and this checkpoint has no tokenizer; use rcd generate --ids.")
    limit_threads([pipeline], threads)
    chosen, _ = decoding.chosen(carry, pipeline.checkpoint.rcd.carry)
    session = Session(pipeline, asked, remembers=bool(getattr(pipeline.tokenizer, "chat_template", None)))
    session.take(carry=chosen)
    note_model(model, pipeline, pipeline.resolve(session.asked).window)
    if bundled.holds(pipeline.checkpoint.folder):
        note("the bundled models know problems worded like those of `rcd demo`, and nothing else")
    if not session.remembers:
        note(f"{model} has no chat template: each turn stands alone")
    if system:
        session.command(f"/system {system}")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # a byte that is no text does not end the chat
    if sys.stdin.isatty():
        show("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends.", sys.stderr)
    _talk(session)


def _talk(session: Session) -> None:
    while (line := _read()) is not None:
        text = line.strip()
        if not text:
            continue
        try:
            if text.startswith("/"):
                show(session.command(text), sys.stderr)
            else:
                _answer(session, text)
        except Quit:
            return
        except KeyboardInterrupt:  # of a turn, before or behind its decoding as well
            if not sys.stdin.isatty():
                raise
            show("stopped", sys.stderr)
        except RCDError as error:
            show(f"rcd: {error}", sys.stderr)


def _read() -> str | None:
    """The next line; None at the end. A half-typed line is dropped by Ctrl-C."""
    while True:
        try:
            if not sys.stdin.isatty():
                return sys.stdin.readline() or None
            if sys.stdout.isatty():
                import readline  # noqa: F401 (lines can be edited and called back)

                return input(PROMPT)
            print(PROMPT, end="", file=sys.stderr, flush=True)
            return sys.stdin.readline() or None
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print("\nCtrl-D or /quit ends the chat.", file=sys.stderr)


def _answer(session: Session, text: str) -> None:
    from rcd.cli.live import Stopped, follow, summary

    pipeline = session.pipeline
    ids = session.prompt(text)
    note_unknown(unknown_words([text], pipeline.tokenizer), "the answer may be nonsense")
    try:
        config = pipeline.resolve(session.asked, len(ids))
        began = time.perf_counter()
        done = follow(pipeline, pipeline.stream([ids], config), most=config.travelling.strongest)
    except Stopped as stopped:
        if stopped.text:
            session.keep(text, stopped.text)
        show(f"stopped; {stopped.told or 'nothing was committed yet'}", sys.stderr)
        if not sys.stdin.isatty():
            raise
        return
    except RCDError as error:
        if not session.turns:
            raise
        raise RCDError(f"{error} Or forget the turns so far: /clear.") from error
    result = pipeline.generation(done, time.perf_counter() - began)
    session.keep(text, result.text)
    note_empty(result)
    if sys.stderr.isatty():
        show(summary(result), sys.stderr)
