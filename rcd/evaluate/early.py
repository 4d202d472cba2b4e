"""Answers that are cut off as soon as enough of them is known.

Decoding tells its steps, so who reads them can stop listening: a row is taken as it is when the beginning of its text,
up to its first mask, is enough, and decoding ends when every row of the batch is taken or finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rcd.carry.base import CarryState
from rcd.decode.events import Counts, Finished, Step
from rcd.evaluate.watching import Around

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline
    from rcd.decode.config import DecodeConfig
    from rcd.residual.distribution import Distribution
    from rcd.residual.start import Passes

Enough = Callable[[int, list[int]], bool]
"""(the prompt's place in the batch, its text's settled beginning as tokens) -> whether that is all that is wanted."""
CUT = "cut"
"""The stop reason of a text that was taken before its end."""


def until_enough(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig,
    enough: Enough,
    *,
    seeds: Sequence[int],
    reference: Pipeline | None = None,
) -> list[Generation]:
    """The prompts' answers, in their order; the text of one with the stop reason `cut` is its settled beginning."""
    began, found = time.perf_counter(), dict[int, "Generation"]()
    resolved = pipeline.resolve(config, max(map(len, prompts)))
    assert resolved.carry is not None and not isinstance(resolved.carry, str)
    texts, ends = [list[int]() for _ in prompts], set(pipeline.settings.eos_token_ids)
    with _counting(pipeline, reference) as tally:
        counted = replace(resolved, carry=Counting(resolved.carry, tally))
        for event in pipeline.stream(list(prompts), counted, reference=reference, seeds=seeds):
            if isinstance(event, Finished):
                found.setdefault(event.row, pipeline.generation(event, time.perf_counter() - began))
                continue
            tally.steps += 1
            for row, grown in _grown(event, texts):
                if row in found or not grown or ends & set(texts[row]) or not enough(row, texts[row]):
                    continue
                taken = Finished(row, list(texts[row]), CUT, tally.counts(event.number[event.rows.index(row)]))
                found[row] = pipeline.generation(taken, time.perf_counter() - began)
            if len(found) == len(texts):
                break
    return [found[row] for row in range(len(texts))]


def _grown(event: Step, texts: list[list[int]]) -> Iterator[tuple[int, bool]]:
    """(row, whether its settled beginning has grown) of a step's rows; `texts` are brought up to date."""
    for row, offset, draft, masked in zip(event.rows, event.offsets, event.draft, event.masked, strict=True):
        first = int(masked.long().argmax()) if bool(masked.any()) else len(masked)
        before, text = len(texts[row]), texts[row]
        if offset <= before:
            text[max(0, offset) :] = draft[max(0, -offset) : first].tolist()
        yield row, len(text) > before


@dataclass
class Tally:
    """Passes so far, of the whole batch."""

    steps: int = 0
    target: int = 0
    reference: int = 0
    start: int = 0
    """Those of the target that a carry asked for."""

    def counts(self, denoising: int) -> Counts:
        """Of a row that took so many of the steps; prefill and stores are one number. Exact for a row alone: in a batch
        all passes count that it was there for, but for the steps that it waited through."""
        return Counts(
            denoising=denoising, start=self.start, store=self.target - self.steps - self.start,
            reference=self.reference,
        )  # fmt: skip


@contextmanager
def _counting(pipeline: Pipeline, reference: Pipeline | None) -> Iterator[Tally]:
    """Every forward pass of both models, while it is open."""
    tally = Tally()

    def count(name: str) -> Callable[..., None]:
        return lambda *_: setattr(tally, name, getattr(tally, name) + 1)

    hooks = [pipeline.model.backbone.register_forward_pre_hook(count("target"))]
    if reference is not None:
        hooks.append(reference.model.backbone.register_forward_pre_hook(count("reference")))
    try:
        yield tally
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Counting(Around):
    """A carry that does as another does, and counts the target's passes that it asks for."""

    tally: Tally

    def refresh(self, state: Any | None, passes: Passes, codebook_VD: Tensor) -> CarryState:
        return self.carry.refresh(state, _Asked(passes, self.tally), codebook_VD)


@dataclass(frozen=True)
class _Asked:
    """`Passes` with a count."""

    passes: Passes
    tally: Tally

    def __getattr__(self, name: str) -> Any:
        return getattr(self.passes, name)

    def own(self) -> Distribution:
        self.tally.start += 1
        return self.passes.own()
