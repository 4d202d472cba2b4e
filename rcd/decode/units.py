"""A step of all rows as one unit on the device: plan, embed, inject, backbone, head, sample, commit, carry, and the
rows' own moving on; and the passes from which a carry starts.

On a GPU the bookkeeping is compiled, and a unit is captured once for every size and replayed; on a CPU the same
functions run one after another. What a step did is told to the host without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rcd.decode.graphs import Replay, compiled
from rcd.decode.guidance import Guided
from rcd.decode.model import Raw, SlotModel
from rcd.decode.reporting import Trace
from rcd.decode.requests import RowReport, Size
from rcd.decode.rows import Pass, Rows, move
from rcd.decode.slots import Slots
from rcd.decode.step import Open, Rules, StepRecord, denoise
from rcd.decode.terms import Features
from rcd.decode.window import Window
from rcd.residual.distribution import Distribution, align_vocabulary
from rcd.residual.start import Passes

BROKEN = RowReport._fields.index("broken")
Record = Callable[[Pass, StepRecord], None]


@dataclass(frozen=True)
class Report:
    """What a step tells the host, perhaps still on its way."""

    values: Tensor
    """[R + 1, fields of RowReport]"""
    trace: Trace | None
    rows: tuple[int, ...]
    """The rows that it had room for."""
    arrived: Any = None

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()


class Units:
    """Launches steps of the rows, in units by size."""

    def __init__(
        self, window: Window, target: SlotModel | Guided, reference: SlotModel | None, rules: Rules, rows: Rows,
        graphs: bool,
    ):  # fmt: skip
        self.window, self.target, self.reference, self.rules, self.rows = window, target, reference, rules, rows
        self.on_gpu = rows.active.is_cuda
        self.prepared: Any = window.prepared
        self.settled: Any = window.settled
        self.replay = Replay(graphs)
        self.sparse = not (self.on_gpu or rules.carry.everywhere)
        """Whether only masks are predicted: a carry that enters everywhere may want more."""
        if graphs:
            self.compile()

    def compile(self, backend: Any = "inductor") -> None:
        """The bookkeeping around the pass as a few kernels, for which no number may change from step to step."""
        self.sparse = False
        made, kind = partial(compiled, capacity=self.rows.capacity, backend=backend), type(self.window)
        self.prepared, self.settled = (partial(made(each), self.window) for each in (kind.prepared, kind.settled))
        self.rules = replace(self.rules, choose=made(self.rules.choose))
        for lane in self.target.lanes:
            lane.embed = made(lane.embed)  # type: ignore[method-assign]

    def step(self, size: Size, features: Features, record: Record | None = None) -> tuple[Tensor, Trace | None]:
        """Algorithm 2 for all rows, once: (report, trace)."""
        rows, window, carry = self.rows, self.window, self.rules.carry
        made: Pass = self.prepared(rows, *size)
        slots = made.slots.ordered() if self.on_gpu and window.several(size) else made.slots
        state, read = rows.carry.rows(made.state if self.on_gpu else made.where), None
        if carry.step_pass == "reference":
            read = self._read(True, made.ids, slots, len(made.row))
            state = carry.refresh(state, read, self.target.codebook)
            window.refreshed(rows, made)
        inputs = made.inputs(rows, window.terms, features)
        if rows.memory:
            at = made.state if self.on_gpu else made.where
            inputs = replace(inputs, memory=tuple(each[at] for each in rows.memory))
        if self.sparse and record is None:
            open_ = Open(inputs.masked | inputs.candidates, apart=window.terms.config.batch_invariant)
            inputs = replace(inputs, places=open_)
        outcome = denoise(
            self.target if record is None else Raw(self.target), self.rules, made.ids, slots, state, inputs,
            features.logprobs if features.logprobs >= 0 else None, None if record is None else partial(record, made),
        )  # fmt: skip
        if read is None:
            report = self.settled(rows, made, outcome)
        else:
            known = torch.isfinite(read.normaliser).all(-1)
            outcome = replace(outcome, finite=outcome.finite & known)
            report = self.settled(rows, made, outcome)
            theirs = ((made.row == rows.number[:, None]) & ~known).any(1)
            report[:, BROKEN] = torch.where(theirs, -report[:, BROKEN], report[:, BROKEN])
        return report, Trace.of(rows, made, outcome, window.terms) if features.watched else None

    def launch(self, size: Size, features: Features, rows: tuple[int, ...], record: Record | None = None) -> Report:
        step = partial(self.step, size, features, record)
        report, trace = step() if record is not None else self.replay(("step", size, features), step)
        return self._told(report, trace, rows)

    def start(self, size: Size, generators: list[torch.Generator]) -> None:
        """One pass from which the carry of fresh rows starts."""
        begin = partial(self._started, size, generators)
        begin() if generators else self.replay(("start", size), begin)

    def _started(self, size: Size, generators: list[torch.Generator]) -> None:
        rows, window, carry = self.rows, self.window, self.rules.carry
        reference = carry.start_pass == "reference"
        ids, slots, row, state = window.starting(rows, *size, reference)
        read = self._read(reference, ids, slots, len(row))
        shape = (*row.shape, *read.logits.shape[-2:])
        rows.carry.write(state, carry.begin(read, Passes(shape, ids.device, generators), self.target.codebook))
        theirs = row == rows.number[:, None]
        bad = (theirs & ~torch.isfinite(read.normaliser).all(-1)).any(1)
        done = rows.fresh & theirs.any(1)
        if window.stores_at_start:
            move(rows, done, **{"referred" if reference else "pending": torch.zeros_like(rows.start)})
        move(
            rows, done, fresh=torch.zeros_like(rows.fresh), active=rows.active & ~bad,
            broken=torch.where(bad, (rows.denoised + 1) * (-1 if reference else 1), rows.broken),
        )  # fmt: skip

    def draw(self, row: int, prompt: int, new: int, generator: torch.Generator) -> None:
        """A row's start that needs no pass, but its generator."""
        length, codebook = self.window.drawn_start(prompt, new), self.target.codebook
        passes = Passes((1, length, self.target.settings.vocab_size), codebook.device, [generator])
        begun = self.rules.carry.begin(None, passes, codebook)
        self.rows.carry.write(*self.window.drawn_states(self.rows, row, begun))
        self.rows.fresh[row].fill_(False)

    def _read(self, reference: bool, ids: Tensor, slots: Slots, predicted: int) -> Distribution:
        """A plain pass of the target or the reference."""
        model = self.reference if reference else self.target
        assert model is not None, "a carry that asks for a reference says so in needs_reference"
        logits = model.plain(ids, slots, predicted)
        assert logits is not None
        return self.rules.distribution(align_vocabulary(logits, self.target.settings.vocab_size))

    def _told(self, report: Tensor, trace: Trace | None, rows: tuple[int, ...]) -> Report:
        """Send the report to the host, without waiting for it."""
        if not self.on_gpu:
            return Report(report, trace, rows)
        sent = _pinned(report)
        kept = None if trace is None else Trace._make(None if each is None else _pinned(each) for each in trace)
        arrived = torch.cuda.Event()
        arrived.record()
        return Report(sent, kept, rows, arrived)


def _pinned(value: Tensor) -> Tensor:
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copy.copy_(value, non_blocking=True)
    return copy
