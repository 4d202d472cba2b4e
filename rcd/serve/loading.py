"""Which models a server loads, and how: a value that may travel to the machines of a cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rcd.api import Pipeline, load
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.models.threads import limit_threads
from rcd.serve.service import LocalService

BUNDLED = ("words-rcd", "words-seqd", "sdar-rcd", "sdar-seqd", "llada-rcd", "llada-seqd")


@dataclass(frozen=True)
class Models:
    """Where they are, and the defaults of their requests."""

    sources: dict[str, str]
    """By name; the first is that of requests which name none."""
    configured: Callable[[Pipeline], DecodeConfig]
    """The defaults of a model's requests."""
    placed: dict[str, Any] = field(default_factory=dict)
    """Device, dtype, revision and how weights are quantised."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What `rcd.load` should take from nobody else."""
    threads: int | None = None

    def elsewhere(self) -> Models:
        """The same, for a process with another working directory."""
        return replace(self, sources={name: _absolute(source) for name, source in self.sources.items()})

    def load_into(self, service: LocalService, told: Callable[[str], None] = lambda text: None) -> None:
        """Load one after the other; each serves as soon as it is there. `told` is given what users should know."""
        for name, source in self.sources.items():
            pipeline = load(source, **self.placed, **self.facts)
            limit_threads([pipeline, *(one.pipeline for one in service.models.values())], self.threads)
            service.add(name, pipeline, self.configured(pipeline))
            service.warm(name)
            if pipeline.untrained:
                told(f"{name} is a causal model, not trained for diffusion; its text means nothing")


def named(given: Iterable[str]) -> dict[str, str]:
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


def _absolute(source: str) -> str:
    path = Path(source).expanduser()
    return os.path.abspath(path) if path.exists() else source
