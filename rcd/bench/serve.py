"""What a server answers under load, beside the engine without a server: same prompts, same settings, same threads.

In every round each way takes its turn, in an order that is drawn, so that noise falls on all alike and ratios are those
of a round.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import quantiles
from typing import Any

import torch

from rcd.api import Pipeline
from rcd.bench.client import Answer, Server, closed_loop, fetch
from rcd.bench.decode import Spread
from rcd.decode.config import DecodeConfig, capacity_for
from rcd.decode.engine import Engine
from rcd.decode.events import Failed, Finished
from rcd.decode.prefixes import Prefixes
from rcd.decode.requests import Request
from rcd.errors import RCDError, first_line
from rcd.serve.parse import parse
from rcd.serve.requests import Job, jobs
from rcd.serve.settings import ServeSettings
from rcd.serve.text import Words
from rcd.serve.warm import compile_products

OFFLINE, PLAIN, STREAMED = "offline", "plain", "streamed"
WARM_SECONDS = 2.0
"""Of every way of asking, before the first round."""


@dataclass(frozen=True)
class Load:
    """What is asked."""

    prompts: Sequence[str]
    chat: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of every body."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: str, streamed: bool = False) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        stream = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        return {"temperature": 0, **asked, **stream, **self.more}

    def bodies(self, streamed: bool) -> list[bytes]:
        return [json.dumps(self.body(prompt, streamed)).encode() for prompt in self.prompts]


@dataclass(frozen=True)
class Round:
    """What one way answered in its turn."""

    seconds: float
    answers: list[Answer]
    """Those that ended in time, and those that failed."""
    cpu: float | None = None
    """Seconds of CPU that the process which answers took, if it tells."""

    @property
    def good(self) -> list[Answer]:
        return [one for one in self.answers if one.error is None and one.status in (0, 200)]

    @property
    def rate(self) -> float:
        return len(self.good) / self.seconds


@dataclass
class Figure:
    """What was measured of one way of asking: medians over rounds, in brackets the quartiles."""

    server: str
    how: str
    clients: int
    rounds: list[Round] = field(default_factory=list)
    base: list[Round] = field(default_factory=list)
    """What it is compared with, in the same rounds."""
    texts: Sequence[str] = ()
    """The answer that each prompt should get; none where that is not known."""

    def to_json(self) -> dict[str, Any]:
        good = [one for part in self.rounds for one in part.good]
        lost = [one for part in self.rounds for one in part.answers if one.error is not None or one.status >= 400]
        other = [one for one in good if self.texts and one.text != self.texts[one.request % len(self.texts)]]
        rates = Spread.of([part.rate for part in self.rounds])
        tokens = Spread.of([sum(one.tokens for one in part.good) / part.seconds for part in self.rounds])
        found: dict[str, Any] = {
            "server": self.server, "how": self.how, "clients": self.clients, "answered": len(good), "lost": len(lost),
            "other_text": len(other), "requests_per_second": _spread(rates), "tokens_per_second": _spread(tokens),
            "latency_ms": _percentiles([one.seconds for one in good if one.seconds]),
            "first_text_ms": _percentiles([one.first for one in good if one.first is not None]),
            "between_texts_ms": _percentiles([gap for one in good for gap in one.gaps]),
            "error": lost[0].error or f"status {lost[0].status}" if lost else None,
        }  # fmt: skip
        if self.base and all(part.rate for part in self.base):
            ratio = Spread.ratio([part.rate for part in self.rounds], [part.rate for part in self.base])
            found["over_base"] = _spread(ratio)
        if all(part.cpu is not None and part.good for part in self.rounds):
            found["cpu_ms"] = _spread(Spread.of([1000 * (part.cpu or 0) / len(part.good) for part in self.rounds]))
        return found


def _spread(one: Spread) -> list[float]:
    return [round(value, 4) for value in (one.median, one.low, one.high)]


def _percentiles(seconds: Sequence[float]) -> list[float] | None:
    """[p50, p99] in milliseconds."""
    if len(seconds) < 2:
        return None
    cuts = quantiles(seconds, n=100, method="inclusive")
    return [round(cuts[49] * 1000, 2), round(cuts[98] * 1000, 2)]


def jobs_of(pipeline: Pipeline, load: Load, config: DecodeConfig) -> list[Job]:
    """Prompts and settings as the server makes them of the same bodies."""
    bounds, words = ServeSettings(), Words(pipeline.tokenizer)
    most = dict(max_n=1, max_prompts=1, max_messages=1, most_tokens=bounds.most_tokens)
    asks = [parse(body, load.chat, **most) for body in load.bodies(False)]
    return [asyncio.run(jobs(pipeline, words, config, ask, bounds.most_tokens))[0] for ask in asks]


class Offline:
    """The engine without a server or threads, all of its rows in use."""

    def __init__(self, pipeline: Pipeline, asked: Sequence[Job], rows: int):
        self._pipeline = pipeline
        settings = pipeline.settings
        resolved = [pipeline.resolve(job.config, len(job.prompt)) for job in asked]
        self._requests = [Request(job.prompt, one.request) for job, one in zip(asked, resolved, strict=True)]
        config, longest = resolved[0].engine(settings), max(len(job.prompt) for job in asked)
        capacity = capacity_for(longest + resolved[0].new_tokens, config, settings)
        kept = Prefixes(ServeSettings().prefix_cache)  # of prompts that were read, as the server does
        self._engine = Engine(pipeline.model, config, rows=rows, capacity=capacity, text=pipeline.decode, prefixes=kept)
        with torch.inference_mode():
            compile_products(self._engine)

    def __call__(self, seconds: float) -> Round:
        began, used, answers = time.perf_counter(), time.process_time(), list[Answer]()

        def requests() -> Iterator[Request]:
            numbers = itertools.count()
            while time.perf_counter() - began < seconds:
                number = next(numbers)
                yield replace(self._requests[number % len(self._requests)], row=number)

        for event in self._engine.run(requests()):
            if isinstance(event, Failed):
                raise RCDError(event.message)
            if isinstance(event, Finished):
                text = self._pipeline.generation(event, 0.0).text
                answers.append(Answer(event.row, text=text, tokens=len(event.ids), ended=time.perf_counter()))
        kept = [one for one in answers if one.ended - began <= seconds]
        return Round(seconds, kept, (time.process_time() - used) * len(kept) / len(answers))


def loaded(server: Server, load: Load, how: str, clients: int, seconds: float) -> Round:
    """A closed loop; what ends behind the last second does not count."""
    before, began = cpu_seconds(server), time.perf_counter()
    answers = asyncio.run(closed_loop(server, load.bodies(how == STREAMED), clients, seconds=seconds))
    after = cpu_seconds(server)
    kept = [one for one in answers if one.ended - began <= seconds or one.error is not None or one.status != 200]
    # what is answered behind the last second takes CPU, too
    share = len(kept) / len(answers) if answers else 0.0
    return Round(seconds, kept, None if before is None or after is None else share * (after - before))


def cpu_seconds(server: Server) -> float | None:
    """Of the server's process, if its /metrics tells."""
    try:
        return gauges(asyncio.run(fetch(server, "/metrics"))).get("process_cpu_seconds_total")
    except (RCDError, ValueError):
        return None


