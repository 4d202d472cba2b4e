"""The application that `serve deploy` puts on a cluster: replicas, and a front that answers HTTP behind Ray's proxy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rcd.api import Pipeline
from rcd.carry.parse import parse_carry
from rcd.decode.config import DecodeConfig
from rcd.errors import unknown_name
from rcd.serve.cluster import actor_options, application, fitting
from rcd.serve.keys import read_keys
from rcd.serve.loading import BUNDLED, Models, named
from rcd.serve.replica import DEPLOYMENT
from rcd.serve.server import log_to_stderr
from rcd.serve.settings import RaySettings, ServeSettings
from rcd.settings import entries

FRONT = "Front"
PLACED = ("device", "dtype", "revision")
OWN = ("models", "decode", "threads", "api_key_file", *PLACED)
PROXYS = ("host", "port", "ray_address", "ray_app")
"""Settings that are Ray's here: the proxy's `http_options`, and the name that the config file gives."""


@dataclass(frozen=True)
class Defaults:
    """The defaults of a model's requests, from the config file."""

    base: DecodeConfig
    carry: str | None

    def __call__(self, pipeline: Pipeline) -> DecodeConfig:
        if self.carry is None:
            return self.base
        return replace(self.base, carry=parse_carry(self.carry, pipeline.checkpoint.rcd.carry))


def read(args: Mapping[str, Any]) -> tuple[Models, ServeSettings, RaySettings]:
    """What a config file's `args` say, checked."""
    serving, placing = ({entry.name for entry in entries(one)} - {*PROXYS} for one in (ServeSettings, RaySettings))
    for name in args:
        if name not in serving | placing | {*OWN}:
            raise unknown_name("argument of the application", name, [*OWN, *sorted(serving | placing)])
    decode = dict(args.get("decode") or {})
    carry = decode.pop("carry", None)
    models = Models(
        named(args.get("models") or [f"bundled:{name}" for name in BUNDLED]), Defaults(DecodeConfig(**decode), carry),
        {name: args[name] for name in PLACED if name in args}, threads=args.get("threads"),
    )  # fmt: skip
    settings = ServeSettings(**{name: value for name, value in args.items() if name in serving})
    given = {name: value for name, value in args.items() if name in placing}
    if "replicas" in given:
        given["replicas"] = str(given["replicas"])
    return models, settings, RaySettings(**given)


def build(args: Mapping[str, Any]) -> Any:
    """Runs once, on a machine of the cluster, when the config file is deployed."""
    import ray
    from ray import serve

    from rcd.serve.ray import RayService, replicas_running

    models, settings, placing = read(args)
    have = ray.cluster_resources() if ray.is_initialized() else {}
    options = actor_options(placing, bool(have.get("GPU")))
    replicas = application(models, settings, placing, options, max(1, fitting(options, have)))
    file = args.get("api_key_file")

    def front() -> Any:
        from rcd.serve.app import create_app

        if settings.access_log:
            log_to_stderr()
        name = serve.get_replica_context().app_name
        service = RayService(settings, lambda: replicas_running(name)).begin(serve.get_deployment_handle(DEPLOYMENT))
        return create_app(service, settings, read_keys(file=None if file is None else Path(file)))

    return serve.deployment(serve.ingress(front)(), name=FRONT).options(
        max_ongoing_requests=settings.max_queue + 100_000, ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.drain + 5, health_check_period_s=placing.health_period,
        health_check_timeout_s=placing.health_timeout, logging_config={"enable_access_log": False},
    ).bind(replicas)  # fmt: skip
