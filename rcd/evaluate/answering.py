"""Decoding many prompts together, and never so that it would change a result."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rcd.decode.events import Event, Failed, Finished, Step
from rcd.decode.handle import Events, Handle, lost
from rcd.errors import RCDError, whole

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline
    from rcd.decode.config import DecodeConfig
    from rcd.decode.probe import Look

MOST_ON_A_CPU = 16
"""Prompts that a CPU decodes at once: more gain nothing there."""


@dataclass(frozen=True)
class Answered:
    """The answer to one of the prompts."""

    number: int
    """The prompt's place in the list."""
    generation: Generation
    """Its `seconds` are the latency: from when decoding could begin to the answer's end."""
    share: float
    """Its share of the time that decoding took: every moment is divided evenly among the prompts being decoded, so that
    the shares of all answers add up to the whole."""


@dataclass(frozen=True)
class Unanswered:
    """A prompt that is refused, or whose decoding failed; the others go on."""

    number: int
    error: RCDError


@dataclass(frozen=True)
class Job:
    """A prompt to decode; its number is the caller's."""

    number: int
    prompt: Sequence[int]
    config: DecodeConfig
    """Resolved, with the prompt's own seed."""
    canvas: Sequence[int] = ()


def answers(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | Sequence[DecodeConfig],
    *,
    seeds: Sequence[int] | None = None,
    reference: Pipeline | None = None,
    batch: int = 32,
    exact: bool = True,
    probe: Callable[[Look], None] | None = None,
) -> Generator[Answered]:
    """Every prompt's answer as soon as it is there. The longest are begun first, and up to `batch` are decoded at once
    (on a CPU up to 16 of them). `config`: one for all, or one for every prompt. `seeds`: one for each prompt (else the
    configuration's seed and the prompt's number), so that no draw depends on who else is in a batch.

    On a CPU no bit of an answer depends on what it is decoded with, unless `exact` is off, which is somewhat faster:
    sums are then made in another order, which can turn a near tie. On a GPU near ties may fall either way. `probe` is
    shown every step (`rcd.decode.probe`); its `row` is the prompt's number.
    """
    whole("batch", batch, least=1)
    longest = max(map(len, prompts), default=0)
    given = [config] * len(prompts) if not isinstance(config, Sequence) else config
    settled = {each: settle(pipeline, each, longest, exact) for each in set(given)}
    own = [each.seed + number for number, each in enumerate(given)] if seeds is None else seeds
    configs = [replace(settled[each], seed=seed) for each, seed in zip(given, own, strict=True)]
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), -configs[number].new_tokens))
    if any(each.oracle for each in configs):
        yield from _one_by_one(pipeline, prompts, configs, order, reference)
        return
    jobs = [Job(number, prompts[number], configs[number]) for number in order]
    most = min(rows_for(pipeline, batch), len(prompts))
    with closing(together(pipeline, jobs, most, reference=reference, probe=probe)) as found:
        for answer in found:
            if isinstance(answer, Unanswered):
                raise answer.error
            yield answer


def settle(pipeline: Pipeline, config: DecodeConfig, longest: int, exact: bool, canvas: int = 0) -> DecodeConfig:
    """The configuration for prompts of up to so many tokens, and a canvas of so many; `exact`: on a CPU, no bit depends
    on the batch."""
    resolved = pipeline.resolve(config, longest, canvas)
    return replace(resolved, batch_invariant=resolved.batch_invariant or (exact and _on_cpu(pipeline)))


def rows_for(pipeline: Pipeline, batch: int) -> int:
    """Prompts that are decoded at once where `batch` are asked for."""
    return min(batch, MOST_ON_A_CPU) if _on_cpu(pipeline) else batch


def _on_cpu(pipeline: Pipeline) -> bool:
    return pipeline.model.device.type == "cpu"


def _one_by_one(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[DecodeConfig],
    order: Sequence[int],
    reference: Pipeline | None,
) -> Iterator[Answered]:
    """By the oracle, which decodes nothing together."""
    for number in order:
        config = configs[number]
        (found,) = pipeline.generate([prompts[number]], config, reference=reference, seeds=[config.seed]).results
        yield Answered(number, found, found.seconds)