def compare(
    servers: dict[str, tuple[Server, Load]], ways: Sequence[str], clients: Sequence[int], seconds: float, rounds: int,
    alone: Callable[[float], Round] | None = None, texts: Sequence[str] = (),
) -> list[Figure]:  # fmt: skip
    """`alone`: the engine without a server, with which all are compared; without it they are with the first server.
    `texts`: the right answers, by prompt."""
    figures = {
        (name, how, count): Figure(name, how, count, texts=texts)
        for count in clients for how in ways for name in servers
    }  # fmt: skip
    base = Figure("-", OFFLINE, 0, texts=texts)
    for name, how, count in figures:  # engines are made, prompts' blocks are kept
        loaded(*servers[name], how, count, min(seconds, WARM_SECONDS))
    if alone is not None:
        alone(min(seconds, WARM_SECONDS))
    for _ in range(rounds):
        for turn in random.sample([None, *figures], len(figures) + 1):
            if turn is None:
                if alone is not None:
                    base.rounds.append(alone(seconds))
                continue
            name, how, count = turn
            figures[turn].rounds.append(loaded(*servers[name], how, count, seconds))
    first = next(iter(servers))
    for (_, how, count), figure in figures.items():
        figure.base = base.rounds or figures[first, how, count].rounds
    return [*([base] if base.rounds else []), *figures.values()]


def gauges(text: str) -> dict[str, float]:
    """Prometheus's text as numbers, summed over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


@contextmanager
def started(model: str, flags: Sequence[str]) -> Iterator[str]:
    """`rcd serve` in a process of its own, on a free port of this machine."""
    command = [sys.executable, "-m", "rcd", "serve", "--model", model, "--port", "0", "--no-access-log", *flags]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        said = []
        for line in child.stderr:
            said.append(line.strip())
            if "ready on " in line:
                yield line.split("ready on ")[1].split(" ")[0].rstrip("/")
                break
        else:
            raise RCDError(f"rcd serve did not start ({first_line(RCDError(said[-1] if said else ''))}).")
    finally:
        child.terminate()
        child.communicate()
