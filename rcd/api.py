"""The public face: `rcd.load(path)` gives a Pipeline, whose `generate` and `stream` decode text or token ids."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rcd import scoring
from rcd.asking import check_call, keywords, row_seeds, with_settings
from rcd.carry.base import Carry, describe
from rcd.decode import simple
from rcd.decode.config import DecodeConfig, capacity_for
from rcd.decode.engine import Engine
from rcd.decode.events import Event, Failed, Finished
from rcd.decode.fused import misfit
from rcd.decode.handle import Events, Handle, Sink, follow
from rcd.decode.loop import DecodeLoop, Plan
from rcd.decode.prefixes import Prefixes
from rcd.decode.probe import Look
from rcd.decode.remembered import remembered_bytes
from rcd.decode.requests import Request
from rcd.decode.slots import cache_bytes
from rcd.errors import RCDError, one_of, told
from rcd.generation import Generation as Generation
from rcd.generation import Output as Output
from rcd.likelihood.estimate import Score as Score
from rcd.likelihood.settings import ScoreConfig as ScoreConfig
from rcd.models import checkpoint as ckpt
from rcd.models import writing
from rcd.models.adopting import adopt
from rcd.models.checkpoint import Checkpoint
from rcd.models.learnt import check_held
from rcd.models.lm import DiffusionLM, ModelSettings
from rcd.models.placing import chosen as chosen_place
from rcd.models.placing import move
from rcd.models.quantise import Quantisation
from rcd.models.settings import RCDFile
from rcd.streaming import Ends, check_streamer, streamed
from rcd.texts import Canvas, Canvases, Prompt, Prompts, Texts

MOST_ROWS = 128
"""Requests that an engine serves together; more wait for a free row."""
LEAST_ROWS, LEAST_BYTES = 8, 2**29
"""On a CPU an engine has so many at least, if their cache takes no more than that: other threads may call."""
Configs = DecodeConfig | Sequence[DecodeConfig] | None
Probe = Callable[[Look], None]


class Pipeline(Texts):
    """A loaded checkpoint that decodes. Its methods may be called from any number of threads."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__(checkpoint)
        self.loop = DecodeLoop()

    def __repr__(self) -> str:
        model, settings = self.model, self.settings
        size, dtype = model.size, str(model.codebook.dtype)[6:]
        dtype = f"{model.quantised} in {dtype}" if model.quantised else dtype
        carry = (self.checkpoint.rcd.carry or {"name": "none"})["name"]
        return (
            f"Pipeline({settings.family}, {size:,} parameters, {dtype} on {model.device}, "
            f"window {settings.window}, block length {settings.block_length}, carry {carry})"
        )

    @property
    def model(self) -> DiffusionLM:
        """The network with its facts."""
        return self.checkpoint.model

    @property
    def settings(self) -> ModelSettings:
        """What decoding must know of the checkpoint: ids, attention, block length, context."""
        return self.model.settings

    @property
    def untrained(self) -> bool:
        """A causal model that is only the start of an adaptation."""
        return self.model.spec.causal and self.checkpoint.rcd.stage is None

    def resolve(
        self, config: DecodeConfig | None = None, longest_prompt: int = 0, canvas: int = 0
    ) -> DecodeConfig:  # fmt: skip
        """The configuration with every None filled in from the checkpoint; `canvas`: its length, which is the answer's
        where the configuration has none."""
        if config is not None and not isinstance(config, DecodeConfig):
            raise RCDError(f"a configuration is a DecodeConfig, not a {type(config).__name__}.")
        if canvas and (config is None or config.max_new_tokens is None):
            config = replace(config or DecodeConfig(), max_new_tokens=canvas)
        resolved = (config or DecodeConfig()).resolved(self.settings, self.checkpoint.rcd.carry, longest_prompt)
        check_held(self.model, resolved.travelling)
        reason = misfit(self.model) if resolved.passes == "fused" else None
        if reason:
            raise RCDError(f"this model cannot be run through packed weights: {reason}; leave passes='fused' out.")
        if resolved.stop and self.tokenizer is None:
            raise RCDError("stop strings are texts, and this checkpoint has no tokenizer; take stop_ids.")
        return resolved

    @keywords(DecodeConfig)
    def generate(
        self, prompts: Prompts | None = None, config: Configs = None, *, canvas: Canvases = None,
        reference: Pipeline | None = None, generator: torch.Generator | None = None, seeds: Sequence[int] | None = None,
        chat: bool | None = None, probe: Probe | None = None, streamer: Any = None, **settings: Any,
    ) -> Output:  # fmt: skip
        """Decode to the end: a text, token ids, chat messages, or several of them.

        `config`: one DecodeConfig for all, or one for every prompt; its settings may stand here as well, such as
        `threshold=0.9`. `canvas`: the answer's beginning with masks, for all prompts or one for each; without prompts,
        a canvas that begins with words is both. `seeds` (one a row), else `generator`, else the configuration's seed
        seed the rows' own draws; `chat` wraps plain texts in the tokenizer's chat template (None: when it has one).
        `probe` is shown every step (`rcd.decode.probe`). `streamer` is one of transformers', for one prompt."""
        began, results, failed = time.perf_counter(), dict[int, Generation](), list[Failed]()
        rows, canvases = self.encode_both(prompts, chat, canvas)
        config = with_settings(config, settings)
        given: Any = dict(probe=probe, watch=streamer is not None)
        events = self._events(rows, canvases, config, reference, generator, seeds, **given)
        if streamer is not None:
            check_streamer(streamer, len(rows))
            events = streamed(events, rows[0], streamer, self._ends(config, canvases[0]))
        for event in events:
            if isinstance(event, Finished):
                results[event.row] = self.generation(event, event.at - began)
            elif isinstance(event, Failed):
                failed.append(event)
        if failed:
            first = min(failed, key=lambda event: event.row)
            raise RCDError(f"prompt {first.row}: {first.message}" if len(rows) > 1 else first.message) from first.cause
        return Output([results[row] for row in range(len(rows))])

    __call__ = generate

    def _ends(self, config: Configs, canvas: Sequence[int]) -> Ends:
        """What ends the answer of the one prompt of a call."""
        one = next(iter(config), None) if isinstance(config, Sequence) else config
        if not isinstance(one, DecodeConfig):
            return Ends(self.decode)
        given = max((place + 1 for place, token in enumerate(canvas) if token != self._mask), default=0)
        stop_ids = {*one.stop_ids, *self.stops(one).get("stop_ids", ())}
        return Ends(self.decode, one.stop, frozenset(stop_ids), given)

    @keywords(DecodeConfig)
    def stream(
        self, prompts: Prompts | None = None, config: Configs = None, *, canvas: Canvases = None,
        reference: Pipeline | None = None, generator: torch.Generator | None = None, seeds: Sequence[int] | None = None,
        chat: bool | None = None, **settings: Any,
    ) -> Iterator[Event]:  # fmt: skip
        """The events of decoding: a Step after every denoising step of a prompt, a Finished or a Failed at its end.
        Closing the iterator cancels what is not done. The arguments are those of `generate`."""
        rows, canvases = self.encode_both(prompts, chat, canvas)
        config = with_settings(config, settings)
        yield from self._events(rows, canvases, config, reference, generator, seeds, watch=True)

    @keywords(ScoreConfig, gives=Score)
    def score(
        self, prompt: Prompt, continuation: str | Sequence[int] | Tensor, config: ScoreConfig | None = None, *,
        chat: bool | None = None, **settings: Any,
    ) -> Score:  # fmt: skip
        """How likely the continuation is behind the prompt, which may be empty: a lower bound of its log likelihood,
        estimated or, for few tokens a block, computed. `config`: a ScoreConfig; its settings may stand here as well,
        such as `draws=32`. `chat`: as in `generate`."""
        config = with_settings(config, settings, ScoreConfig, "a likelihood")
        if config is not None and not isinstance(config, ScoreConfig):
            raise RCDError(f"a configuration of likelihoods is a ScoreConfig, not a {type(config).__name__}.")
        return scoring.score(self, *scoring.pair(self, prompt, continuation, chat), config or ScoreConfig())

    @keywords(DecodeConfig)
    def submit(
        self, prompt: Sequence[int], config: DecodeConfig | None = None, *, canvas: Canvas = (),
        reference: Pipeline | None = None, watch: bool = False, row: int = 0, wait: bool = False, rows: int = 1,
        events: Sink | None = None, probe: Probe | None = None, **settings: Any,
    ) -> Handle:  # fmt: skip
        """Queue one prompt, as token ids, and return at once: the handle has its events, its result and a way to cancel
        it. A full queue refuses, or with `wait` is waited for. `canvas`: a text with masks, or token ids. `rows`: how
        many requests are to come. `events` hears what the handle would tell."""
        if not isinstance(prompt, Sequence):
            raise RCDError(f"submit takes a list of token ids, not a {type(prompt).__name__}; `encode` makes one.")
        filled = self.canvas_ids(canvas)
        resolved = self.resolve(with_settings(config, settings), len(prompt), len(filled))
        if resolved.oracle:
            raise RCDError("oracle=True decodes in `generate` and `stream`; leave it out of `submit`.")
        check_call(self, reference, [list(prompt)], [resolved], probe, [filled])
        settled = replace(resolved.request, **self.stops(resolved))
        request = Request(list(prompt), settled, row, watch, probe, filled)
        engine = resolved.engine(self.settings)
        grid = resolved.rounding(self.settings)[1]
        needed = -(-(len(prompt) + -(-resolved.new_tokens // grid) * grid) // engine.grid(self.settings))
        needed = capacity_for(needed * engine.grid(self.settings), engine, self.settings)
        second = reference.model if reference is not None and engine.travelling.needs_reference else None
        key = (engine, id(self.model), None if second is None else id(second))
        least_bytes = cache_bytes(self.model, LEAST_ROWS, needed)
        least_bytes += remembered_bytes(self.model, engine, LEAST_ROWS, needed)
        small = self.model.device.type == "cpu" and least_bytes <= LEAST_BYTES
        models = [self.model] * (2 if engine.guidance else 1) + ([] if second is None else [second])

        def size(places: int, capacity: int) -> int:
            remembered = remembered_bytes(self.model, engine, places, capacity)
            return remembered + sum(cache_bytes(each, places, capacity) for each in models)

        def make(places: int, capacity: int, prefixes: Prefixes | None) -> Engine:
            more: Any = dict(reference=second, text=self.decode, prefixes=prefixes)
            return Engine(self.model, engine, rows=places, capacity=capacity, **more)

        places, least = min(max(rows, LEAST_ROWS if small else 1), MOST_ROWS), min(rows, MOST_ROWS)
        return self.loop.submit(request, Plan(key, needed, places, least, size, make), wait=wait, events=events)

    def _events(
        self, rows: list[list[int]], canvases: list[list[int]], config: Configs, reference: Pipeline | None,
        generator: torch.Generator | None, seeds: Sequence[int] | None, watch: bool = False, probe: Probe | None = None,
    ) -> Iterator[Event]:  # fmt: skip
        if isinstance(config, Sequence):
            if len(config) != len(rows):
                raise RCDError(f"{len(rows)} prompts need {len(rows)} configurations, not {len(config)}.")
            given = zip(config, canvases, rows, strict=True)
            chosen = [self.resolve(one, len(row), len(canvas)) for one, canvas, row in given]
            if seeds is None and generator is None:
                seeds = [one.seed for one in chosen]
        else:
            longest = max(map(len, rows), default=0)
            of_length = {length: self.resolve(config, longest, length) for length in {0, *map(len, canvases)}}
            chosen = [of_length[len(canvas)] for canvas in canvases]
        own = row_seeds(len(rows), chosen[0].seed if chosen else 0, generator, seeds)
        check_call(self, reference, rows, chosen, probe, canvases)
        chosen = [replace(one, seed=seed) for one, seed in zip(chosen, own, strict=True)]
        if any(one.oracle for one in chosen):
            yield from self._plainly(rows, canvases, chosen, reference)
            return
        events: Events = queue.SimpleQueue()
        handles: list[Handle] = []
        try:
            for number, (row, canvas, one) in enumerate(zip(rows, canvases, chosen, strict=True)):
                more: Any = dict(reference=reference, watch=watch, wait=True, rows=len(rows), probe=probe)
                handles.append(self.submit(row, one, row=number, events=events, canvas=canvas, **more))
            yield from follow(handles, events)
        finally:
            for handle in handles:
                handle.cancel()

    def _plainly(
        self, rows: list[list[int]], canvases: list[list[int]], configs: list[DecodeConfig], reference: Pipeline | None
    ) -> Iterator[Event]:
        """One prompt after another, by the oracle."""
        second = None if reference is None else reference.model
        for number, (row, canvas, one) in enumerate(zip(rows, canvases, configs, strict=True)):
            one, more = replace(one, **self.stops(one)), dict[str, Any](text=self.decode, canvas=canvas)
            yield from simple.decode(self.model, row, one, reference=second, row=number, **more)

    def generation(self, event: Finished, seconds: float) -> Generation:
        """An answer's last event as `generate` gives it back; `seconds` is how long it took."""
        text = event.text
        if text is None:
            text = self.decode(event.ids if event.stop_reason == "length" else event.ids[:-1])
        return Generation(text, event.ids, event.stop_reason, event.counts, seconds, event.logprobs, event.given)

    def to(self, *targets: str | torch.device | torch.dtype) -> Pipeline:
        """Move to a device, cast to a dtype, or both; returns the pipeline. Engines are made anew. While requests are
        decoded it is refused; those that come meanwhile wait."""
        device, dtype = chosen_place(targets)
        place = self.model.device if device is None else ckpt.pick_device(device)
        with self.loop.paused():
            move(self.model, place, dtype)
        return self

    def save(
        self, folder: str | Path, *, carry: Carry | None = None, overwrite: bool = False, max_shard_size: str = "5GB",
        **rcd: Any,
    ) -> Path:  # fmt: skip
        """Write the checkpoint back in its family's names; `carry` and further fields (stage, provenance, ...) go to
        rcd.json."""
        for name in rcd:
            one_of("field of rcd.json", name, [f.name for f in fields(RCDFile)])
        if carry is not None:
            rcd["carry"] = describe(carry)
        written = replace(self.checkpoint, rcd=replace(self.checkpoint.rcd, **rcd))
        return writing.save(written, folder, overwrite=overwrite, max_shard_size=max_shard_size)


def load(
    source: str | Path | Any, *, family: str | None = None, device: str | torch.device | None = "auto",
    dtype: str | torch.dtype | None = "auto", revision: str | None = None, tokenizer: Any | None = None,
    quantize: str | Quantisation | None = None, device_map: Any = None, offload_folder: str | Path | None = None,
    **overrides: Any,
) -> Pipeline:  # fmt: skip
    """Load a checkpoint: a Hugging Face folder or hub name of SDAR, LLaDA or Dream; or a causal Qwen3, Qwen2 or Llama
    (also a GGUF file) as the start of an adaptation; or take a model that is in memory, of transformers or a
    `DiffusionLM`, as it is, with its `tokenizer`.

    `quantize`: int8 or int4, for weights in so many bits (docs/quantise.md). `device_map`: a device, `auto`, or names
    of parts with a device each (`offload_folder` keeps what goes to `disk`). `overrides`: mask_token_id,
    eos_token_ids, block_length, attention, shift."""
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise RCDError(
            f"tokenizer is an object, such as transformers' AutoTokenizer.from_pretrained gives, not {told(tokenizer)}."
        )
    placed: Any = dict(family=family, device=device, dtype=dtype, quantize=quantize, **overrides)
    if isinstance(source, (str, Path)):
        placed |= dict(revision=revision, device_map=device_map, offload_folder=offload_folder)
        found = ckpt.load(source, **placed)
        return Pipeline(found if tokenizer is None else replace(found, tokenizer=tokenizer, tokenizer_changed=True))
    for name, value in (("revision", revision), ("device_map", device_map), ("offload_folder", offload_folder)):
        if value is not None:
            raise RCDError(f"{name} is for checkpoints that are read; this model is in memory: leave it out.")
    return Pipeline(adopt(source, tokenizer=tokenizer, **placed))
