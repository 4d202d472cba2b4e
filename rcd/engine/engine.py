"""The engine: requests come in, rows are served together, answers go out.

The host launches the next step before it has read what the last one did: its knowledge lags by LAG steps, so a pass
may still have room for a row that has ended (`Stats.idle` counts that), and no step waits for the host. A request that
fails is an event like an answer, and disturbs no other.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from rcd.carry.residual import Residual
from rcd.decode.config import CACHED, DecodeConfig, fitting
from rcd.decode.events import Counts, Event, Failed, Finished, Step
from rcd.decode.step import Rules
from rcd.decode.stopping import check_prompts, cut
from rcd.diffusion.noise import signed
from rcd.engine.backbone import Backbone, Slots, check_room, made_cache, misfit
from rcd.engine.blocks import Blocks
from rcd.engine.canvas import Canvas
from rcd.engine.model import SlotModel
from rcd.engine.requests import Request as Request
from rcd.engine.requests import Serving, Stats
from rcd.engine.rows import REPORT, Rows, Terms
from rcd.engine.steps import Size, Steps, Told, Window
from rcd.errors import RCDError, whole
from rcd.kernels import parts_for
from rcd.models.lm import DiffusionLM

LAG = 1
WINDOWS: dict[str, Any] = {"blockwise": Blocks, "d2f": Blocks, **dict.fromkeys(CACHED, Canvas)}


def unfit(model: DiffusionLM, config: DecodeConfig) -> str | None:
    """Why the engine cannot decode this, or None; the plain windows can."""
    carry: Any = config.carry
    if misfit(model):
        return misfit(model)
    if config.window not in WINDOWS:
        able = [window for window in fitting(model.settings) if window in WINDOWS]
        return f"the window {config.window!r} is not one of those that it has for this model, {', '.join(able)}"
    if model.settings.shift and config.window not in CACHED:
        return "outputs predict the next position, and the one before a block is in the cache"
    if isinstance(carry, Residual) and (carry.source != "self" or carry.start != "zero") and not carry.starts_itself:
        return "the residual starts or lives by a reference, a Dirichlet draw or another T_res than the steps'"
    return None


def check_fit(model: DiffusionLM, config: DecodeConfig) -> None:
    reason = unfit(model, config)
    if reason:
        raise RCDError(
            f"the fast engine cannot decode this: {reason}; change that, or leave engine='fast' away: the plain "
            "windows decode it."
        )


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
        if not isinstance(model, DiffusionLM):
            raise RCDError(f"an engine is made of a model, such as pipeline.model, not of a {type(model).__name__}.")
        carry = config.carry
        if config.window is None or config.block_length is None or carry is None or isinstance(carry, str):
            raise RCDError("an engine's configuration must be complete; take pipeline.resolve(config).")
        check_fit(model, config)
        self.model, self.config, self.watch = model, config, watch
        whole("rows", rows, least=1)
        whole("capacity", capacity, least=1, most=model.settings.context_length)
        self.room = capacity
        self.window: Window = WINDOWS[config.window].of(Terms(config, carry, model.settings))
        terms, capacity = self.window.terms, self.window.room(capacity)
        check_room(model, rows, capacity)
        parts = parts_for(model.device)
        self.cache = made_cache(model, rows, capacity)
        backbone = Backbone(model, parts)
        backbone.turns(capacity)
        self.slotted = SlotModel(model, backbone, self.cache, parts)
        states = (rows + 1) * self.window.states
        none: Any = _Shape((states, terms.b, model.settings.vocab_size), model.device)
        cold: Any = replace(cast(Residual, config.carry), start="zero") if terms.starts else config.carry
        state = cold.refresh(None, none, model.codebook)
        mask = model.settings.mask_token_id
        self.rows = Rows.empty(rows, self.window.states, capacity, mask, state, model.device)
        self.on_gpu = model.device.type == "cuda"
        fused = parts.__name__.endswith(".fused")  # the plain parts ask the host, which no graph can
        rules = Rules.of(config, model.settings).summarising(model, config, parts)
        self.steps = Steps(
            self.window, self.slotted, rules, self.rows, self.on_gpu and fused and graphs is not False, watch
        )
        self.stats, self.edition = Stats(), model.edition
        self._serving: dict[int, Serving] = {}
        self._flying: deque[Told] = deque()
        """Steps launched that the host has not heard of."""
        self._serials = itertools.count()
        self._run: object = None
        self._rate = 1.0

    def suits(self, rows: int, capacity: int) -> bool:
        """Whether rows of that length can be served here without needless work, and the model is still what it was."""
        fits = self.room == capacity if self.window.whole else self.room >= capacity
        return fits and self.cache.rows >= rows and self.edition == self.model.edition

    def generate(self, requests: Iterable[Request]) -> list[Finished]:
        """The answers in the order of the requests. If some failed, the first failure is raised when all are done."""
        asked = list(requests)
        twice = next((one for one, count in Counter(map(_number, asked)).items() if count > 1), None)
        if twice is not None:
            raise RCDError(f"two requests have the number {twice}; give every one a number of its own.")
        told = {event.row: event for event in self.run(asked) if not isinstance(event, Step)}
        events = [told[request.number] for request in asked]
        for event in events:
            if isinstance(event, Failed):
                raise RCDError(event.message)
        return [event for event in events if isinstance(event, Finished)]

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> Iterator[Event | Failed]:
        """Serve all requests: a Finished or a Failed for each (and a Step for every step, where the engine watches). A
        run that is left before its end drops what it was serving, and the next one begins afresh: there is one at a
        time."""
        if self._run is not None:  # an open one; what was admitted by hand is served
            self._drop()
        self._run = mine = object()
        waiting, more = iter(requests), True
        try:
            while more or self._serving or self._flying:
                while more and len(self._serving) < self.cache.rows:
                    request = next(waiting, None)
                    more = request is not None
                    failed = self.admit(request) if request is not None else None
                    if failed is not None:
                        yield failed
                        self._still(mine)
                for event in self._turn():
                    yield event
                    self._still(mine)
        finally:
            if self._run is mine:
                self._run = None
                self._drop()

    def _still(self, run: object) -> None:
        if self._run is not run:
            raise RCDError("this run was left for another one of the same engine; take an engine for each.")

    def _turn(self) -> Iterator[Event | Failed]:
        """Launch a step, and hear of the one before."""
        while self._flying and self.window.must_hear(self._serving, self._rate):
            yield from self._hear(self._flying.popleft())
        if self._serving:
            try:
                self._flying.append(self._launch())
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

    def _launch(self) -> Told:
        rows = self.window.next(self._serving)
        size = self._size(rows)
        told = self.steps.launch(size, rows)
        self.stats.passes += 1
        self.stats.slots += self.window.slots(size)
        return told

    def _size(self, rows: tuple[int, ...]) -> Size:
        return self.window.size([self._serving[row] for row in rows], self.cache.rows, self._rate)

    @torch.inference_mode()
    def admit(self, request: Request) -> Failed | None:
        """Prefill the prompt's whole blocks and give the request a free row; or say why not."""
        _number(request)
        row = next((row for row in range(self.cache.rows) if row not in self._serving), None)
        if row is None:
            return Failed(request.number, f"all {self.cache.rows} rows are taken; `run` lets requests wait for one.")
        try:
            prompt = list(request.prompt) if isinstance(request.prompt, Iterable) else [request.prompt]
            request = replace(request, prompt=prompt)
            self._check(request)
            self._enter(row, request, passes=self._prefill(prompt, row))
        except RCDError as error:
            named = str(error).startswith("request ")
            return Failed(request.number, str(error) if named else f"request {request.number}: {error}")
        except torch.OutOfMemoryError:
            self.rows.active[row].fill_(False)
            torch.cuda.empty_cache()
            return Failed(
                request.number,
                f"request {request.number} of {len(prompt)} tokens ran out of memory; shorten it, or serve fewer rows.",
            )
        return None

    def _check(self, request: Request) -> None:
        """Refuse, before any work, what cannot be served."""
        new, settings = whole("new_tokens", request.new_tokens, least=1), self.model.settings
        for name, value in (("number", request.number), ("seed", request.seed or 0)):
            if not isinstance(value, int):
                raise RCDError(f"its {name} must be a whole number, not {value!r}.")
        if any(one.request.number == request.number for one in self._serving.values()):
            raise RCDError("another request of that number is being served; give every one a number of its own.")
        check_prompts([request.prompt], settings, new, *self.config.rounding(settings))
        total = self.window.needs(len(request.prompt), new)
        if total > self.cache.capacity:
            raise RCDError(
                f"request {request.number} needs {total} positions and the engine has {self.cache.capacity} a row; "
                "shorten it, or make the engine with a larger capacity."
            )

    def _enter(self, row: int, request: Request, passes: int) -> None:
        """Write the request into its row, which is active from here on."""
        serial, length, new = next(self._serials), len(request.prompt), request.new_tokens
        seed = signed(self.config.seed + request.number if request.seed is None else request.seed)
        self.rows.enter(
            row, _sent(request.prompt, self.model.device), self.model.settings.mask_token_id, prompt=length,
            limit=length + new, serial=serial, seed=seed, fresh=self.window.terms.starts,
            **self.window.begin(length, new),
        )  # fmt: skip
        self._serving[row] = Serving(request, serial, passes, **self.window.serving(length, new))  # type: ignore[arg-type]

    def _prefill(self, prompt: list[int], row: int) -> int:
        """Store what stands before the first decoded block, under the block-causal mask; returns the passes that it
        took."""
        device, passes = self.model.device, 0
        for start, end, unit in self.window.prefill(len(prompt)):
            position = torch.arange(start, end, device=device)
            seen = ((position // unit + 1) * unit).int()[None]
            slots = Slots(_sent([row], device).int(), _sent([start], device).int(), seen)
            self.slotted(_sent(prompt[start:end], device)[None], slots)
            passes += 1
        self.stats.prefills += passes
        return passes

    def _hear(self, told: Told) -> Iterator[Event | Failed]:
        """Read a report: what every row did, and which have ended."""
        told.wait()
        if self.watch:
            yield from self._steps(told)
        report = told.report.tolist()
        for row, one in list(self._serving.items()):
            serial, active, due, ahead, left, step, denoised, stored, broken, started = report[row]
            if serial != one.serial:
                continue
            if denoised > one.last and one.left > left:
                self._rate += 0.1 * (max(1, one.left - left) / (denoised - one.last) - self._rate)
            one.hear(due, ahead, left, step, denoised)
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
        took, start, draft, committed, masked, confidence, alpha = told.trace
        live = [row for row, on in enumerate(took.tolist()) if on and row in self._serving]
        if not live:
            return
        serving = [self._serving[row] for row in live]
        offsets = [int(start[row]) - len(one.request.prompt) for row, one in zip(live, serving, strict=True)]
        left = max(one.request.new_tokens - offset for one, offset in zip(serving, offsets, strict=True))
        here, carries = (live, slice(left + -left % self.window.terms.b)), self.rows.carry.alpha is not None
        yield Step(
            rows=[one.request.number for one in serving],
            offsets=offsets,
            number=[int(told.report[row][REPORT.index("denoised")]) for row in live],
            draft=draft[here], committed=committed[here], masked=masked[here], confidence=confidence[here],
            alpha=alpha[here] if carries else None,
        )  # fmt: skip


@dataclass(frozen=True)
class _Shape:
    """The passes that a cold start may ask for: none, only the shape."""

    shape: tuple[int, int, int]
    device: torch.device


def _number(request: Any) -> Any:
    if not isinstance(request, Request):
        raise RCDError(f"requests are Request(number, prompt, new_tokens), not a {type(request).__name__}.")
    return request.number


def _sent(values: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers on the device, without waiting for it."""
    here = torch.tensor(values, dtype=torch.long)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here
