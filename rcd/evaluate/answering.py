"""Decoding many prompts together, and never so that it would change a result."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rcd.decode.events import Event, Failed, Finished
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
    on_cpu = pipeline.model.device.type == "cpu"
    given = [config] * len(prompts) if not isinstance(config, Sequence) else config
    settled = {
        each: replace(pipeline.resolve(each, longest), batch_invariant=each.batch_invariant or (exact and on_cpu))
        for each in set(given)
    }
    own = [each.seed + number for number, each in enumerate(given)] if seeds is None else seeds
    configs = [replace(settled[each], seed=seed) for each, seed in zip(given, own, strict=True)]
    order = sorted(range(len(prompts)), key=lambda number: (-len(prompts[number]), -configs[number].new_tokens))
    if any(each.oracle for each in configs):
        yield from _one_by_one(pipeline, prompts, configs, order, reference)
        return
    most = min(batch, len(prompts), MOST_ON_A_CPU if on_cpu else batch)
    together = _Together(pipeline, prompts, configs, reference, most, probe)
    try:
        yield from together.run(deque(order))
    finally:
        together.cancel()


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


class _Together:
    """Prompts that are decoded at once, up to so many; another one begins as soon as one has ended."""

    def __init__(
        self,
        pipeline: Pipeline,
        prompts: Sequence[Sequence[int]],
        configs: Sequence[DecodeConfig],
        reference: Pipeline | None,
        most: int,
        probe: Callable[[Look], None] | None,
    ):
        self.pipeline, self.prompts, self.configs, self.reference = pipeline, prompts, configs, reference
        self.most, self.probe = most, probe
        self.events: Events = queue.SimpleQueue()
        self.handles: dict[int, Handle] = {}
        """Of the prompts being decoded, by their numbers."""
        self.began: dict[int, tuple[float, float]] = {}
        """When, and what the clock of shares showed then."""
        self.clock, self.read = 0.0, 0.0
        """The share that a prompt would have if it had been there from the beginning, and when that was brought up to
        date."""

    def run(self, waiting: deque[int]) -> Iterator[Answered]:
        while waiting or self.handles:
            self._fill(waiting)
            found, failed = list[Answered](), None
            for event in self._ready():
                if isinstance(event, Finished):
                    found.append(self._ended(event))
                elif isinstance(event, Failed):
                    failed = event
            if failed is None:
                self._fill(waiting)  # before the caller grades and writes
            yield from found
            if failed is not None:
                raise RCDError(failed.message)

    def cancel(self) -> None:
        for handle in self.handles.values():
            handle.cancel()

    def _fill(self, waiting: deque[int]) -> None:
        while waiting and len(self.handles) < self.most:
            number = waiting.popleft()
            now = time.perf_counter()
            self._advance(now)
            self.began[number] = (now, self.clock)
            self.handles[number] = self.pipeline.submit(
                self.prompts[number], self.configs[number], reference=self.reference, row=number, wait=True,
                rows=self.most, events=self.events, probe=self._probe(number),
            )  # fmt: skip

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

    def _ended(self, event: Finished) -> Answered:
        self._advance(event.at)
        del self.handles[event.row]
        when, clock = self.began.pop(event.row)
        return Answered(event.row, self.pipeline.generation(event, event.at - when), self.clock - clock)

    def _advance(self, now: float) -> None:
        if self.handles and now > self.read:
            self.clock += (now - self.read) / len(self.handles)
        self.read = max(self.read, now)
