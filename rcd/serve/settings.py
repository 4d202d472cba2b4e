"""Settings of `rcd serve`: flags, the table in docs/serving.md and the bounds of requests are made from them."""

from __future__ import annotations

from rcd.settings import setting, settings


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
