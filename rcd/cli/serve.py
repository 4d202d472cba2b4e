"""`rcd serve`: models behind an OpenAI-compatible API, with a page that shows how they denoise."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.flags import ALL, Given, decoding
from rcd.cli.notes import note
from rcd.errors import RCDError, reason

if TYPE_CHECKING:
    from rcd.decode.config import DecodeConfig

BUNDLED = ("words-rcd", "words-seqd", "sdar-rcd", "sdar-seqd", "llada-rcd", "llada-seqd")
NEEDS = ("fastapi", "uvicorn", "httptools", "prometheus_client")


@decoding(ALL, carry=True, also="rcd.serve.settings:ServeSettings")
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m",
            help="NAME=PATH, or a folder, a hub name, a .gguf file or bundled:NAME; may be repeated. By default the "
            "bundled pairs, without and with residual context.",
        ),
    ] = None,
    carry: Annotated[
        str | None,
        typer.Option(
            help="rcd list carry, or NAME,setting=value,...; by default what rcd.json says.", rich_help_panel=opt.CARRY
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="Let in who has this key; may be repeated. Others on this machine can see it: prefer RCD_API_KEY or "
            "--api-key-file.",
            rich_help_panel=opt.SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys, one a line.", rich_help_panel=opt.SERVER)
    ] = None,
    *,
    decoding: Given,
    also: dict[str, Any],
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    threads: opt.Threads = None,
    family: opt.Family = None,
    mask_token_id: opt.MaskId = None,
    eos_token_id: opt.EosId = None,
    attention: opt.Attention = None,
    shift: opt.Shift = None,
    revision: opt.Revision = None,
) -> None:  # fmt: skip
    """Serve models over HTTP: an OpenAI-compatible API, and a page at /."""
    check_extra()
    from rcd.serve.settings import ServeSettings

    settings, keys, base = ServeSettings(**also), read_keys(api_key or (), api_key_file), decoding.config()
    models = named(model or [f"bundled:{name}" for name in BUNDLED])

    from rcd.api import load
    from rcd.models.threads import limit_threads
    from rcd.serve.memory import check_room
    from rcd.serve.server import run
    from rcd.serve.service import LocalService

    service = LocalService(settings=settings)
    chosen: dict[str, Any] = dict(device=device, dtype=dtype, revision=revision)
    facts: dict[str, Any] = dict(
        family=family, mask_token_id=mask_token_id, eos_token_ids=eos_token_id or None, attention=attention, shift=shift
    )

    def loading() -> None:
        for name, source in models.items():
            check_room(name, source, **chosen)
            pipeline = load(source, **chosen, **facts)
            limit_threads([pipeline, *(one.pipeline for one in service.models.values())], threads)
            service.add(name, pipeline, config_of(base, decoding, carry, pipeline.checkpoint.rcd.carry))
            if pipeline.untrained:
                note(f"{name} is a causal model, not trained for diffusion; its text means nothing")

    run(service, settings, keys, loading)


def config_of(base: DecodeConfig, decoding: Given, carry: str | None, trained: dict[str, Any] | None) -> DecodeConfig:
    """The defaults of a model's requests. Flags of the residual carry alone change a model that has one."""
    if carry is None and trained is None:
        return base
    return replace(base, carry=decoding.chosen(carry, trained)[0])


def check_extra() -> None:
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise RCDError(
            f"rcd serve needs {', '.join(missing)}; install the extra: pip install 'residual-context-diffusion[serve]'."
        )


def named(given: list[str]) -> dict[str, str]:
    """NAME=PATH, or a path that gives its name -> {name: path}."""
    models: dict[str, str] = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not equals or Path(text).exists():
            name, source = _name_of(text), text
        if not name or not source:
            raise RCDError(f"--model {text!r} should be a path, or NAME=PATH.")
        if not re.fullmatch(r"[\w./:@+-]{1,128}", name):
            raise RCDError(f"a model is named by letters, digits and . / : @ + - _, not {name!r}; take NAME=PATH.")
        if name in models:
            raise RCDError(f"two models are named {name!r}; name one of them otherwise with NAME=PATH.")
        models[name] = source
    return models


def _name_of(source: str) -> str:
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else source.removeprefix("bundled:")


def read_keys(given: Any, file: Path | None) -> list[str]:
    """From the environment, the file and the command line; each is let in."""
    keys = [key for key in os.environ.get("RCD_API_KEY", "").split(",") if key.strip()]
    if file is not None:
        try:
            keys += file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RCDError(f"{file} cannot be read as keys ({reason(error)}); give a file with one a line.") from error
    found = [key.strip() for key in (*keys, *given) if key.strip()]
    if not found and (file is not None or given or os.environ.get("RCD_API_KEY")):
        raise RCDError("a key was meant but none was given; write one into it, or leave it out.")
    bad = [key for key in found if not key.isascii() or not key.isprintable() or " " in key]
    if bad:
        raise RCDError("a key is of printable ASCII characters without spaces; make one with `openssl rand -hex 32`.")
    return found
