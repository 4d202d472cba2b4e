"""A probe: what a step of one request was given, what it predicted, and what it hands on.

Recall, calibration and norms read decoding so, without a change to what is decoded; a request without a probe pays
nothing. Shapes: L predicted positions of the request, V vocabulary, D embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from rcd.carry.base import CarryState
from rcd.decode.step import StepRecord
from rcd.residual.distribution import Distribution

if TYPE_CHECKING:
    from rcd.decode.engine import Engine
    from rcd.decode.rows import Pass


@dataclass(frozen=True)
class Look:
    """One denoising step of one request. Row k of every tensor belongs to the position places[k]."""

    row: int
    number: int
    """The request's denoising steps, this one included."""
    places: Tensor
    """[L] counted from the end of the prompt (negative: inside it)."""
    masked: Tensor
    """[L] booleans: masks when the step began."""
    committed: Tensor
    """[L] booleans: what this step commits, if its logits are numbers."""
    inputs: Tensor
    """[L, D] the embeddings that the model was given."""
    before: CarryState
    """[1, L] what the carry brought into the step."""
    after: CarryState
    """[1, L] what it brings into the next one."""
    logits: Tensor
    """[L, V]"""
    hidden: Tensor
    """[L, D] what the head reads."""
    raw: Tensor | None
    """[L, D] the same before the final norm, where the backbone tells."""

    @cached_property
    def predicted(self) -> Distribution:
        return Distribution(self.logits[None])


class Prober:
    """Shows the probes of some rows what a step did."""

    def __init__(self, engine: Engine, rows: tuple[int, ...]):
        self.engine, self.rows = engine, rows

    def __call__(self, made: Pass, step: StepRecord) -> None:
        took = made.took.tolist()
        for row in self.rows:
            one = self.engine.serving[row]
            if took[row] and one.request.probe is not None:
                look = self._look(row, made, step)
                try:
                    one.request.probe(look)
                except Exception as error:  # the request's own; it fails alone when the step is done
                    one.mistake = error

    def _look(self, row: int, made: Pass, step: StepRecord) -> Look:
        engine, one = self.engine, self.engine.serving[row]
        mine = (made.row == row).nonzero().flatten()
        mine = mine[made.block[mine].argsort()]
        b = made.masked.shape[1]
        position = made.seen.position[row].unflatten(0, (-1, b))[made.block[mine]].flatten()
        inside = position < len(one.prompt) + engine.window.span(len(one.prompt), one.request.settings.new_tokens)

        def own(value: Tensor) -> Tensor:
            return value[mine].flatten(0, 1)[inside].clone()

        def state(value: CarryState) -> CarryState:
            flat = [each.flatten(0, 1)[None, inside] for each in value.rows(mine).tensors()]
            return value.with_tensors(flat)

        before, model = step.before.rows(mine), engine.model
        plain = model.embed(made.seen.ids[row].unflatten(0, (-1, b))[made.block[mine]])
        carry, inject = engine.window.terms.carry, step.inputs.inject[mine]
        inputs = carry.inject(plain, inject, before, model.carry_parameters).flatten(0, 1)[inside]
        raw = step.prediction.raw
        return Look(
            row=one.request.row, number=int(engine.rows.denoised[row]) + 1, places=position[inside] - len(one.prompt),
            masked=own(step.inputs.masked), committed=own(step.outcome.committed), inputs=inputs,
            before=state(step.before), after=state(step.outcome.state), logits=own(step.prediction.logits),
            hidden=own(step.prediction.hidden), raw=None if raw is None else own(raw),
        )  # fmt: skip
