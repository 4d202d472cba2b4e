"""The command `rcd`. Bad input ends with one sentence and exit code 2, never with a traceback."""

from __future__ import annotations

import sys

import typer

from rcd.cli import (
    ablate,
    calibrate,
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
    sweep,
    train,
)
from rcd.errors import RCDError

app = typer.Typer(
    name="rcd",
    help="Residual Context Diffusion: decode diffusion language models with the predictions they would throw away.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("demo")(demo.demo)
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


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from rcd import __version__

        print(f"rcd {__version__}")
        raise typer.Exit


def main() -> None:
    try:
        app()
    except RCDError as error:
        print(f"rcd: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("rcd: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
