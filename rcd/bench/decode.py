"""What a decoding step costs, against the stock loop and against what the memory allows.

All methods take turns in one process: in every round each of them takes a step (or, where steps are of several kinds or
overlap with the host, decodes to the end), so that noise falls on all alike and ratios are those of a round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median, quantiles
from typing import Any

import torch

from rcd.bench.limits import step_bytes, timed
from rcd.bench.stock import Loop
from rcd.bench.workload import SEQD, STEPWISE, Method, Workload
from rcd.decode.config import capacity_for
from rcd.decode.engine import Engine
from rcd.decode.events import Failed
from rcd.decode.probe import Look
from rcd.errors import RCDError
from rcd.models.lm import DiffusionLM
from rcd.residual.alpha import normalised

STOCK, LOOP = "stock", "stock loop"
WARM = 3
"""Untimed steps of every method before the first round; on a GPU untimed runs, which compile and capture (sizes are
captured at their second use)."""
ROUNDS, REPEATS = 20, 3
"""Of single steps; of whole runs."""
MOST_ROUNDS, SECONDS = 200, 4.0
"""Where nothing is asked for: more rounds of short steps, until so much time has gone."""


@dataclass(frozen=True)
class Spread:
    """The median of the rounds, and their quartiles."""

    median: float
    low: float
    high: float

    @property
    def quartiles(self) -> tuple[float, float]:
        return self.low, self.high

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    @classmethod
    def ratio(cls, over: Sequence[float], under: Sequence[float]) -> Spread:
        """Of the ratios within a round: steadier than the ratio of the medians."""
        return cls.of([a / b for a, b in zip(over, under, strict=True)])


@dataclass(frozen=True)
class Figure:
    """What was measured of one method at one point."""

    method: str
    batch: int
    prefix: int
    threads: int
    rounds: int
    steps: int
    """Of all rounds."""
    ms_per_step: float
    """Wall time of the decoding loop over the steps launched, prefill left out: the median of the rounds."""
    ms_quartiles: tuple[float, float]
    cpu_ms: float
    """Time of the process on all cores, a step."""
    tokens_per_second: float | None = None
    limit_share: float | None = None
    """The time to read the weights and the cache once at the measured bandwidth, over ms_per_step."""
    peak_gib: float | None = None
    """None on a CPU."""
    mean_alpha: float | None = None
    """The normalised entropy of the predictions at masks, at the first steps of the first row."""
    storing_ms: float | None = None
    """Of a step that also stores a finished block, where these are told apart."""
    over_stock: float | None = None
    over_stock_quartiles: tuple[float, float] | None = None
    over_seqd: float | None = None
    """ms_per_step over SeqD's, round by round."""
    over_seqd_quartiles: tuple[float, float] | None = None
    cpu_over_stock: float | None = None
    cpu_over_seqd: float | None = None
    stock_ms: float | None = None
    """The stock forward of the same block or canvas."""

    def to_json(self) -> dict[str, Any]:
        return {key: rounded(value) for key, value in asdict(self).items()}


def rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


# -- one method ------------------------------------------------------------------------------------------------------


@dataclass
class Runner:
    """A method with an engine of its own, kept warm."""

    model: DiffusionLM
    load: Workload
    method: Method
    engine: Engine = field(init=False)
    alphas: list[float] = field(default_factory=list)
    storing: list[float] = field(default_factory=list)
    peak: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        settings = self.model.settings
        config = self.load.config(self.method).resolved(settings).engine(settings)
        capacity = capacity_for(self.load.length, config, settings)
        self.engine = Engine(self.model, config, rows=self.load.batch, capacity=capacity)

    def fill(self, probe: Callable[[Look], None] | None = None) -> None:
        """All rows, every prompt read to its end."""
        for request in self.load.requests(self.model, self.method, probe):
            failed = self.engine.admit(request)
            if failed is not None:
                raise RCDError(failed.message)
        self.engine.prefill_all()
        self.wait()

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def look(self, probe: Look) -> None:
        """Read how sure the predictions are."""
        p = probe.predicted
        alpha = normalised(p.entropy_at(1.0), p.logits.shape[-1])[0]
        self.alphas.append(float(alpha[probe.masked].mean()))

    def warm(self, whole: bool) -> None:
        self.fill(self.look)
        for _ in range(WARM):
            if self.engine.busy:
                self.heard()
        self.engine.drop_all()
        self.wait()
        for _ in range(WARM if whole else 0):
            self.run()
        self.seconds, self.steps, self.tokens = 0.0, 0, 0

    def heard(self) -> None:
        """One turn; what is no end of an answer is an error."""
        for event in self.engine.turn():
            if isinstance(event, Failed):
                raise RCDError(event.message)

    def step(self) -> tuple[float, float, bool]:
        """(seconds, seconds of the process, whether it also stored a finished block) of one step."""
        if not self.engine.busy:
            self.fill()
        waiting = any(one.last.due for one in self.engine.serving.values())
        storing = waiting and self.load.window == "blockwise" and self.load.block_length > self.load.tokens_per_step
        before = self.engine.stats.passes
        found = timed(self.heard, self.model.device)
        assert self.engine.stats.passes == before + 1
        self.count(found[0], 1, self.load.tokens_per_step)
        if storing:
            self.storing.append(found[0])
        return *found, storing

    def run(self) -> tuple[float, float]:
        """(seconds, seconds of the process) a step of the decoding loop to its end: every row is prefilled before the
        clock starts."""
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.fill()
        before, began, busy = self.engine.stats.passes, time.perf_counter(), time.process_time()
        while self.engine.busy:
            self.heard()
        self.wait()
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        steps = self.engine.stats.passes - before
        if self.model.device.type == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() / 2**30)
        self.count(seconds, steps, self.load.new_tokens)
        return seconds / steps, busy / steps

    def count(self, seconds: float, steps: int, tokens: int) -> None:
        self.seconds, self.steps, self.tokens = self.seconds + seconds, self.steps + steps, self.tokens + tokens


