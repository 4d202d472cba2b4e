"""Whether a server leaves anything behind: memory, rows, tasks, open files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rcd.bench.client import Answer, Server, closed_loop, fetch
from rcd.bench.serve import Load, gauges
from rcd.errors import RCDError

WARM_SHARE = 0.2
"""Of a soak's requests: the slope of the memory is of those behind."""
SAMPLES = 100
IDLE = ("rcd_requests_running", "rcd_waiting", "rcd_serving", "rcd_tasks", "process_open_fds")
"""What must be as before when all is answered."""
SETTLING = 30.0
"""Seconds in which it must."""


@dataclass(frozen=True)
class Soak:
    """What so many requests left behind."""

    answered: int
    lost: int
    other_text: int
    bytes_per_request: float
    """The slope of the process's memory over the requests behind the first fifth."""
    first_mib: float
    last_mib: float
    memory: list[tuple[int, float]]
    """(requests answered, bytes of the process) on the way."""
    left: dict[str, list[float]]
    """By gauge: [before, after], of those that differ when all is answered."""

    def to_json(self) -> dict[str, Any]:
        return self.__dict__


def soak(server: Server, load: Load, clients: int, requests: int, texts: Sequence[str] = ()) -> Soak:
    """Plain and streamed requests in turns, memory looked at between them."""
    memory = list[tuple[int, float]]()

    async def sample(count: int) -> None:
        memory.append((count, gauges(await fetch(server, "/metrics"))["process_resident_memory_bytes"]))

    async def run() -> tuple[list[Answer], dict[str, float], dict[str, float]]:
        mixed = [body for pair in zip(load.bodies(False), load.bodies(True), strict=True) for body in pair]
        before = gauges(await fetch(server, "/metrics"))
        found = await closed_loop(
            server, mixed, clients, requests=requests, every=max(1, requests // SAMPLES), sample=sample
        )
        until = time.monotonic() + SETTLING
        while (after := gauges(await fetch(server, "/metrics"))) and time.monotonic() < until:
            if all(after.get(name, 0) <= before.get(name, 0) for name in IDLE):
                break
            await asyncio.sleep(0.2)
        return found, before, after

    answers, before, after = asyncio.run(run())
    good = [one for one in answers if one.error is None and one.status == 200]
    other = [one for one in good if texts and one.text != texts[one.request // 2 % len(texts)]]
    late = [(count, size) for count, size in memory if count >= WARM_SHARE * requests]
    if len(late) < 2:
        raise RCDError(f"{requests} requests are too few to see what memory does; give 100 or more.")
    left = {
        name: [before.get(name, 0.0), after.get(name, 0.0)]
        for name in IDLE if after.get(name, 0.0) > before.get(name, 0.0)
    }  # fmt: skip
    return Soak(
        len(good), len(answers) - len(good), len(other), round(slope(late), 1), round(memory[0][1] / 2**20, 1),
        round(memory[-1][1] / 2**20, 1), memory, left,
    )  # fmt: skip


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line through the points, by least squares."""
    xs, ys = zip(*points, strict=True)
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a in xs)
