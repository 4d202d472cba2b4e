"""The engine: requests come in, rows are served together, answers go out.

One step of all rows is one unit on the device: plan, embed, inject, backbone, head, sample, commit, carry, and the
rows' own moving on to their next block. On a GPU it is captured once for every size and replayed; on a CPU the same
functions run one after another. The host launches the next step before it has read what the last one did: its
knowledge lags by LAG steps, so a pass may still have room for a row that has ended (`Stats.idle` counts that), and no
step waits for the host. A request that fails is an event like an answer, and disturbs no other.
Shapes: A rows served, N slots, b block length.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rcd.carry.base import Carry, TensorState
from rcd.carry.none import NoCarry
from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Counts, Event, Failed, Finished, Step
from rcd.decode.lanes import prefill_piece
from rcd.decode.step import Rules, denoise
from rcd.decode.stopping import check_prompts, cut
from rcd.diffusion.noise import signed
from rcd.engine.backbone import Backbone, Cache, Slots, cache_bytes, misfit
from rcd.engine.compiling import compiled
from rcd.engine.rows import Ready, Rows, prepared, prepared_canvas, settle, starts_itself
from rcd.errors import RCDError, whole
from rcd.kernels import parts_for
from rcd.models.lm import DiffusionLM, Prediction

LAG = 1
CACHE_SHARE = 0.85
"""Of the memory that is free, the part that a cache may take; the rest is for the passes."""


@dataclass(frozen=True)
class Request:
    """One prompt. `number` is what its events are called by; no two of a run have the same."""

    number: int
    prompt: Sequence[int]
    new_tokens: int
    seed: int | None = None
    """What its tokens are drawn by; None: the configuration's seed and the number."""


@dataclass
class Stats:
    """What the engine did, over its life."""

    passes: int = 0
    """Steps launched; each serves many rows."""
    slots: int = 0
    """Slots computed in them, unused ones included."""
    idle: int = 0
    """Passes that had room for a row that had ended, counted for each row: the host did not know yet."""
    prefills: int = 0


@dataclass
class Serving:
    """What the host knows of a row."""

    request: Request
    serial: int
    prefills: int
    left: int
    """Masks left in its block when last heard of."""
    last: int = 0
    """Denoising steps when last heard of."""
    due: bool = False
    """Of a canvas: whether its next pass is a whole one."""


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


