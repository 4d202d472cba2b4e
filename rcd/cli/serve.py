"""`rcd serve`: models behind an OpenAI-compatible API, with a page that shows how they denoise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcd.cli import options as opt
from rcd.cli.flags import ALL, Given, decoding, flag_of
from rcd.cli.notes import note
from rcd.errors import RCDError

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.decode.config import DecodeConfig

NEEDS = ("fastapi", "uvicorn", "httptools", "prometheus_client")
SETTINGS = {opt.SERVER: "rcd.serve.settings:ServeSettings", opt.RAY: "rcd.serve.settings:RaySettings"}


@decoding(ALL, carry=True, also=SETTINGS)
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
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Hold the models in replicas on a Ray cluster.", rich_help_panel=opt.RAY),
    ] = False,
    *,
    decoding: Given,
    also: dict[str, dict[str, Any]],
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
) -> None:  # fmt: skip
    """Serve models over HTTP: an OpenAI-compatible API, and a page at /."""
    check_extra()
    from rcd.serve.keys import read_keys
    from rcd.serve.settings import RaySettings, ServeSettings

    settings, placing = ServeSettings(**also[opt.SERVER]), RaySettings(**also[opt.RAY])
    if also[opt.RAY] and not ray:
        raise RCDError(f"{flag_of(next(iter(also[opt.RAY])))} is of a cluster; say --ray as well.")
    if ray and find_spec("ray") is None:
        raise RCDError("--ray needs Ray: pip install 'residual-context-diffusion[ray,serve]'.")
    keys, base = read_keys(api_key or (), api_key_file), decoding.config()
    from rcd.serve.loading import BUNDLED, Models, named
    from rcd.serve.server import run
    from rcd.serve.service import LocalService

    models = Models(
        named(model or [f"bundled:{name}" for name in BUNDLED]),
        Configured(base, decoding, carry),
        dict(device=device, dtype=dtype, revision=revision, quantize=quantize),
        dict(
            family=family, mask_token_id=mask_token_id, eos_token_ids=eos_token_id or None, attention=attention,
            shift=shift,
        ),
        threads,
    )  # fmt: skip
    if not ray:
        service = LocalService(settings=settings)
        run(service, settings, keys, lambda: models.load_into(service, note))
        return
    from rcd.serve.cluster import Cluster

    cluster = Cluster(settings, placing)
    try:
        cluster.join()
        run(cluster.service, settings, keys, lambda: cluster.begin(models, note))
    finally:
        cluster.close()


@dataclass(frozen=True)
class Configured:
    """The defaults of a model's requests, from the command line; it may travel."""

    base: DecodeConfig
    decoding: Given
    carry: str | None

    def __call__(self, pipeline: Pipeline) -> DecodeConfig:
        from rcd.models import bundled

        base, checkpoint = self.base, pipeline.checkpoint
        if bundled.holds(checkpoint.folder) and "threshold" not in self.decoding.values:
            base = replace(base, threshold=opt.BUNDLED_THRESHOLD)
        return config_of(base, self.decoding, self.carry, checkpoint.rcd.carry)


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
