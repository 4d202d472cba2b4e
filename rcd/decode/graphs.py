"""CUDA only: a step's bookkeeping compiled for all sizes, and whole steps captured as graphs and replayed.

The bookkeeping around a pass is some two hundred tiny operations. What `torch.compile` sees as a constant it compiles
anew for every value, for seconds each. Here the first dimension of every tensor (rows, slots), the second of texts as
long as a row of the cache, and the whole numbers among SIZES are unknowns from the first tracing on. Only 1 stays a
value of its own, as the compiler has it: a row alone, one slot. What was compiled belongs to the function, so that
later engines find it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

SIZES = ("served", "slots", "low", "length", "count")
"""Arguments that are sizes."""
RECOMPILE_LIMIT = 64
"""Of one function, over carries, windows and settings."""


def compiled(function: Callable[..., Any], capacity: int, backend: Any = "inductor") -> Callable[..., Any]:
    """`function`, compiled, for rows of `capacity` positions; as one graph: where the host were asked something, it
    would break."""
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    sizes = tuple(k for k, name in enumerate(inspect.signature(function).parameters) if name in SIZES)
    inner = torch.compile(_sized(function, sizes) if sizes else function, backend=backend, fullgraph=True)

    def call(*given: Any) -> Any:
        unknown(given, capacity)
        if not sizes:
            return inner(*given)
        shape = torch.empty(()).expand([given[k] for k in sizes])
        for dim in range(len(sizes)):
            torch._dynamo.maybe_mark_dynamic(shape, dim)
        return inner(shape, *(None if k in sizes else value for k, value in enumerate(given)))

    return call


def _sized(function: Callable[..., Any], sizes: tuple[int, ...]) -> Callable[..., Any]:
    """The same with the sizes as the shape of a tensor: a plain number would be a constant at first."""

    def traced(shape: Tensor, *given: Any) -> Any:
        values = list(given)
        for k, size in zip(sizes, shape.shape, strict=True):
            values[k] = size
        return function(*values)

    return traced


def unknown(value: Any, capacity: int) -> None:
    """Mark the dimensions that vary in all tensors of a value."""
    if isinstance(value, Tensor):
        for dim, size in enumerate(value.shape):
            if dim == 0 or (size == capacity and value.dim() == 2):  # ids; a width may happen to be as large
                torch._dynamo.maybe_mark_dynamic(value, dim)
    elif isinstance(value, tuple):
        for each in value:
            unknown(each, capacity)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            unknown(getattr(value, each.name), capacity)


@dataclass
class _Unit:
    """A step of one size; captured at its second use."""

    graph: Any = None
    outputs: Any = None
    used: int = 0


class Replay:
    """Runs functions of tensors by name, where it may as graphs: recorded at their second use, replayed from then on.
    Outputs of a graph are the same tensors each time."""

    def __init__(self, graphs: bool):
        self.graphs = graphs
        self._units: dict[Any, _Unit] = {}
        self._pool: Any = None

    def __call__(self, name: Any, function: Callable[[], Any]) -> Any:
        if not self.graphs:
            return function()
        unit = self._units.setdefault(name, _Unit())
        unit.used += 1
        if unit.used == 2:
            self._capture(unit, function)
        if unit.graph is None:
            return function()
        unit.graph.replay()
        return unit.outputs

    def _capture(self, unit: _Unit, function: Callable[[], Any]) -> None:
        """Record, which computes nothing; where that fails (also for want of memory), say so once and record no more:
        what is already recorded is still replayed."""
        try:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                unit.outputs = function()
            self._pool, unit.graph = self._pool or graph.pool(), graph
        except RuntimeError as error:
            self.graphs = False
            torch.cuda.empty_cache()
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(f"rcd: steps are not replayed as CUDA graphs here ({why}); they run slower.", stacklevel=2)
