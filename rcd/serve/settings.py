"""Settings of `rcd serve`: flags, the tables in the docs and the bounds of requests are made from them."""

from __future__ import annotations

import re

from rcd.errors import RCDError
from rcd.settings import entries, setting, settings


@settings
class ServeSettings:
    """What a server allows, and where it listens."""

    host: str = setting(default="127.0.0.1", help="The address to listen on; by default only this machine can connect.")
    port: int = setting(default=8000, help="0 takes a free one.", ge=0, le=65535)
    max_batch: int = setting(default=32, help="Requests that are decoded together.", ge=1, le=128)
    max_queue: int = setting(
        default=1024, help="Answers that may wait for a row; more are refused with 429.", ge=1, le=1_000_000
    )
    max_wait: float | None = setting(
        default=None, help="Seconds that an answer may wait for a row. None: as long as the request may take.", gt=0,
        le=86400,
    )  # fmt: skip
    timeout: float = setting(
        default=600.0,
        help="Seconds that a request may take in all; a client that reads nothing for so long is dropped.",
        gt=0, le=86400,
    )  # fmt: skip
    body_timeout: float = setting(
        default=30.0, help="Seconds in which a request's head must arrive, and then its body.", gt=0, le=86400
    )
    drain: float = setting(
        default=30.0, help="Seconds that running requests get to finish after SIGTERM or Ctrl-C.", ge=0, le=86400
    )
    cache_memory: int | None = setting(
        default=None,
        help="Bytes that the caches of one model may take; requests wait for room. None: as much as the rows need.",
        ge=1,
    )
    prefix_cache: int = setting(
        default=2**28,
        help="Bytes a model for the blocks of prompts that were read, for those that begin alike; 0 keeps none.", ge=0,
    )  # fmt: skip
    max_body: int = setting(default=1 << 20, help="Bytes of a request's body.", ge=1024, le=1 << 30)
    max_prompts: int = setting(default=64, help="Prompts in one request.", ge=1, le=4096)
    max_n: int = setting(default=16, help="Answers to each prompt (`n`).", ge=1, le=1024)
    most_tokens: int = setting(default=32768, help="New tokens that a request may ask for.", ge=1, le=2**31 - 1)
    max_messages: int = setting(default=1024, help="Messages in one chat.", ge=1, le=1_000_000)
    max_engines: int = setting(
        default=4, help="Different `rcd.t_res` or `rcd.alpha_scale` above 1 that are decoded at the same time.", ge=1,
        le=64,
    )  # fmt: skip
    drafts_kept: int = setting(
        default=8, help="Drafts that wait for a slow client; older ones are merged into the next.", ge=1, le=4096
    )
    heartbeat: float = setting(default=15.0, help="Seconds between comments in a silent stream.", gt=0, le=3600)
    cors_origin: tuple[str, ...] = setting(
        default=(), help="Origins whose web pages may call the API, such as https://example.org; `*` is all of them."
    )
    allow_host: tuple[str, ...] = setting(
        default=(),
        help="Names by which this server may be called, beside its address; asked only where there is no key.",
    )
    access_log: bool = setting(default=True, help="Write a line for every request to standard error.")
    log_prompts: bool = setting(default=False, help="Write the bodies of requests into the access log.")


@settings
class RaySettings:
    """How `rcd serve --ray` spreads models over a cluster. What follows from them (placement, restarts, routing,
    scaling) is Ray Serve's."""

    replicas: str = setting(
        default="1", must="a whole number of 1 or more, or auto",
        help="Copies of the models, each in an actor of its own; `auto` lets Ray Serve follow the load.",
    )  # fmt: skip
    min_replicas: int = setting(default=1, help="With `--replicas auto`: so many at least.", ge=1, le=4096)
    max_replicas: int | None = setting(
        default=None,
        help="With `--replicas auto`: so many at most. None: as many as the cluster has room for at the start.", ge=1,
        le=4096,
    )  # fmt: skip
    target_ongoing: float | None = setting(
        default=None,
        help="With `--replicas auto`: requests under way that each replica should have. None: `--max-batch`.", gt=0,
        le=1_000_000,
    )  # fmt: skip
    upscale_delay: float = setting(
        default=30.0, help="With `--replicas auto`: seconds of more load before a replica is added.", ge=0, le=86400
    )
    downscale_delay: float = setting(
        default=600.0, help="With `--replicas auto`: seconds of less load before a replica is ended.", ge=0, le=86400
    )
    max_ongoing: int | None = setting(
        default=None,
        help="Requests that a replica takes at once; further ones wait until any replica takes them. None: twice "
        "`--max-batch`.",
        ge=1, le=1_000_000,
    )  # fmt: skip
    replica_gpus: float | None = setting(
        default=None,
        help="GPUs of a replica; 0.5 lets two share one. None: 1 where the cluster has any, else 0.", ge=0, le=64,
    )  # fmt: skip
    replica_cpus: float = setting(default=1.0, help="CPUs that a replica reserves.", ge=0, le=1024)
    health_period: float = setting(
        default=10.0, help="Seconds between Ray Serve's checks of each replica.", gt=0, le=3600
    )
    health_timeout: float = setting(
        default=30.0, help="Seconds after which a replica that does not answer a check is replaced.", gt=0, le=3600
    )
    ray_address: str | None = setting(
        default=None,
        help="HOST:PORT of the cluster to join. None: what RAY_ADDRESS says, else a Ray of its own on this machine.",
    )
    ray_app: str = setting(
        default="rcd", must="letters, digits and . _ -",
        help="The application's name on the cluster; a server takes over the replicas of an earlier one of its name.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        by_name = {entry.name: entry for entry in entries(type(self))}
        if self.replicas != "auto" and not (self.replicas.isascii() and self.replicas.isdigit() and int(self.replicas)):
            raise by_name["replicas"].wrong(self.replicas)
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.ray_app):
            raise by_name["ray_app"].wrong(self.ray_app)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise RCDError(
                f"max_replicas is {self.max_replicas} and min_replicas {self.min_replicas}; give at least as many."
            )
        if self.replica_gpus and self.replica_gpus > 1 and self.replica_gpus != int(self.replica_gpus):
            raise RCDError(f"replica_gpus above 1 is a whole number, not {self.replica_gpus:g}.")
        if (self.ray_address or "").startswith("ray://"):
            raise RCDError("ray:// is a client's address, which carries no streams; name the head as HOST:PORT.")

    @property
    def count(self) -> int | None:
        """None: as the load asks."""
        return None if self.replicas == "auto" else int(self.replicas)