def together(
    pipeline: Pipeline,
    jobs: Iterable[Job | Unanswered],
    rows: int,
    *,
    ahead: int = 0,
    reference: Pipeline | None = None,
    probe: Callable[[Look], None] | None = None,
) -> Generator[Answered | Unanswered]:
    """Every job's answer as soon as it is there, `rows` decoded at once; another one is taken as soon as one has ended,
    so that there may be any number of them. What is unanswered already is passed on. `ahead`: so many more are queued,
    so that a row is taken again without a word from here."""
    running = _Together(pipeline, iter(jobs), rows, ahead, reference, probe)
    try:
        yield from running.run()
    finally:
        running.cancel()


class _Together:
    """Jobs that are decoded at once."""

    def __init__(
        self,
        pipeline: Pipeline,
        jobs: Iterator[Job | Unanswered],
        rows: int,
        ahead: int,
        reference: Pipeline | None,
        probe: Callable[[Look], None] | None,
    ):
        self.pipeline, self.jobs, self.rows, self.most = pipeline, jobs, rows, rows + ahead
        self.reference, self.probe = reference, probe
        self.events: Events = queue.SimpleQueue()
        self.handles: dict[int, Handle] = {}
        """Of the prompts being decoded, by their numbers."""
        self.began: dict[int, tuple[float, float]] = {}
        """When, and what the clock of shares showed then."""
        self.clock, self.read = 0.0, 0.0
        """The share that a prompt would have if it had been there from the beginning, and when that was brought up to
        date."""

    def run(self) -> Iterator[Answered | Unanswered]:
        while True:
            yield from (refused := self._fill())
            if not self.handles:
                if not refused:
                    return
                continue
            told = [event for event in self._ready() if not isinstance(event, Step)]
            ended: list[Answered | Unanswered] = [self._ended(event) for event in told]
            if not any(isinstance(each, Unanswered) for each in ended):
                ended += self._fill()  # before the caller grades and writes
            yield from sorted(ended, key=lambda each: isinstance(each, Unanswered))

    def cancel(self) -> None:
        for handle in self.handles.values():
            handle.cancel()

    def _fill(self) -> list[Unanswered]:
        """Take jobs while there is room; returns those that were refused."""
        refused = list[Unanswered]()
        while len(self.handles) + len(refused) < self.most and (job := next(self.jobs, None)) is not None:
            if isinstance(job, Unanswered):
                refused.append(job)
                continue
            now = time.perf_counter()
            self._advance(now)
            try:
                handle = self.pipeline.submit(
                    job.prompt, job.config, reference=self.reference, row=job.number, wait=True, rows=self.rows,
                    events=self.events, probe=self._probe(job.number), canvas=job.canvas,
                )  # fmt: skip
            except RCDError as error:
                refused.append(Unanswered(job.number, error))
                continue
            self.began[job.number], self.handles[job.number] = (now, self.clock), handle
        return refused

    def _probe(self, number: int) -> Callable[[Look], None] | None:
        """A loop has numbers of its own for its requests."""
        probe = self.probe
        return None if probe is None else lambda look: probe(replace(look, row=number))

    def _ready(self) -> list[Event]:
        """What there is to hear; at least one event."""
        found = [self.events.get()]
        while not self.events.empty():
            found.append(self.events.get())
        for event in found:
            if isinstance(event, BaseException):
                raise lost(event)
        return found  # type: ignore[return-value]

    def _ended(self, event: Finished | Failed) -> Answered | Unanswered:
        if isinstance(event, Finished):
            self._advance(event.at)
        del self.handles[event.row]
        when, clock = self.began.pop(event.row)
        if isinstance(event, Failed):
            return Unanswered(event.row, RCDError(event.message))
        return Answered(event.row, self.pipeline.generation(event, event.at - when), self.clock - clock)

    def _advance(self, now: float) -> None:
        if self.handles and now > self.read:
            self.clock += (now - self.read) / len(self.handles)
        self.read = max(self.read, now)
