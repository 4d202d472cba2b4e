"""Named models that answer: bodies in, pieces out. An app and a replica of a cluster run the same class."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rcd.api import Pipeline
from rcd.decode.config import DecodeConfig
from rcd.decode.loop import DecodeLoop
from rcd.errors import QueueFull, RCDError, one_of
from rcd.serve.bridge import Bridge, Mailbox
from rcd.serve.cards import card, draw
from rcd.serve.drafts import Canvas
from rcd.serve.pieces import Accepted, Piece, Refusal, Refused
from rcd.serve.reading import Reader
from rcd.serve.requests import DEADLINE, LEAVING, Job, jobs
from rcd.serve.schema import Ask
from rcd.serve.settings import ServeSettings
from rcd.serve.text import Words
from rcd.serve.warm import compile_products

SWITCH = 0.001
"""Seconds between switches of Python's threads: the one that decodes gives up its turn at every operation of torch, and
waits so long for the event loop to give it back."""


@dataclass(frozen=True)
class Load:
    """How busy a model is."""

    waiting: int = 0
    serving: int = 0
    rows: int = 0
    engines: int = 0
    passes: int = 0
    replicas: int = 1
    """Processes that hold the model; the other numbers are their sums."""


class Service(Protocol):
    """What an app needs of whoever decodes."""

    async def cards(self) -> list[dict[str, Any]]:
        """What /v1/models says of every model, the default first."""

    async def example(self, model: str | None, seed: int) -> dict[str, Any]:
        """A new problem for a model."""

    def pieces(self, ask: Ask) -> AsyncIterator[list[Piece]]:
        """What is told of a request, all that is there at a time; nothing but an empty list where a stream is silent.
        Closing the iterator cancels what is not done."""

    async def load(self) -> dict[str, Load]:
        """By model."""

    async def ready(self) -> bool:
        """Whether anybody could answer now."""

    async def stop(self) -> None:
        """Tell everyone who still waits that the server ends."""


@dataclass
class Served:
    """A model and what the server knows of it."""

    name: str
    pipeline: Pipeline
    config: DecodeConfig
    """The defaults of its requests."""
    words: Words
    apart: Counter[Any]
    """Requests under way whose carry has settings of its own, by it."""


class LocalService:
    """Models in this process."""

    def __init__(
        self,
        models: Mapping[str, Pipeline] | None = None,
        settings: ServeSettings | None = None,
        config: DecodeConfig | None = None,
    ):
        """`config`: the defaults of requests. The first model is that of requests which name none."""
        self.settings = settings or ServeSettings()
        self.models: dict[str, Served] = {}
        for name, pipeline in (models or {}).items():
            self.add(name, pipeline, config)
        self._bridge: Bridge | None = None
        self._open = set[Mailbox]()

    def add(self, name: str, pipeline: Pipeline, config: DecodeConfig | None = None) -> None:
        """Serve one more model; `config`: the defaults of its requests."""
        config = config or DecodeConfig()
        config = replace(config, carry=pipeline.resolve(config).carry)  # refused, and looked up, before anybody asks
        pipeline.loop = self._loop()
        words = Words(pipeline.tokenizer)
        self.models[name] = Served(name, pipeline, config, words, Counter())

    def warm(self, name: str) -> None:
        """Take a step of an example, so that the first request finds an engine that is made and compiled."""
        served = self.models[name]
        if served.pipeline.tokenizer is None:
            return
        with contextlib.suppress(RCDError):  # what is wrong is told to whoever asks
            prompt = served.words.encode([draw(served.pipeline, 0)["prompt"]])[0]
            for _ in served.pipeline.submit(prompt, served.config, watch=True, rows=self.settings.max_batch):
                break  # which cancels it

    def _loop(self) -> DecodeLoop:
        asked = self.settings
        return DecodeLoop(
            asked.max_queue, most_rows=asked.max_batch, memory=asked.cache_memory, prefix_bytes=asked.prefix_cache,
            prepare=compile_products,
        )  # fmt: skip

    async def cards(self) -> list[dict[str, Any]]:
        return [card(one.name, one.pipeline, one.config) for one in list(self.models.values())]

    async def example(self, model: str | None, seed: int) -> dict[str, Any]:
        served = self.named(model)
        return {"model": served.name, **await asyncio.to_thread(draw, served.pipeline, seed)}

    async def load(self) -> dict[str, Load]:
        return {name: _load(served.pipeline) for name, served in list(self.models.items())}

    async def ready(self) -> bool:
        return True

    async def stop(self) -> None:
        for mailbox in list(self._open):
            mailbox.refuse(LEAVING)

    def named(self, model: str | None) -> Served:
        """The model that a request means; `bundled:` may be left out of a name."""
        found = next(iter(self.models.values()), None)
        if model is not None:
            found = self.models.get(model) or self.models.get(model.removeprefix("bundled:"))
        if found is None:
            try:
                one_of("model", str(model)[:200], self.models)
            except RCDError as error:
                raise Refusal(str(error), "model", "model_not_found", 404) from None
            raise Refusal("no model is served.", "model", "model_not_found", 404)
        return found

    async def pieces(self, ask: Ask) -> AsyncIterator[list[Piece]]:
        try:
            served = self.named(ask.model)
            wanted = await jobs(served.pipeline, served.words, served.config, ask, self.settings.most_tokens)
            mailbox, readers = self._mailbox(served, wanted, ask)
            self._admit(served, wanted)
        except RCDError as error:
            yield [refused(error)]
            return
        handles: list[Any] = []
        timers: list[asyncio.TimerHandle] = []
        self._open.add(mailbox)
        try:
            try:
                for job, sink in zip(wanted, mailbox.sinks, strict=True):
                    more: Any = dict(watch=ask.stream, rows=self.settings.max_batch, events=sink, canvas=job.canvas)
                    handles.append(served.pipeline.submit(job.prompt, job.config, **more))
            except RCDError as error:
                yield [refused(error)]
                return
            ends, mask = {*served.pipeline.settings.eos_token_ids}, served.pipeline.settings.mask_token_id
            for reader, handle, job in zip(readers, handles, wanted, strict=True):
                given = max((place + 1 for place, token in enumerate(job.canvas) if token != mask), default=0)
                reader.begin(handle, ends | {*handle.request.settings.stop_ids}, given)
            timers = self._deadlines(mailbox, handles)
            read = sum(len(job.prompt) + sum(one != mask for one in job.canvas) for job in wanted[:: ask.n])
            yield [Accepted(served.name, read, len(wanted))]
            left = len(wanted)
            while left and mailbox.refused is None:
                await mailbox.wait(self.settings.heartbeat if ask.stream else None)
                found = [piece for reader in readers for piece in reader.read()]
                left -= sum(reader.ended for reader in readers) - (len(wanted) - left)
                broken = next((piece for piece in found if isinstance(piece, Refused)), None)
                if broken is not None or (left and mailbox.refused is not None):
                    found = [piece for piece in found if not isinstance(piece, Refused)]
                    yield [*found, broken or mailbox.refused]  # type: ignore[list-item]
                    return
                yield found
        finally:
            self._open.discard(mailbox)
            for timer in timers:
                timer.cancel()
            for handle in handles:
                handle.cancel()
            self._leave(served, wanted)

    def _mailbox(self, served: Served, wanted: list[Job], ask: Ask) -> tuple[Mailbox, list[Reader]]:
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            self._bridge = Bridge(loop)
        canvases = [_canvas(served, index, job, ask) for index, job in enumerate(wanted)] if ask.drafts else None
        mailbox = Mailbox(self._bridge, len(wanted), canvases, self.settings.drafts_kept)
        readers = [
            Reader(sink, served.words, job.config.stop, mailbox.began, ask, job.told)
            for sink, job in zip(mailbox.sinks, wanted, strict=True)
        ]
        return mailbox, readers

    def _deadlines(self, mailbox: Mailbox, handles: list[Any]) -> list[asyncio.TimerHandle]:
        loop, asked = asyncio.get_running_loop(), self.settings

        def overdue() -> None:
            if any(not handle.done and handle.admitted is None for handle in handles):
                mailbox.refuse(DEADLINE("queue_timeout", f"no row was free for {asked.max_wait:g} seconds"))

        late = DEADLINE("timeout", f"it took longer than {asked.timeout:g} seconds")
        timers = [loop.call_later(asked.timeout, mailbox.refuse, late)]
        return timers if asked.max_wait is None else [*timers, loop.call_later(asked.max_wait, overdue)]

    def _admit(self, served: Served, wanted: list[Job]) -> None:
        """Count what is decoded apart: each such setting has an engine of its own."""
        new = {job.apart for job in wanted if job.apart is not None} - served.apart.keys()
        if new and len(served.apart) + len(new) > self.settings.max_engines:
            raise Refusal(
                f"{len(served.apart)} settings of rcd.t_res and rcd.alpha_scale are being decoded, each apart from "
                "the others; try again when some are answered.",
                "rcd", "too_many_settings", 429,
            )  # fmt: skip
        served.apart.update(job.apart for job in wanted if job.apart is not None)

    def _leave(self, served: Served, wanted: list[Job]) -> None:
        for job in wanted:
            if job.apart is not None:
                served.apart[job.apart] -= 1
                if not served.apart[job.apart]:
                    del served.apart[job.apart]


def refused(error: RCDError) -> Refused:
    """Why a request cannot be answered, with the status that says so."""
    if isinstance(error, Refusal):
        found = error.refused
        return replace(found, retry_after=1) if found.status == 429 else found
    message = str(error)
    if isinstance(error, QueueFull):
        return Refused(429, message, None, "queue_full", retry_after=1)
    if "positions, but the model has" in message:
        return Refused(400, message, "max_tokens", "context_length_exceeded")
    return Refused(400, message)


def _canvas(served: Served, index: int, job: Job, ask: Ask) -> Canvas:
    model, length = served.pipeline.settings, served.pipeline.resolve(job.config, len(job.prompt)).new_tokens
    return Canvas(
        index, served.words, length, frozenset(model.eos_token_ids), model.mask_token_id, ask.alternatives, job.canvas
    )  # fmt: skip


def _load(pipeline: Pipeline) -> Load:
    loop = pipeline.loop
    engines = loop.engines
    return Load(
        loop.waiting, loop.serving, sum(engine.rows_most for engine in engines), len(engines),
        sum(engine.stats.passes for engine in engines),
    )  # fmt: skip
