"""Who waits for which engine: the engine that a request needs, and the queue of those who share one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rcd.decode.engine import Engine
from rcd.decode.handle import Handle
from rcd.decode.prefixes import Prefixes


@dataclass(frozen=True)
class Plan:
    """The engine that a request needs."""

    key: Any
    """Engines of one key differ in size alone."""
    capacity: int
    """Positions a row, at least."""
    rows: int
    """Rows that a new one gets, if memory allows."""
    least_rows: int
    """One that nobody uses and that has fewer is replaced."""
    size: Callable[[int, int], int]
    """Bytes of the caches of so many rows of that capacity."""
    make: Callable[[int, int, Prefixes | None], Engine]
    """With so many rows of that capacity."""


@dataclass(eq=False)
class EngineQueue:
    """An engine, made or still to be made, who waits for it, and whom it serves."""

    plan: Plan
    engine: Engine | None = None
    bytes: int = 0
    waiting: deque[Handle] = field(default_factory=deque)
    serving: dict[int, Handle] = field(default_factory=dict)
    """By the numbers that its requests have in the engine."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.serving or (self.engine is not None and self.engine.busy))

    @property
    def first(self) -> float:
        """The number of who waits longest."""
        return self.waiting[0].number if self.waiting else math.inf

    def spare(self, first: float) -> bool:
        """Whether its engine serves nobody, nor anybody who came before that one."""
        return self.engine is not None and not self.serving and not self.engine.busy and self.first > first

    def suits(self, plan: Plan) -> bool:
        """Whether it can serve such a request."""
        if self.plan.key != plan.key:
            return False
        if self.idle and self.plan.rows < plan.least_rows:
            return False
        return self.plan.capacity >= plan.capacity if self.engine is None else self.engine.suits(plan.capacity)
