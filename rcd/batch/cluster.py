"""A batch over a Ray cluster: Ray Data gives lines to actors, each of which holds a model, and brings the records back.

Only the places of lines travel to the actors, so the input must be readable at the same path on every node.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcd.batch.lines import Input
from rcd.batch.running import Source, answer, settings_of
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError, first_line

if TYPE_CHECKING:
    from rcd.api import Pipeline

BATCHES = 4
"""An actor is given so many times as many lines at once as it decodes at once."""
CPUS = 1
"""Of an actor that has no GPU."""


@dataclass(frozen=True)
class Work:
    """What an actor needs to know; it travels to other machines."""

    source: Source
    configured: Callable[[Pipeline], DecodeConfig]
    """The settings, for this checkpoint."""
    chat: bool | None
    rows: int
    input: str

    def elsewhere(self) -> Work:
        """The same, for a process with another working directory."""
        source = replace(self.source, model=_absolute(self.source.model), reference=_absolute(self.source.reference))
        return replace(self, source=source, input=os.path.abspath(self.input))


def _absolute(path: Any) -> Any:
    return os.path.abspath(path) if path is not None and Path(path).expanduser().exists() else path


class Actor:
    """A model, held, which answers the lines that it is given."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.pipeline, self.reference = work.source.load(work.rows)
        self.config = work.configured(self.pipeline)

    def settings(self) -> dict[str, Any]:
        return settings_of(self.pipeline, self.work.source, self.config, self.work.chat)

    def __call__(self, places: dict[str, Any]) -> Iterator[dict[str, Any]]:
        lines = Input(self.work.input).at(places["number"].tolist(), places["offset"].tolist())
        for record in answer(
            self.pipeline, lines, self.config, reference=self.reference, chat=self.work.chat, batch=self.work.rows
        ):
            yield {"record": [json.dumps(record)]}


class Cluster:
    """The one that RAY_ADDRESS names, else this machine."""

    def __init__(self, work: Work, actors: int | None = None) -> None:
        self.ray = _ray()
        self.work = work.elsewhere()
        with _sentences(self.ray):
            if not self.ray.is_initialized():
                self.ray.init(log_to_driver=False, logging_level="ERROR")
        gpus = int(self.ray.cluster_resources().get("GPU", 0))
        self.each: dict[str, float] = {"num_gpus": 1} if gpus else {"num_cpus": CPUS}
        self.actors = actors or gpus or len(self.ray.nodes())

    def settings(self) -> dict[str, Any]:
        """What the answers depend on, as a machine of the cluster has it."""
        actor = self.ray.remote(**self.each)(Actor)
        with _sentences(self.ray):
            one = actor.remote(self.work)
            found = dict(self.ray.get(one.settings.remote()))
        self.ray.kill(one)
        return found

    def records(self, numbers: array[int], offsets: array[int]) -> Generator[dict[str, Any]]:
        """A record of each of these lines, as soon as it is there."""
        import pyarrow

        if not numbers:
            return
        context = self.ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        size = BATCHES * self.work.rows
        blocks = [
            pyarrow.table({"number": numbers[k : k + size], "offset": offsets[k : k + size]})
            for k in range(0, len(numbers), size)
        ]
        done = self.ray.data.from_arrow(blocks).map_batches(
            Actor, fn_constructor_args=(self.work,), batch_size=None, udf_modifying_row_count=False,
            compute=self.ray.data.ActorPoolStrategy(size=self.actors), **self.each,
        )  # fmt: skip
        with _sentences(self.ray):
            for row in done.iter_rows():
                yield json.loads(row["record"])


QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
"""Nothing is reported to anyone, and Ray's files alone say what goes on inside; who has set one of them keeps it."""


def _ray() -> Any:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise RCDError("--ray needs Ray: pip install 'residual-context-diffusion[ray]'.") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


@contextmanager
def _sentences(ray: Any) -> Iterator[None]:
    """What fails on the cluster, as one sentence."""
    try:
        yield
    except (ray.exceptions.RayError, ConnectionError) as error:
        cause: BaseException | None = error
        while cause is not None:
            inner = getattr(cause, "cause", None)
            if isinstance(inner, RCDError):
                raise RCDError(str(inner)) from error
            cause = inner or cause.__cause__
        raise RCDError(
            f"the cluster failed ({type(error).__name__}: {first_line(error)}); the same command goes on."
        ) from error