# -- all of them in turn ---------------------------------------------------------------------------------------------

Sample = tuple[float, float]
"""Seconds, and seconds of the process, a step."""


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute on so many threads of the CPU meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stock_times(work: Callable[[], None], device: torch.device, repeats: int) -> Sample:
    """The medians of some steps."""
    found = [timed(work, device) for _ in range(repeats)]
    return median(wall for wall, _ in found), median(busy for _, busy in found)


def rounds_of(
    model: DiffusionLM, load: Workload, runners: Sequence[Runner], rounds: int | None, whole: bool, stock: bool
) -> dict[str, list[Sample]]:
    """The samples of every method, round by round. The order within a round is drawn, since
    what runs before a step decides what is in the CPU's caches. A round in which our steps
    also store a finished block, which the stock loop does by a pass of its own, is left out."""
    jobs: dict[str, Callable[[], Any]] = {}
    if stock:
        loop, again = Loop(model, load), 5 if whole else 1
        jobs[STOCK] = lambda: stock_times(loop.forward, model.device, again)
        jobs[LOOP] = lambda: stock_times(loop.step, model.device, again)
        for work in (loop.forward, loop.step):
            stock_times(work, model.device, WARM)
    for runner in runners:
        runner.warm(whole)
        jobs[runner.method.name] = runner.run if whole else runner.step
    samples: dict[str, list[Sample]] = {name: [] for name in jobs}
    names, order = list(jobs), random.Random(0)
    wanted, began = rounds or ROUNDS, time.perf_counter()
    while len(samples[names[0]]) < wanted:
        order.shuffle(names)
        found = {name: jobs[name]() for name in names}
        if any(each[2:] == (True,) for each in found.values()):
            continue
        for name, each in found.items():
            samples[name].append(each[:2])
        if rounds is None and len(samples[name]) == wanted < MOST_ROUNDS and time.perf_counter() - began < SECONDS:
            wanted += 1
    return samples


def compare(
    model: DiffusionLM, load: Workload, chosen: Sequence[Method], speed: float, repeats: int | None = None,
    rounds: int | None = None, stock: bool = True,
) -> list[Figure]:  # fmt: skip
    """All methods at one point. `repeats`: so many rounds of whole runs; without, `rounds` of single steps."""
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    whole = repeats is not None or load.window not in STEPWISE or model.device.type == "cuda"
    with threads(load.threads):
        runners = [Runner(model, load, method) for method in chosen]
        samples = rounds_of(model, load, runners, (repeats or REPEATS) if whole else rounds, whole, stock)
        used = torch.get_num_threads()
    made = {runner.method.name: runner for runner in runners}
    wall = {name: [each[0] for each in found] for name, found in samples.items()}
    busy = {name: median(each[1] for each in found) for name, found in samples.items()}
    out = []
    for name, found in wall.items():
        own, runner = Spread.of([1e3 * each for each in found]), made.get(name)
        over = {base: Spread.ratio(found, wall[base]) for base in (STOCK, SEQD.name) if base in wall}
        by_stock, by_seqd = over.get(STOCK), over.get(SEQD.name) if runner else None
        figure = Figure(
            name, load.batch, load.prefix, used, len(found), runner.steps if runner else len(found), own.median,
            own.quartiles, 1e3 * busy[name],
            over_stock=by_stock.median if by_stock else None,
            over_stock_quartiles=by_stock.quartiles if by_stock else None,
            over_seqd=by_seqd.median if by_seqd else None, over_seqd_quartiles=by_seqd.quartiles if by_seqd else None,
            cpu_over_stock=busy[name] / busy[STOCK] if busy.get(STOCK) else None,
            cpu_over_seqd=busy[name] / busy[SEQD.name] if runner and busy.get(SEQD.name) else None,
            stock_ms=1e3 * median(wall[STOCK]) if STOCK in wall else None,
        )  # fmt: skip
        out.append(figure if runner is None else told(figure, runner, model, load, speed, whole))
    return out


def told(figure: Figure, runner: Runner, model: DiffusionLM, load: Workload, speed: float, whole: bool) -> Figure:
    """The same with what only our own decoding has."""
    step = figure.ms_per_step / 1e3 if whole else runner.seconds / runner.steps
    return replace(
        figure, tokens_per_second=load.batch * runner.tokens / runner.steps / step,
        limit_share=step_bytes(model, load) / speed / (figure.ms_per_step / 1e3), peak_gib=runner.peak or None,
        mean_alpha=fmean(runner.alphas), storing_ms=1e3 * median(runner.storing) if runner.storing else None,
    )  # fmt: skip
