"""A step of all rows as one unit on the device: plan, embed, inject, backbone, head, sample, commit, carry, and the
rows' own moving on.

On a GPU the bookkeeping is compiled, and a unit is captured once for every size and replayed; on a CPU the same
functions run one after another. What a step did is told to the host without waiting for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rcd.decode.step import Outcome, Rules, denoise
from rcd.engine.compiling import compiled
from rcd.engine.model import SlotModel
from rcd.engine.requests import Serving, Size
from rcd.engine.rows import Pass, Rows, Terms, trace
from rcd.models.lm import DiffusionLM


class Window(Protocol):
    """Which slots a pass computes, and how rows move on: `rcd.engine.blocks.Blocks`, `rcd.engine.canvas.Canvas`."""

    @property
    def terms(self) -> Terms: ...
    @property
    def states(self) -> int:
        """Blocks of a row that have a step and a carry of their own."""
        ...

    @property
    def whole(self) -> bool:
        """Whether passes read whole rows, so that an engine's capacity should be no larger than it must."""
        ...

    def room(self, capacity: int) -> int:
        """Positions of a row that texts of up to `capacity` need."""
        ...

    def needs(self, prompt: int, new: int) -> int:
        """Positions that a request takes."""
        ...

    def begin(self, prompt: int, new: int) -> dict[str, int]:
        """What a row is that enters."""
        ...

    def serving(self, prompt: int, new: int) -> dict[str, int]:
        """What the host knows of it."""
        ...

    def prefill(self, prompt: int) -> Iterator[tuple[int, int, int]]:
        """(begin, end, tokens of a block) of the passes over the prompt before the first step."""
        ...

    def must_hear(self, serving: Mapping[int, Serving], rate: float) -> bool:
        """Whether the host must know what the last step did before it can choose the next."""
        ...

    def next(self, serving: Mapping[int, Serving]) -> tuple[int, ...]:
        """The rows that the next pass is for."""
        ...

    def size(self, serving: list[Serving], rows: int, rate: float) -> Size:
        """Its size, rounded up so that few sizes are captured. It changes no token."""
        ...

    def slots(self, size: Size) -> int: ...
    def several(self, size: Size) -> bool:
        """Whether so many slots are of the same rows that their order matters."""
        ...

    @property
    def prepared(self) -> Callable[[Rows, int, int], Pass]: ...
    def settled(self, rows: Rows, made: Pass, outcome: Outcome) -> Tensor: ...


@dataclass(frozen=True)
class Told:
    """What a step reports, perhaps still on its way."""

    report: Tensor
    trace: tuple[Tensor, ...]
    rows: tuple[int, ...]
    """The rows that it had room for."""
    arrived: Any

    def wait(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()


@dataclass
class Unit:
    """A step of one size; captured at its second use."""

    graph: Any = None
    outputs: tuple[Tensor, ...] = field(default_factory=tuple)
    used: int = 0


class Steps:
    """Launches steps of the rows, in units by size."""

    def __init__(self, window: Window, slotted: SlotModel, rules: Rules, rows: Rows, graphs: bool, watch: bool):
        self.window, self.slotted, self.rules, self.rows = window, slotted, rules, rows
        self.graphs, self.watch, self.on_gpu = graphs, watch, rows.active.is_cuda
        self.prepared: Any = window.prepared
        self.settled: Any = window.settled
        if graphs:
            self.compile()
        self._units: dict[Size, Unit] = {}
        self._pool: Any = None

    def compile(self, backend: Any = "inductor") -> None:
        """The bookkeeping around the pass as a few kernels."""
        made, kind = partial(compiled, capacity=self.rows.capacity, backend=backend), type(self.window)
        self.prepared, self.settled = (partial(made(each), self.window) for each in (kind.prepared, kind.settled))
        self.rules = replace(self.rules, choose=made(self.rules.choose))
        self.slotted.embed = made(self.slotted.embed)  # type: ignore[method-assign]

    def step(self, size: Size) -> tuple[Tensor, ...]:
        """Algorithm 2 for all rows, once: (report, trace...)."""
        rows, model = self.rows, cast(DiffusionLM, self.slotted)
        made: Pass = self.prepared(rows, *size)
        slots: Any = made.slots.ordered() if self.on_gpu and self.window.several(size) else made.slots
        outcome = denoise(
            model, self.rules, made.ids, slots, rows.carry.rows(made.state), made.candidates, made.quota, made.noise,
            made.inject,
        )  # fmt: skip
        report = self.settled(rows, made, outcome)
        return (report, *trace(rows, made, outcome, self.window.terms)) if self.watch else (report,)

    def launch(self, size: Size, rows: tuple[int, ...]) -> Told:
        unit = self._units.setdefault(size, Unit())
        unit.used += 1
        if self.graphs and unit.used == 2:
            self._capture(unit, size)
        if unit.graph is not None:
            unit.graph.replay()
        else:
            unit.outputs = self.step(size)
        return self._tell(unit.outputs, rows)

    def _capture(self, unit: Unit, size: Size) -> None:
        """Record the step for replay, which computes nothing; where that fails (also for want of memory), say so once
        and record no more: what is already recorded is still replayed."""
        try:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool):
                unit.outputs = self.step(size)
            self._pool, unit.graph = self._pool or graph.pool(), graph
        except RuntimeError as error:
            self.graphs = False
            torch.cuda.empty_cache()
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(f"rcd: steps are not replayed as CUDA graphs here ({why}); they run slower.", stacklevel=2)

    def _tell(self, outputs: tuple[Tensor, ...], rows: tuple[int, ...]) -> Told:
        """Send the report to the host, without waiting for it."""
        if not self.on_gpu:
            return Told(outputs[0].clone(), tuple(value.clone() for value in outputs[1:]), rows, None)
        copies = [torch.empty(value.shape, dtype=value.dtype, pin_memory=True) for value in outputs]
        for copy, value in zip(copies, outputs, strict=True):
            copy.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Told(copies[0], tuple(copies[1:]), rows, arrived)
