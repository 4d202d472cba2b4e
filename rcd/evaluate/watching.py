"""Decoding with a witness: what every step was given and what it predicted.

The contract of a carry shows it both, so the witness is a carry that stands around another. The decode loop does not
know of it, and a run that nobody watches pays nothing.
Shapes: R rows that took the step, L window, V vocabulary, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rcd.carry.base import Carry, CarryState
from rcd.decode.events import Finished, Step
from rcd.errors import RCDError, whole
from rcd.residual.distribution import Distribution
from rcd.residual.start import Passes

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.decode.config import DecodeConfig


@dataclass(frozen=True)
class Around:
    """A carry that does as another does."""

    carry: Carry

    @property
    def needs_reference(self) -> bool:
        return self.carry.needs_reference

    @property
    def everywhere(self) -> bool:
        return self.carry.everywhere

    @property
    def expects(self) -> bool:
        """As `Residual.expects`: a large vocabulary's delta is then computed as in a run that nobody watches."""
        return getattr(self.carry, "expects", False)

    @property
    def t_res(self) -> float:
        return getattr(self.carry, "t_res", 1.0)

    def refresh(self, state: Any | None, passes: Passes, codebook_VD: Tensor) -> CarryState:
        return self.carry.refresh(state, passes, codebook_VD)

    def inject(self, embeds_BLD: Tensor, where_BL: Tensor, state: Any, learnt: nn.Module | None = None) -> Tensor:
        return self.carry.inject(embeds_BLD, where_BL, state, learnt)

    def update(self, state: Any, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor) -> CarryState:
        return self.carry.update(state, predicted, hidden_BLD, codebook_VD)


@dataclass(frozen=True)
class Watched(Around):
    """A carry that does as another does, and tells what it was shown."""

    tell: Callable[[tuple[Any, Any]], None]
    """Hears (inputs, state) before a step's pass and (prediction, hidden states) after it."""

    def inject(self, embeds_BLD: Tensor, where_BL: Tensor, state: Any, learnt: nn.Module | None = None) -> Tensor:
        inputs = super().inject(embeds_BLD, where_BL, state, learnt)
        self.tell((inputs, state))
        return inputs

    def update(self, state: Any, predicted: Distribution, hidden_BLD: Tensor, codebook_VD: Tensor) -> CarryState:
        self.tell((predicted, hidden_BLD))
        return super().update(state, predicted, hidden_BLD, codebook_VD)


@dataclass(frozen=True)
class Look:
    """One denoising step. Row k of every tensor belongs to the prompt event.rows[k]."""

    event: Step
    number: list[int]
    """For each row, its steps in this window, this one included: in the block of a block diffusion model, on the canvas
    of a bidirectional one."""
    masked: Tensor
    """[R, L] booleans: masks when the step began."""
    inputs: Tensor
    """[R, L, D] the embeddings that the model was given."""
    state: CarryState
    """What the carry brought into the step."""
    logits: Tensor
    """[R, L, V]"""
    hidden: Tensor
    """[R, L, D] what the head reads."""
    index: Tensor
    """[R] the rows of the model's batch that took the step."""


def watch(
    pipeline: Pipeline,
    prompts: Sequence[Sequence[int]],
    config: DecodeConfig | None = None,
    *,
    reference: Pipeline | None = None,
    batch: int = 32,
) -> Iterator[Look | Finished]:
    """Every step of decoding the prompts, and the end of each; rows are numbers of prompts. Row r is seeded with the
    configuration's seed + r. On a CPU every prompt is decoded alone (`rcd.evaluate.answering`)."""
    whole("batch", batch, least=1)
    if not prompts:
        raise RCDError("there are no problems to decode; ask for at least one.")
    resolved = pipeline.resolve(config, max(map(len, prompts)))
    assert resolved.carry is not None and not isinstance(resolved.carry, str)
    steady = resolved.window in (
        "blockwise",
        "bidirectional",
    )  # in the others some rows of a batch take no part in a step
    size = batch if steady and pipeline.model.device.type != "cpu" else 1
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in range(0, len(order), size):
        rows = order[first : first + size]
        yield from _together(pipeline, [prompts[row] for row in rows], rows, resolved, reference)


def _together(
    pipeline: Pipeline, prompts: list[Sequence[int]], rows: list[int], config: DecodeConfig, reference: Pipeline | None
) -> Iterator[Look | Finished]:
    notes: list[tuple[Any, Any]] = []
    assert config.carry is not None and not isinstance(config.carry, str)
    config = replace(config, carry=Watched(config.carry, notes.append))
    seeds = [config.seed + row for row in rows]
    there = list(range(len(rows)))  # rows of the batch that the carry sees: all that are not finished, in order
    since: dict[int, tuple[int, int]] = {}  # row -> (offset of its window, steps before it)
    for event in pipeline.stream(prompts, config, reference=reference, seeds=seeds):
        if isinstance(event, Finished):
            there.remove(event.row)
            yield replace(event, row=rows[event.row])
            continue
        for row, offset, number in zip(event.rows, event.offsets, event.number, strict=True):
            if row not in since or since[row][0] != offset:
                since[row] = (offset, number - 1)
        (inputs, state), (predicted, hidden) = notes
        notes.clear()
        index = torch.tensor([there.index(row) for row in event.rows], device=inputs.device)
        yield Look(
            event=replace(event, rows=[rows[row] for row in event.rows]),
            number=[number - since[row][1] for row, number in zip(event.rows, event.number, strict=True)],
            masked=~event.confidence.isnan(),
            inputs=inputs[index], state=state.rows(index), logits=predicted.logits[index], hidden=hidden[index],
            index=index,
        )  # fmt: skip
