"""The command `rcd`. Bad input ends with one sentence and exit code 2, never with a traceback; an interrupt
with one line and 130."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from rcd.cli import (
    ablate,
    bench,
    bench_serve,
    calibrate,
    chat,
    contamination,
    demo,
    evaluate,
    export,
    generate,
    info,
    listing,
    lm_eval,
    recall,
    reproduce,
    score,
    serve,
    sweep,
    train,
)
from rcd.cli.flags import completed
from rcd.cli.options import Interrupted, keeping
from rcd.errors import RCDError, out_of_memory, reason
from rcd.terminal import show


class Commands(TyperGroup):
    """Typer ends without a word where it sees a KeyboardInterrupt, so it sees none; and what should be a number is
    told in our words."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with keeping(""):
                return super().invoke(ctx)
        except typer.BadParameter as error:
            raise no_number(error) or error from error.__cause__

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, completed(str(name), command), rest


NUMBERS = {"float": "a number", "int": "a whole number"}


def no_number(error: Any) -> RCDError | None:
    """The sentence for a flag whose value is no number; None for any other error. Its cause is pydantic's."""
    for found in getattr(error.__cause__, "errors", list)():
        wanted = NUMBERS.get(found["type"].partition("_")[0])
        if wanted and error.param is not None:
            return RCDError(f"{error.param.opts[0]} should be {wanted}, not {found['input']!r}.")
    return None


app = typer.Typer(
    name="rcd",
    cls=Commands,
    help="Residual Context Diffusion: decode diffusion language models with the predictions they would throw away.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("score")(score.score)
app.command("serve")(serve.serve)
app.command("list")(listing.show)
app.command("info")(info.info)
app.command("eval")(evaluate.evaluate)
app.command("compare")(evaluate.compare)
app.command("sweep")(sweep.sweep)
app.command("ablate")(ablate.ablate)
app.command("calibrate")(calibrate.calibrate)
app.command("recall")(recall.recall)
app.command("reproduce")(reproduce.reproduce)
app.command("lm-eval")(lm_eval.lm_eval)
app.command("contamination")(contamination.contamination)
app.command("train")(train.train)
app.command("export")(export.export)
bench.app.command("serve")(bench_serve.serve)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from rcd import __version__

        print(f"rcd {__version__}")
        raise typer.Exit


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_closed() -> None:
    """A standard stream that the caller closed is an empty one: nothing to read, and what is written is nobody's. A
    file that is opened later would take its number, and what libraries print would go into that file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open as long as the process)


def drop_output() -> None:
    """What is still to be written cannot be; the interpreter would try it again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    open_closed()
    try:
        app()
    except RCDError as error:
        show(f"rcd: {error}", sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        print("rcd: there is not enough memory for this; take a smaller model, batch or length.", file=sys.stderr)
        sys.exit(2)
    except (Interrupted, KeyboardInterrupt) as error:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")  # over a moving line of progress
        show(f"rcd: interrupted{f'; {error}' if str(error) else ''}", sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        drop_output()
        sys.exit(1)
    except OSError as error:
        if error.filename is not None or error.errno not in FULL:
            raise
        drop_output()
        show(f"rcd: the output cannot be written ({reason(error)}); make room, or write it elsewhere.", sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
