"""The engine: rows are served together, requests enter as others leave, answers go out.

`Engine.turn` is one turn of its loop: a piece of a prompt, a step, and what the step before it did. Where the device
runs by itself (CUDA), the host launches the next step before it has read what the last one did: its knowledge lags by a
step, so a pass may still have room for a row that has ended (`Stats.idle` counts that), and no step waits for the host.
A request that fails is an event like an answer, and disturbs no other. One thread at a time may drive an engine;
`rcd.decode.loop` is for many callers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from functools import reduce

import torch

from rcd import registry
from rcd.decode import reporting
from rcd.decode.answers import Answer, Text
from rcd.decode.config import DecodeConfig
from rcd.decode.events import Event, Failed
from rcd.decode.filling import Filling, check_canvas
from rcd.decode.guidance import Guided, Unconditional
from rcd.decode.model import SlotModel
from rcd.decode.prefixes import Prefixes
from rcd.decode.probe import Prober
from rcd.decode.prompts import PIECE_BUDGET, PromptReader, sent
from rcd.decode.remembered import check_memory
from rcd.decode.requests import Request, RowReport, Serving, Stats
from rcd.decode.rows import FRACTIONS, Rows
from rcd.decode.step import Rules
from rcd.decode.stopping import check_prompts
from rcd.decode.terms import Features, Terms
from rcd.decode.units import Report, Units
from rcd.decode.window import Window
from rcd.diffusion.noise import signed
from rcd.errors import RCDError, first_line, out_of_memory, whole
from rcd.models.lm import DiffusionLM


class Engine:
    """Decodes many requests at once on one model. `config` is a resolved DecodeConfig, of which the requests' own
    part is not read; `rows` texts of up to `capacity` positions run together. `text` makes token ids a text, for
    stop strings. `prefixes` keeps what has been read of prompts."""

    def __init__(
        self, model: DiffusionLM, config: DecodeConfig, *, rows: int, capacity: int,
        reference: DiffusionLM | None = None, graphs: bool | None = None, text: Text | None = None,
        prefixes: Prefixes | None = None,
    ):  # fmt: skip
        if not isinstance(model, DiffusionLM):
            raise RCDError(f"an engine is made of a model, such as pipeline.model, not of a {type(model).__name__}.")
        if None in (config.window, config.block_length) or isinstance(config.carry, str | None):
            raise RCDError("an engine's configuration must be complete; take pipeline.resolve(config).")
        assert config.window is not None
        carry, settings = config.travelling, model.settings
        if carry.needs_reference and reference is None:
            raise RCDError("this carry needs a reference model; name one with reference (--reference).")
        if config.batch_invariant and model.device.type != "cpu":
            raise RCDError("batch_invariant is for a CPU: a GPU's products depend on the batch; leave it out.")
        self.model, self.config = model, config
        whole("rows", rows, least=1)
        whole("capacity", capacity, least=1)
        rules = Rules.of(config, settings)
        terms = Terms(self.config, carry, settings, model.device, rules)
        self.window: Window = registry.get("window", config.window)(terms, capacity)
        self.capacity, self.rows_most = capacity, rows
        made = dict(shared=self.window.shared, passes=config.passes, apart=config.batch_invariant)
        room = capacity + self.window.spare
        self.target = SlotModel(model, rows, room, **made)
        self.uncond = Unconditional(model, rows, room, **made) if self.config.guidance else None
        self.reference = None
        if reference is not None and carry.needs_reference:
            self.reference = SlotModel(reference, rows, room, **made, mask=settings.mask_token_id)
        self.version = self._version()  # the packed weights, which this engine may just have put together
        states = (rows + 1) * self.window.states
        with torch.inference_mode():
            wide = torch.promote_types(model.codebook.dtype, torch.float32)
            cold = carry.cold((states, self.window.unit), model.codebook)
            check_memory(model, config, rows, capacity)
            memory = rules.remembered(
                (states, self.window.unit), settings.vocab_size, config.klass_history, model.codebook
            )
            self.rows = Rows.empty(rows, self.window.states, room, terms, cold, memory, wide)
        on_gpu = model.device.type == "cuda"
        graphs = on_gpu and graphs is not False and all(each.replayable for each in self.models)
        rules = rules.summarising(model, config, self.target.parts)
        target = self.target if self.uncond is None else Guided(self.target, self.uncond, self.rows)
        self.units = Units(self.window, target, self.reference, rules, self.rows, graphs)
        self.lag = 1 if on_gpu and not terms.starts else 0
        self.stats, self.text = Stats(), text
        shared = None if config.batch_invariant else prefixes  # the bits would depend on what was read before
        self.prompts = PromptReader(self.models, self.rows, self.stats, terms.b, shared)
        self.serving: dict[int, Serving] = {}
        self._flying: deque[Report] = deque()
        """Steps launched that the host has not heard of."""
        self._serials = itertools.count()
        self._rate = 1.0

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return self.rows_most - len(self.serving)

    @property
    def busy(self) -> bool:
        return bool(self.serving or self._flying)

    def suits(self, needed: int) -> bool:
        """Whether texts of so many positions have room, and the weights are still what they were."""
        return self.capacity >= needed and self.version == self._version()

    def _version(self) -> list[tuple[object, ...]]:
        return [each.model.weights_version for each in self.models]

    @property
    def models(self) -> list[SlotModel]:
        """Each with a cache of its own."""
        return [each for each in (self.target, self.uncond, self.reference) if each is not None]

    @torch.inference_mode()
    def admit(self, request: Request) -> Failed | None:
        """Give the request a free row; or say why not."""
        try:
            prompt = list(request.prompt) if isinstance(request.prompt, Iterable) else [request.prompt]
            new, ends = request.settings.new_tokens, [*self.model.settings.eos_token_ids, *request.settings.stop_ids]
            check_prompts([prompt], self.model.settings, new, *self.config.rounding(self.model.settings))
            check_canvas(request.canvas, new, self.model.settings, ends)
            total = self.window.needs(len(prompt), new)
            if total > self.capacity:
                raise RCDError(
                    f"it needs {total} positions and the engine has {self.capacity} a row; shorten it, or make the "
                    "engine with a larger capacity."
                )
            row = next((row for row in range(self.rows_most) if row not in self.serving), None)
            if row is None:
                raise RCDError(f"all {self.rows_most} rows are taken; wait until one is free.")
        except RCDError as error:
            return Failed(request.row, str(error))
        try:
            self._enter(row, request, prompt, total)
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:  # such as a number that no tensor holds
            self.drop(row, keep=False)
            self.rows.leave(row)
            return Failed(
                request.row, f"the request could not be written into its row ({first_line(error)}).", cause=error
            )
        return None

    def _enter(self, row: int, request: Request, prompt: list[int], total: int) -> None:
        """Write the request into its row."""
        settings, model, length, starts = request.settings, self.model, len(prompt), self.window.terms.starts
        ends, mask = [*model.settings.eos_token_ids, *settings.stop_ids], model.settings.mask_token_id
        new = settings.new_tokens
        filling = Filling.of(request.canvas, new, mask, ends, self.window.terms.early)
        segment, *later = self.window.segments(length, new, filling)
        own, known = self.window.begin(length, new, segment, filling)
        self.rows.enter(
            row, sent([*prompt, *filling.ids], model.device), ends, mask, prompt=length, limit=length + new,
            closing=length + filling.last, serial=-1, fresh=starts,
            seed=signed(settings.seed), steps=settings.num_inference_steps or 0, scale=settings.residual_scale,
            **{name: getattr(settings, name) for name in (*FRACTIONS, "top_k", "max_post_steps") if name != "scale"},
            **own,
        )  # fmt: skip
        generator = None
        if self.window.terms.carry.start_draws:
            place = model.device if model.device.type == "cuda" else torch.device("cpu")
            generator = torch.Generator(place).manual_seed(settings.seed)
        self.serving[row] = one = Serving(
            request, next(self._serials),
            Answer(request.row, settings, model.settings.eos_token_ids, self.text, filling),
            prompt, RowReport(fresh=starts, **known), total, segments=later, generator=generator,
            pieces=self.window.prefill(length, segment.read, segment.start),
        )  # fmt: skip
        if one.piece is None:
            self.prompts.begin(row, one)

    def _resume(self, row: int, one: Serving) -> None:
        """A row has come to blocks that are given: they are read, with the finished blocks before them, and it goes on
        behind them. Steps that are in flight find it idle, and their reports, under the serial that it had, say nothing
        of it."""
        segment, length, rows = one.segments.pop(0), len(one.prompt), self.rows
        own, known = self.window.begin(length, one.request.settings.new_tokens, segment, one.answer.filling)
        behind = int(torch.maximum(rows.pending, rows.referred)[row]) * self.window.terms.b
        first, *others = self.window.prefill(length, segment.read, segment.start)
        stores = int(rows.stored[row]) + self.window.stores  # its last block, for those behind it
        rows.resume(row, **own, stored=stores, fresh=self.window.terms.starts)
        one.serial = next(self._serials)
        one.last = RowReport(denoised=one.last.denoised, stored=stores, fresh=self.window.terms.starts, **known)
        one.read(iter([first._replace(start=first.start - behind), *others]))

    def drop(self, row: int, keep: bool = True) -> None:
        """Free a row at once; what is in flight for it is not heard. `keep`: its blocks may serve others."""
        one = self.serving.pop(row, None)
        if one is not None:
            with torch.inference_mode():
                if keep:
                    self.prompts.keep(row, one)
                self.rows.leave(row)

    def cancel(self, number: int) -> None:
        """Free the row of the request of that number."""
        for row, one in list(self.serving.items()):
            if one.request.row == number:
                self.drop(row)

    def drop_all(self) -> None:
        """Forget what is being served; every row is free."""
        self._flying.clear()
        for row in list(self.serving):
            self.drop(row, keep=False)

    @torch.inference_mode()
    def turn(self) -> list[Event]:
        """Read on in the prompts, launch a step, and read the report of the one before."""
        events: list[Event] = []
        try:
            events += self._read(PIECE_BUDGET)
            while self._flying and self.window.must_wait(self.deciding(), self._rate):
                events += self._poll()
            if self.deciding():
                self._start()
                self._flying.append(self._launch())
                events += reporting.failed_probes(self)
            while self._flying and (len(self._flying) > self.lag or not self.deciding()):
                events += self._poll()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            events += self._give_up()
        return events

    def _read(self, budget: int) -> list[Event]:
        """Read on in the prompts; one for which there is no memory fails alone."""
        try:
            self.prompts.read(self.serving, budget)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            row = self.prompts.reading
            number, length = self.serving[row].request.row, len(self.serving[row].prompt)
            self.drop(row)
            return [Failed(number, f"a prompt of {length} tokens ran out of memory; shorten it, or serve fewer rows.")]
        return []

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Serve all requests, by the caller's own thread: each is asked for when a row is free."""
        waiting, more = iter(requests), True
        while more or self.busy:
            while more and self.free:
                request = next(waiting, None)
                more = request is not None
                failed = self.admit(request) if request is not None else None
                if failed is not None:
                    yield failed
            yield from self.turn()

    @torch.inference_mode()
    def prefill_all(self) -> None:
        """Read every prompt to its end, before any step."""
        self.prompts.read(self.serving, None)

    def deciding(self) -> dict[int, Serving]:
        """The rows that take steps."""
        return {row: one for row, one in self.serving.items() if one.pieces is None}

    def _start(self) -> None:
        """The passes (or draws) from which fresh rows' carries start."""
        carry = self.window.terms.carry
        while fresh := {row: one for row, one in self.deciding().items() if one.last.fresh}:
            if carry.start_pass == "none":
                chosen = tuple(fresh)
                for row, one in fresh.items():
                    self.units.draw(row, len(one.prompt), one.request.settings.new_tokens, one.generator)
            else:
                chosen, size = self.window.start(fresh)
                self.units.start(size, [fresh[row].generator for row in chosen if carry.start_draws])
                self.stats.starts += 1
            for one in map(fresh.__getitem__, chosen):
                stored = carry.start_pass == "own" and self.window.stores_at_start
                one.last = one.last._replace(fresh=0, due=0 if stored else one.last.due)
                one.references += carry.start_pass == "reference"
                one.starts += carry.start_pass == "own"

    def _launch(self) -> Report:
        deciding = self.deciding()
        rows = self.window.next(deciding)
        chosen = [deciding[row] for row in rows]
        features = reduce(Features.join, (one.request.features for one in deciding.values()))
        size = self.window.size(chosen, self.rows_most, self._rate) if self.lag else self.window.exact_size(chosen)
        record = Prober(self, rows) if features.probed else None
        report = self.units.launch(size, features, rows, record)
        self.stats.passes += 1
        self.stats.slots += self.window.slots(size)
        for one in chosen:
            one.tick = self.stats.passes
        return report

    def _poll(self) -> list[Event]:
        """Read the oldest report: what every row did, and which have ended."""
        report = self._flying.popleft()
        report.wait()
        rows = [RowReport(*values) for values in report.values.tolist()]
        events = reporting.steps(self, report.trace, rows)
        for row, one in list(self.deciding().items()):
            before, now = one.last, rows[row]
            if now.serial != one.serial:
                continue
            if now.denoised > before.denoised and before.masks > now.masks:
                self._rate += 0.1 * ((before.masks - now.masks) / (now.denoised - before.denoised) - self._rate)
            one.last = now
            if now.active:
                continue
            if one.segments and not now.broken:
                self._resume(row, one)
                continue
            self.stats.idle += sum(row in later.rows for later in self._flying)
            events.append(reporting.finished(self, row, one))
            self.drop(row)
            for model in self.models if now.broken else ():
                model.cache.clear(row)
        return events

    def _give_up(self) -> list[Event]:
        """A step ran out of memory: rows may be half updated, so that none can go on. Those that had ended before are
        answered."""
        events: list[Event] = []
        while self._flying:
            events += self._poll()
        dropped = [one.request.row for one in self.serving.values()]
        self.drop_all()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        why = f"a step of {len(dropped)} rows ran out of memory; serve fewer rows, or shorter ones."
        return [*events, *(Failed(row, f"the request was dropped: {why}") for row in dropped)]