class SlotModel:
    """A `DiffusionLM` for the step function, over slots: the first A are predicted, the others only stored."""

    def __init__(self, model: DiffusionLM, backbone: Backbone, cache: Cache, parts: Any):
        self.model, self.backbone, self.cache, self.parts = model, backbone, cache, parts
        self.settings = model.settings

    @property
    def codebook(self) -> Tensor:
        return self.model.codebook

    def __call__(
        self, ids_NQ: Tensor, slots: Slots, carry: Carry | None = None, state: Any = None, inject: Tensor | None = None
    ) -> Prediction:
        predicted = 0 if inject is None else inject.shape[0]
        at = None if slots.places is None else (torch.arange(predicted, device=ids_NQ.device)[:, None], slots.places)
        embeds = self.model.embed(ids_NQ) if inject is None else self.embed(ids_NQ, carry, state, inject, at)
        hidden = self.backbone(embeds, slots, self.cache)
        hidden = hidden[:predicted] if at is None else hidden[at]
        head = self.model.head
        logits = self.parts.linear(hidden, head.weight, head.bias) if predicted else hidden
        return Prediction(logits, hidden)

    def embed(
        self, ids_NQ: Tensor, carry: Carry | None, state: Any, inject: Tensor | None, at: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """The input embeddings [N, Q, D], the carry's part among them (Eq. 2)."""
        assert carry is not None and inject is not None
        embeds = self.model.embed(ids_NQ)
        count = inject.shape[0]
        asked = embeds[:count] if at is None else embeds[at]
        injected = carry.inject(asked, inject, state, self.model.carry_parameters)
        return embeds.slice_scatter(injected, end=count) if at is None else embeds.index_put(at, injected)


def unfit(model: DiffusionLM, config: DecodeConfig) -> str | None:
    """Why the engine cannot decode this, or None; the plain windows can."""
    carry: Any = config.carry
    if misfit(model):
        return misfit(model)
    if config.window not in ("blockwise", "dual"):
        return f"the window {config.window!r} is not 'blockwise' or 'dual'"
    if config.window == "dual" and (model.settings.shift or config.refresh_every):
        return "outputs predict the next position" if model.settings.shift else "refresh_every is set"
    if config.window == "dual" and config.carry_scope != "block" and not isinstance(carry, NoCarry):
        return "the carry's scope is the canvas; with carry_scope='block' it can"
    if isinstance(carry, Residual) and (carry.source != "self" or carry.start != "zero") and not carry.starts_itself:
        return "the residual starts or lives by something else than predictions of a step's kind"
    return None


class Engine:
    """Decodes many requests at once on one model. `config` is a resolved DecodeConfig; `rows` texts of up to `capacity`
    positions run together."""

    def __init__(
        self,
        model: DiffusionLM,
        config: DecodeConfig,
        *,
        rows: int,
        capacity: int,
        graphs: bool | None = None,
        watch: bool = False,
    ):
        reason = unfit(model, config)
        if reason:
            raise RCDError(f"the fast engine cannot decode this: {reason}; use the plain windows.")
        assert config.block_length is not None and not isinstance(config.carry, str) and config.carry is not None
        self.model, self.config, self.b, self.watch = model, config, config.block_length, watch
        self.canvas = config.window == "dual"
        whole("rows", rows, least=1)
        whole("capacity", capacity, least=1, most=model.settings.context_length)
        self.room = capacity
        capacity += -(config.new_tokens if self.canvas else capacity) % self.b  # the last block is a whole one
        check_room(model, rows, capacity)
        self.parts = parts_for(model.device)
        self.rules = Rules.of(config, model.settings).summarising(model, config, self.parts)
        self.cache = _made(model, rows, capacity)
        backbone = Backbone(model, self.parts)
        backbone.turns(capacity)
        self.slotted = SlotModel(model, backbone, self.cache, self.parts)
        mask = model.settings.mask_token_id
        self.rows = Rows.empty(rows, capacity, mask, self._no_state(rows + 1), model.device)
        self.on_gpu = model.device.type == "cuda"
        fused = self.parts.__name__.endswith(".fused")  # the plain parts ask the host, which no graph can
        self.graphs = self.on_gpu and fused and graphs is not False
        self.stats = Stats()
        self._prepared: Any = prepared_canvas if self.canvas else prepared
        self._settled: Any = settle
        if self.graphs:
            self._compile()
        self._units: dict[tuple[int, int], Unit] = {}
        """By size: (rows served, slots); of a canvas, (rows served, 1 for a whole one or 0 for its block)."""
        self._pool: Any = None
        self._serving: dict[int, Serving] = {}
        self._flying: deque[Told] = deque()
        """Steps launched that the host has not heard of."""
        self._serials = itertools.count()
        self._rate = 1.0

    def _compile(self, backend: Any = "inductor") -> None:
        """The bookkeeping around the pass as a few kernels."""
        made = partial(compiled, capacity=self.cache.capacity, backend=backend)
        self._prepared, self._settled = made(self._prepared), made(settle)
        self.rules = replace(self.rules, choose=made(self.rules.choose))
        self.slotted.embed = made(self.slotted.embed)  # type: ignore[method-assign]

    def _no_state(self, rows: int) -> Any:
        passes = _Shape((rows, self.b, self.model.settings.vocab_size), self.model.device)
        carry: Any = self.config.carry
        cold = replace(carry, start="zero") if starts_itself(self.config) else carry
        return cold.refresh(None, passes, self.model.codebook)

    # -- one step ------------------------------------------------------------------------------------------------

    def _step(self, served: int, slots: int) -> tuple[Tensor, ...]:
        """Algorithm 2 for all rows, once: (report, trace...)."""
        rows, config, settings = self.rows, self.config, self.model.settings
        eos, mask = settings.eos_token_ids, settings.mask_token_id
        if self.canvas:
            made, given, view, ids = self._prepared(
                rows, served, bool(slots), self.cache.capacity, config, self.rules.carry, mask, eos
            )
        else:
            made, given = self._prepared(rows, served, slots, config, self.rules.carry, mask, eos)
            view, ids = made.slots(self.b), given.ids
        row, model = made.row[:served], cast(DiffusionLM, self.slotted)
        outcome = denoise(
            model, self.rules, ids, view, rows.carry.rows(row), given.candidates, given.quota, given.noise,
            given.inject,
        )  # fmt: skip
        report = self._settled(rows, made, given, outcome, config, mask, eos)
        return (report, *self._trace(row, given, outcome)) if self.watch else (report,)

    def _trace(self, row: Tensor, given: Ready, outcome: Any) -> tuple[Tensor, ...]:
        """What a Step event needs of the rows that took the step."""
        live = given.candidates.any(-1)
        committed = outcome.committed & live[:, None]
        draft = torch.where(given.masked, outcome.token, given.ids[: len(row)])
        confidence = outcome.confidence.float().masked_fill(~given.masked, float("nan"))
        start = self.rows.start[row]
        alpha = outcome.state.alpha if outcome.state.alpha is not None else torch.zeros_like(confidence)
        after = self.rows.text[row[:, None], self._before(row, start)] == self.model.settings.mask_token_id
        return torch.where(live, row, -1), self._before(row, start)[:, 0], draft, committed, after, confidence, alpha

    def _before(self, row: Tensor, start: Tensor) -> Tensor:
        """Positions of the block that the step has computed: a row that moved on is one block further."""
        moved = self.rows.pending[row]
        return (start - self.b * moved.long())[:, None] + torch.arange(self.b, device=start.device)

    def _launch(self, rows: tuple[int, ...]) -> Told:
        served, slots = self._size(rows)
        unit = self._units.setdefault((served, slots), Unit())
        unit.used += 1
        if self.graphs and unit.used == 2:
            self._capture(unit, served, slots)
        if unit.graph is not None:
            unit.graph.replay()
        else:
            unit.outputs = self._step(served, slots)
        self.stats.passes += 1
        self.stats.slots += served if self.canvas else slots
        return self._tell(unit.outputs, rows)

    def _capture(self, unit: Unit, served: int, slots: int) -> None:
        """Record the step for replay, which computes nothing; where that fails (also for want of memory), say so once
        and record no more: what is already recorded is still replayed."""
        try:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool):
                unit.outputs = self._step(served, slots)
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

    # -- requests ------------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> list[Finished]:
        """The answers in the order of the requests. If some failed, the first failure is raised when all are done."""
        asked = list(requests)
        told = {event.row: event for event in self.run(asked) if not isinstance(event, Step)}
        events = [told[request.number] for request in asked]
        for event in events:
            if isinstance(event, Failed):
                raise RCDError(event.message)
        return [event for event in events if isinstance(event, Finished)]

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> Iterator[Event | Failed]:
        """Serve all requests: a Finished or a Failed for each (and a Step for every step, where the engine watches). A
        run that is left before its end drops what it was serving, and the next one begins afresh."""
        waiting, more = iter(requests), True
        try:
            while more or self._serving or self._flying:
                while more and len(self._serving) < self.cache.rows:
                    request = next(waiting, None)
                    more = request is not None
                    failed = self.admit(request) if request is not None else None
                    if failed is not None:
                        yield failed
                yield from self._turn()
        finally:
            self._drop()

    def _turn(self) -> Iterator[Event | Failed]:
        """Launch a step, and hear of the one before."""
        while self._flying and self._must_hear():
            yield from self._hear(self._flying.popleft())
        if self._serving:
            try:
                self._flying.append(self._launch(self._next()))
            except torch.OutOfMemoryError:
                yield from self._give_up()
        if self._flying and (len(self._flying) > LAG or not self._serving):
            yield from self._hear(self._flying.popleft())

    def _give_up(self) -> Iterator[Event | Failed]:
        """A step ran out of memory: rows may be half updated, so that none can go on. Those that had ended before are
        answered."""
        while self._flying:
            yield from self._hear(self._flying.popleft())
        dropped = [one.request.number for one in self._serving.values()]
        self._drop()
        torch.cuda.empty_cache()
        for number in dropped:
            yield Failed(
                number,
                f"request {number} was dropped: a step of {len(dropped)} rows ran out of memory; serve fewer rows, or "
                "make the engine with a smaller capacity.",
            )

    def _drop(self) -> None:
        """Forget what is being served; every row is free."""
        self._serving.clear()
        self._flying.clear()
        self.rows.active.zero_()

    def _must_hear(self) -> bool:
        """Of a canvas: whether a row may have finished its block in a step that is still unheard of. What comes next is
        then another kind of pass, and the host waits; at most once a block and row."""
        return self.canvas and any(one.due or one.left <= math.ceil(self._rate) for one in self._serving.values())

    def _next(self) -> tuple[int, ...]:
        """The rows that the next pass is for. Of a canvas: those that read all of it, if there are any."""
        due = tuple(row for row, one in self._serving.items() if one.due)
        return due or tuple(self._serving)

    def _size(self, rows: tuple[int, ...]) -> tuple[int, int]:
        """(rows served, slots): rounded up, so that few sizes are captured. Slots for finished blocks are there for the
        rows that will probably have finished one in the step that is still unheard of."""
        served = _rounded(len(rows), self.cache.rows)
        if self.canvas:
            return served, int(self._serving[rows[0]].due)
        likely = sum(self._serving[row].left <= math.ceil(self._rate) for row in rows)
        extra = next(share for share in (0, -(-served // 4), -(-served // 2), served) if share >= min(likely, served))
        return served, served + extra

    @torch.inference_mode()
    def admit(self, request: Request) -> Failed | None:
        """Prefill the prompt's whole blocks and give the request a free row; or say why not."""
        row = next((row for row in range(self.cache.rows) if row not in self._serving), None)
        if row is None:
            return Failed(request.number, f"all {self.cache.rows} rows are taken; `run` lets requests wait for one.")
        prompt = list(request.prompt)
        try:
            self._check(request, prompt)
            self._enter(row, request, prompt, passes=0 if self.canvas else self._prefill(prompt, row))
        except RCDError as error:
            return Failed(request.number, str(error))
        except torch.OutOfMemoryError:
            self.rows.active[row].fill_(False)
            torch.cuda.empty_cache()
            return Failed(
                request.number,
                f"request {request.number} of {len(prompt)} tokens ran out of memory; shorten it, or serve fewer rows.",
            )
        return None

    def _check(self, request: Request, prompt: list[int]) -> None:
        """Refuse, before any work, what cannot be served."""
        new = whole("new_tokens", request.new_tokens, least=1)
        check_prompts([prompt], self.model.settings, new, 1 if self.canvas else self.b)
        first = len(prompt) if self.canvas else 0  # where the grid of blocks begins
        total = first - (first - len(prompt) - new) // self.b * self.b
        if total > self.cache.capacity:
            raise RCDError(
                f"request {request.number} needs {total} positions and the engine has {self.cache.capacity} a row; "
                "shorten it, or make the engine with a larger capacity."
            )

    def _enter(self, row: int, request: Request, prompt: list[int], passes: int) -> None:
        """Write the request into its row, which is active from here on."""
        serial, rows = next(self._serials), self.rows
        seed = signed(self.config.seed + request.number if request.seed is None else request.seed)
        first, limit = len(prompt) if self.canvas else len(prompt) // self.b * self.b, len(prompt) + request.new_tokens
        rows.text[row].fill_(self.model.settings.mask_token_id)
        rows.text[row, : len(prompt)] = _sent(prompt, self.model.device)
        for value, number in (
            (rows.start, first), (rows.pending, self.canvas), (rows.prompt, len(prompt)), (rows.limit, limit),
            (rows.step, 0), (rows.denoised, 0), (rows.stored, 0), (rows.broken, 0), (rows.serial, serial),
            (rows.seed, seed), (rows.fresh, starts_itself(self.config)), (rows.started, 0), (rows.active, True),
        ):  # fmt: skip
            value[row].fill_(number)
        if isinstance(rows.carry, TensorState):
            for state in rows.carry._tensors():
                state[row].zero_()
        self._serving[row] = Serving(request, serial, passes, left=first + self.b - len(prompt), due=self.canvas)

    def _prefill(self, prompt: list[int], row: int) -> int:
        """Store the prompt's whole blocks, under the block-causal mask; returns the passes that it took."""
        end, piece, device = len(prompt) // self.b * self.b, prefill_piece(self.b), self.model.device
        for start in range(0, end, piece):
            ids = _sent(prompt[start : min(start + piece, end)], device)[None]
            position = torch.arange(start, start + ids.shape[1], device=device)
            seen = ((position // self.b + 1) * self.b).int()[None]
            self.slotted(ids, Slots(_sent([row], device).int(), _sent([start], device).int(), seen))
        passes = -(-end // piece)
        self.stats.prefills += passes
        return passes

    def _hear(self, told: Told) -> Iterator[Event | Failed]:
        """Read a report: what every row did, and which have ended."""
        told.wait()
        if self.watch:
            yield from self._steps(told)
        report = told.report.tolist()
        for row, one in list(self._serving.items()):
            serial, active, pending, left, denoised, stored, broken, started = report[row]
            if serial != one.serial:
                continue
            if denoised > one.last and one.left > left:
                self._rate += 0.1 * (max(1, one.left - left) / (denoised - one.last) - self._rate)
            one.left, one.last, one.due = (left or self.b), denoised, self.canvas and bool(pending)
            if active:
                continue
            del self._serving[row]
            self.stats.idle += sum(row in later.rows for later in self._flying)
            counts = Counts(denoising=denoised, prefill=one.prefills, store=stored, start=started)
            yield self._ended(row, one, broken, counts)

    def _ended(self, row: int, one: Serving, broken: int, counts: Counts) -> Finished | Failed:
        number = one.request.number
        if broken:
            return Failed(
                number,
                f"the model's logits are NaN or inf at denoising step {broken} of request {number}; "
                "try float32 (--dtype float32), and check the checkpoint with `rcd info --check`.",
            )
        return Finished(number, *self._answer(row, one.request), counts)

    def _answer(self, row: int, request: Request) -> tuple[list[int], str]:
        length = len(request.prompt)
        new = self.rows.text[row, length : length + request.new_tokens].tolist()
        return cut(new, self.model.settings.eos_token_ids, request.new_tokens)

    def _steps(self, told: Told) -> Iterator[Event]:
        row, start, draft, committed, masked, confidence, alpha = told.trace
        live = [k for k, r in enumerate(row.tolist()) if r >= 0 and r in self._serving]
        if not live:
            return
        serving = [self._serving[int(row[k])] for k in live]
        carries = self.rows.carry.alpha is not None
        yield Step(
            rows=[one.request.number for one in serving],
            offsets=[int(start[k]) - len(one.request.prompt) for k, one in zip(live, serving, strict=True)],
            number=[int(told.report[int(row[k])][4]) for k in live],
            draft=draft[live], committed=committed[live], masked=masked[live], confidence=confidence[live],
            alpha=alpha[live] if carries else None,
        )  # fmt: skip


@dataclass(frozen=True)
class _Shape:
    """The passes that a cold start may ask for: none, only the shape."""

    shape: tuple[int, int, int]
    device: torch.device


def _rounded(count: int, most: int) -> int:
    """Up to the next of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, ..."""
    power = 1 << (count - 1).bit_length()
    between = 3 * power // 4
    return min(between if power > 16 and between >= count else power, most)


def _sent(values: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers on the device, without waiting for it."""
    here = torch.tensor(values, dtype=torch.long)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def _made(model: DiffusionLM, rows: int, capacity: int) -> Cache:
    try:
        return Cache(model, rows, capacity)
    except torch.OutOfMemoryError as error:
        raise RCDError(
            f"the cache of {rows} rows of {capacity} positions ran out of memory; take fewer or shorter rows."
        ) from error


def check_room(model: DiffusionLM, rows: int, capacity: int) -> None:
    """Refuse a cache that cannot fit, and say what would."""
    if model.device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(model.device)
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    room, needed = int(CACHE_SHARE * free), cache_bytes(model, rows, capacity)
    if needed <= room:
        return
    fewer, shorter = room // cache_bytes(model, 0, capacity) - 1, room // cache_bytes(model, rows, 1) // 64 * 64
    ways = [f"{fewer} rows of that length"] if fewer > 0 else []
    ways += [f"{rows} rows of {shorter}"] if shorter > 0 else []
    raise RCDError(
        f"the cache of {rows} rows of {capacity} positions needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are "
        f"free; {' or '.join(ways) + ' would fit' if ways else 'no cache fits beside this model'}."
    )
