"""What a server counts, by model, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from rcd.serve.pieces import Done
from rcd.serve.service import Load

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PER_STEP = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LOADS = {
    "waiting": "Answers that wait for a row.",
    "serving": "Answers that a row decodes.",
    "rows": "Rows of all engines, used and free.",
    "engines": "Engines.",
    "passes": "Passes of the models since the engines were made; each serves many rows.",
    "replicas": "Processes that hold the model and told their load; the loads are sums over them.",
}


class Metrics:
    """One app's; a registry of its own, so that several apps may live in a process."""

    def __init__(self, running: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        by: Any = dict(registry=self.registry)
        self.requests = Counter("rcd_requests", "Requests by how they ended.", ["model", "outcome"], **by)
        Gauge("rcd_requests_running", "Requests that are being answered.", **by).set_function(running)
        Gauge("rcd_tasks", "Tasks of the event loop.", **by).set_function(lambda: len(asyncio.all_tasks()))
        self.seconds = Histogram(
            "rcd_request_seconds", "From a request's body to the end of its answer.", ["model"], buckets=SECONDS, **by
        )
        self.first = Histogram(
            "rcd_first_text_seconds", "From a request's body to the first text of its stream.", ["model"],
            buckets=SECONDS, **by,
        )  # fmt: skip
        self.prompt = Counter("rcd_prompt_tokens", "Tokens of prompts.", ["model"], **by)
        self.cached = Counter("rcd_prompt_tokens_cached", "Those of them that the cache had.", ["model"], **by)
        self.tokens = Counter("rcd_tokens", "New tokens.", ["model"], **by)
        self.steps = Counter("rcd_denoising_steps", "Denoising steps of answers.", ["model"], **by)
        self.forwards = Counter("rcd_forwards", "Forward passes of answers.", ["model"], **by)
        self.per_step = Histogram("rcd_tokens_per_step", "Of an answer.", ["model"], buckets=PER_STEP, **by)
        self._loads = {name: Gauge(f"rcd_{name}", about, ["model"], **by) for name, about in LOADS.items()}

    def done(self, model: str, done: Done) -> None:
        self.tokens.labels(model).inc(done.tokens)
        self.steps.labels(model).inc(done.denoising_steps)
        self.forwards.labels(model).inc(done.forwards)
        self.cached.labels(model).inc(done.cached)
        self.per_step.labels(model).observe(done.tokens_per_step)

    def text(self, loads: dict[str, Load]) -> bytes:
        for name, gauge in self._loads.items():
            gauge.clear()  # a replica that is lost leaves no number behind
            for model, load in loads.items():
                gauge.labels(model).set(getattr(load, name))
        return generate_latest(self.registry)
