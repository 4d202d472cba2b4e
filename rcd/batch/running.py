"""Lines in, records out: the jobs of one process, decoded together at full batch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from rcd.batch.lines import Lines, job, parse, read_object, repeatable
from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError
from rcd.evaluate.answering import Answered, Job, Unanswered, rows_for, together
from rcd.evaluate.provenance import conditions, dtype_name

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline

SORTED = 256
"""So many lines of a file are read ahead, and the longest of them begun first."""


@dataclass(frozen=True)
class Source:
    """How the models of a batch are loaded, also in another process."""

    model: str
    reference: str | None = None
    device: str | torch.device = "auto"
    dtype: str = "auto"
    threads: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    quantize: str | None = None

    def load(self, rows: int) -> tuple[Pipeline, Pipeline | None]:
        """The model, and the reference if one is named."""
        from rcd.api import load
        from rcd.models.threads import limit_threads

        placed: Any = dict(device=self.device, dtype=self.dtype, quantize=self.quantize)
        pipeline = load(self.model, **placed, **self.overrides)
        second = None if self.reference is None else load(self.reference, **placed)
        limit_threads([pipeline, second], self.threads, rows=rows_for(pipeline, rows))
        return pipeline, second


def settings_of(pipeline: Pipeline, source: Source, config: DecodeConfig, chat: bool | None) -> dict[str, Any]:
    """What the answers depend on, but for the input; refuses what no line could be decoded with."""
    resolved = pipeline.resolve(config)
    if resolved.oracle:
        raise RCDError("the oracle decodes one prompt after another; leave oracle out with --input.")
    if resolved.travelling.needs_reference and source.reference is None:
        raise RCDError("this carry needs a reference model; name one with reference (--reference).")
    vocabulary, dtype = pipeline.settings.vocab_size, dtype_name(pipeline)
    found = conditions(source.model, resolved, source.reference, vocabulary=vocabulary, dtype=dtype)
    return {**found, "chat": chat, "overrides": source.overrides, "logprobs": config.logprobs}


def answer(
    pipeline: Pipeline,
    lines: Lines,
    config: DecodeConfig,
    *,
    reference: Pipeline | None = None,
    chat: bool | None = None,
    batch: int = 32,
    ahead: int = SORTED,
) -> Generator[dict[str, Any]]:
    """A record of every line, in the order in which they are done. The lines are read as they are needed, `ahead` at a
    time. No answer depends on what it is decoded with (on a GPU: but for near ties)."""
    told: dict[int, dict[str, Any]] = {}
    """Of the lines being decoded: their ids."""

    def jobs() -> Iterator[Job | Unanswered]:
        reading = iter(lines)
        while part := list(islice(reading, ahead)):
            ready = [_job(pipeline, number, content, config, chat, told) for number, content in part]
            yield from sorted(ready, key=_length, reverse=True)

    rows = rows_for(pipeline, batch)
    with closing(together(pipeline, jobs(), rows, ahead=rows, reference=reference)) as results:
        for result in results:
            head = {"line": result.number, **told.pop(result.number)}
            yield {
                **head,
                **(_found(pipeline, result.generation) if isinstance(result, Answered) else _refused(result)),
            }


def _job(
    pipeline: Pipeline, number: int, content: bytes, config: DecodeConfig, chat: bool | None, told: dict[int, Any]
) -> Job | Unanswered:
    told[number] = {}
    try:
        row = read_object(content)
        if "id" in row:
            told[number] = {"id": repeatable(row["id"])}
        return job(pipeline, parse(number, row), config, chat)
    except RCDError as error:
        return Unanswered(number, error)


def _length(one: Job | Unanswered) -> tuple[int, int]:
    """Lines that are refused come first."""
    return (len(one.prompt), one.config.new_tokens) if isinstance(one, Job) else (2**62, 0)


def _refused(result: Unanswered) -> dict[str, Any]:
    return {"error": str(result.error)}


def _found(pipeline: Pipeline, found: Generation) -> dict[str, Any]:
    """The answer, without the time that it took: the same answers are the same bytes."""
    return {name: value for name, value in found.to_dict(pipeline.token_text).items() if name != "seconds"}
