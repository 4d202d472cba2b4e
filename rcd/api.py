"""The public face: `rcd.load(path)` gives a Pipeline, whose `generate` and `stream` decode text or token ids."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rcd import registry
from rcd.carry.base import Carry, describe
from rcd.data.examples import prompt_ids
from rcd.decode.config import CACHED, DecodeConfig
from rcd.decode.events import Counts, Event, Failed, Finished
from rcd.decode.stopping import check_prompts
from rcd.engine.engine import Engine, Request, check_fit
from rcd.errors import RCDError, one_of
from rcd.models import checkpoint as ckpt
from rcd.models import writing
from rcd.models.checkpoint import Checkpoint
from rcd.models.learnt import check_held
from rcd.models.lm import DiffusionLM, ModelSettings
from rcd.models.pairing import check_pair
from rcd.models.settings import RCDFile

MOST_ROWS = 128
"""Prompts that the engine serves together; more wait for a free row."""
Prompt = str | Sequence[int] | Tensor | Sequence[dict[str, str]]
"""A text, token ids, or chat messages ({"role": ..., "content": ...})."""


@dataclass(frozen=True)
class Generation:
    """One prompt's answer. Every figure states what it counts."""

    text: str
    """The tokens as text, without the end token; where the checkpoint has no tokenizer, the ids themselves."""
    ids: list[int]
    """The new tokens up to and including the end token."""
    stop_reason: str
    """`eos` or `length`."""
    counts: Counts
    """Forward passes by kind."""
    seconds: float
    """From the call to the moment at which this answer was complete."""

    @property
    def tokens(self) -> int:
        """New tokens, the end token included; what a block holds behind it is not counted."""
        return len(self.ids)

    @property
    def denoising_steps(self) -> int:
        """Forward passes that could commit a token."""
        return self.counts.denoising

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.denoising_steps if self.denoising_steps else 0.0

    @property
    def forwards(self) -> int:
        """All forward passes: denoising, prefill, start passes, cache stores, and every pass of a reference."""
        return self.counts.forwards

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The object that `rcd generate --json` prints."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "denoising_steps": self.denoising_steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "forwards": self.forwards,
            "tokens_per_forward": round(self.tokens_per_forward, 4),
            "seconds": round(self.seconds, 4),
            "stop_reason": self.stop_reason,
        }


@dataclass(frozen=True)
class Output:
    """The answers to a batch, in the order of the prompts."""

    results: list[Generation]

    @property
    def texts(self) -> list[str]:
        return [result.text for result in self.results]

    @property
    def sequences(self) -> list[list[int]]:
        """Token ids without the prompts."""
        return [result.ids for result in self.results]

    @property
    def tokens_per_forward(self) -> float:
        forwards = sum(result.forwards for result in self.results)
        return sum(result.tokens for result in self.results) / forwards if forwards else 0.0


class Pipeline:
    """A loaded checkpoint that decodes."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._engine: Engine | None = None

    @property
    def model(self) -> DiffusionLM:
        return self.checkpoint.model

    @property
    def tokenizer(self) -> Any | None:
        return self.checkpoint.tokenizer

    @property
    def settings(self) -> ModelSettings:
        return self.model.settings

    @property
    def untrained(self) -> bool:
        """A causal model that is only the start of an adaptation."""
        return self.model.spec.causal and self.checkpoint.rcd.stage is None

    def resolve(self, config: DecodeConfig | None = None, longest_prompt: int = 0) -> DecodeConfig:
        """The configuration with every None filled in from the checkpoint."""
        if config is not None and not isinstance(config, DecodeConfig):
            raise RCDError(f"a configuration is a DecodeConfig, not a {type(config).__name__}.")
        resolved = (config or DecodeConfig()).resolved(self.settings, self.checkpoint.rcd.carry, longest_prompt)
        assert not isinstance(resolved.carry, str)
        check_held(self.model, resolved.carry)
        if resolved.engine == "fast":
            check_fit(self.model, resolved)
        return resolved

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: DecodeConfig | None = None,
        *,
        reference: Pipeline | None = None,
        generator: torch.Generator | None = None,
        seeds: Sequence[int] | None = None,
        chat: bool | None = None,
    ) -> Output:
        """Decode to the end. `seeds` (one a row), else `generator`, else the configuration's seed seed the rows'
        own draws; `chat` wraps plain texts in the tokenizer's chat template (None: when it has one)."""
        began = time.perf_counter()
        results: dict[int, Generation] = {}
        rows = self.encode(prompts, chat)
        for event in self._events(rows, config, reference, generator, seeds, watch=False):
            if isinstance(event, Finished):
                results[event.row] = self.generation(event, time.perf_counter() - began)
        return Output([results[row] for row in range(len(rows))])

    @torch.inference_mode()
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: DecodeConfig | None = None,
        *,
        reference: Pipeline | None = None,
        generator: torch.Generator | None = None,
        seeds: Sequence[int] | None = None,
        chat: bool | None = None,
    ) -> Iterator[Event]:
        """The events of decoding: a Step after every denoising step, a Finished for every prompt."""
        yield from self._events(self.encode(prompts, chat), config, reference, generator, seeds, watch=True)

    @torch.inference_mode()
    def _events(
        self,
        rows: list[list[int]],
        config: DecodeConfig | None,
        reference: Pipeline | None,
        generator: torch.Generator | None,
        seeds: Sequence[int] | None,
        watch: bool,
    ) -> Iterator[Event]:
        resolved = self.resolve(config, max(map(len, rows), default=0))
        assert resolved.window is not None and resolved.carry is not None and not isinstance(resolved.carry, str)
        if resolved.carry.needs_reference:
            if reference is None:
                raise RCDError("this carry needs a reference model; name one with reference (--reference).")
            check_reference(self, reference, rows, resolved)
        own = row_seeds(len(rows), resolved.seed, generator, seeds)
        if resolved.engine == "fast":
            yield from self._served(rows, resolved, own, watch)
            return
        window = registry.get("window", resolved.window)
        place = self.model.device if self.model.device.type == "cuda" else torch.device("cpu")
        generators = [torch.Generator(place).manual_seed(value) for value in own]
        yield from window(self.model, reference.model if reference else None, rows, resolved, generators)

    def _served(
        self, rows: list[list[int]], config: DecodeConfig, seeds: Sequence[int], watch: bool
    ) -> Iterator[Event]:
        """By the engine, which is kept for the next call of the same kind: what it has compiled and captured stays."""
        check_prompts(rows, self.settings, config.new_tokens, *config.rounding(self.settings))
        grid = config.grid(self.settings)
        needed = max(-(-(len(row) + config.new_tokens) // grid) * grid for row in rows)
        length = config.max_new_tokens if config.window in CACHED else None  # a block's engine is for any length
        kind, held = replace(config, seed=0, max_new_tokens=length), self._engine
        if (
            held is None
            or (held.config, held.watch) != (kind, watch)
            or not held.suits(min(len(rows), MOST_ROWS), needed)
        ):
            self._engine = None  # its memory is free before the next one asks for some
            self._engine = held = Engine(self.model, kind, rows=min(len(rows), MOST_ROWS), capacity=needed, watch=watch)
        failed: Failed | None = None
        asked = enumerate(zip(rows, seeds, strict=True))
        for event in held.run(Request(number, row, config.new_tokens, seed) for number, (row, seed) in asked):
            if isinstance(event, Failed):
                failed = failed or event
            else:
                yield event
        if failed is not None:
            raise RCDError(failed.message)

    def encode(self, prompts: Prompt | Sequence[Prompt], chat: bool | None = None) -> list[list[int]]:
        """Every prompt as token ids."""
        if not isinstance(prompts, Iterable):
            raise RCDError(f"prompts are texts, lists of token ids or chat messages, not {type(prompts).__name__}.")
        given: Any = prompts if isinstance(prompts, (str, Sequence)) or hasattr(prompts, "tolist") else list(prompts)
        return [self._encode(prompt, chat) for prompt in ([given] if _is_single(given) else given)]

    def _encode(self, prompt: Any, chat: bool | None) -> list[int]:
        if hasattr(prompt, "tolist"):  # a tensor or an array
            prompt = prompt.tolist()
        if not isinstance(prompt, (str, list, tuple)):
            raise RCDError(f"a prompt is a text, a list of token ids or chat messages, not {type(prompt).__name__}.")
        if not isinstance(prompt, str) and not any(isinstance(item, dict) for item in prompt):
            odd = [item for item in prompt if not isinstance(item, int)]
            if odd:
                raise RCDError(f"token ids are whole numbers, not {odd[0]!r}.")
            return list(prompt)
        if self.tokenizer is None:
            raise RCDError("this checkpoint has no tokenizer; give the prompt as token ids (--ids).")
        return prompt_ids([prompt], self.tokenizer, chat)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out; without a tokenizer, the ids themselves."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def generation(self, event: Finished, seconds: float) -> Generation:
        ended = event.stop_reason == "eos"
        text = self.decode(event.ids[:-1] if ended else event.ids)
        return Generation(text, event.ids, event.stop_reason, event.counts, seconds)

    def save(
        self,
        folder: str | Path,
        *,
        carry: Carry | None = None,
        overwrite: bool = False,
        max_shard_size: str = "5GB",
        **rcd: Any,
    ) -> Path:
        """Write the checkpoint back in its family's names; `carry` and further fields (stage, provenance, ...) go to
        rcd.json."""
        for name in rcd:
            one_of("field of rcd.json", name, [f.name for f in fields(RCDFile)])
        if carry is not None:
            rcd["carry"] = describe(carry)
        written = replace(self.checkpoint, rcd=replace(self.checkpoint.rcd, **rcd))
        return writing.save(written, folder, overwrite=overwrite, max_shard_size=max_shard_size)


def load(
    source: str | Path,
    *,
    family: str | None = None,
    device: str | torch.device | None = "auto",
    dtype: str | torch.dtype | None = "auto",
    revision: str | None = None,
    **overrides: Any,
) -> Pipeline:
    """Load a checkpoint: a Hugging Face folder or hub name of SDAR, LLaDA or Dream; or a causal Qwen3, Qwen2 or Llama
    (also a GGUF file) as the start of an adaptation. `overrides`: mask_token_id, eos_token_ids, block_length,
    attention, shift."""
    return Pipeline(ckpt.load(source, family=family, device=device, dtype=dtype, revision=revision, **overrides))


def row_seeds(rows: int, seed: int, generator: torch.Generator | None, seeds: Sequence[int] | None = None) -> list[int]:
    """One seed a row, so that a row's draws do not depend on the batch: those of `seeds`, from `generator`, or
    seed + row."""
    if seeds is not None and (len(seeds) != rows or generator is not None):
        raise RCDError(f"{rows} prompts need {rows} seeds and no generator beside them, not {len(seeds)} seeds.")
    if seeds is None:
        seeds = [seed + row for row in range(rows)]
    if generator is not None:
        seeds = torch.randint(2**62, (rows,), generator=generator, device=generator.device).tolist()
    return list(seeds)


def check_reference(target: Pipeline, reference: Pipeline, prompts: list[list[int]], config: DecodeConfig) -> None:
    """A residual is a distribution over tokens: both models must mean the same tokens by the same ids, and the
    reference must be able to read whatever the target writes."""
    ours, theirs = target.settings, reference.settings
    check_pair(target.checkpoint, reference.checkpoint)
    if target.model.device != reference.model.device:
        raise RCDError(
            f"the reference is on {reference.model.device} and the target on {target.model.device}; load both on one."
        )
    known = ours.vocab_size if target.tokenizer is None else min(len(target.tokenizer), ours.vocab_size)
    if theirs.vocab_size < known:
        raise RCDError(
            f"the reference knows {theirs.vocab_size} tokens and the target {known}; a reference must know them all."
        )
    if ours.mask_token_id != theirs.mask_token_id and any(theirs.mask_token_id in prompt for prompt in prompts):
        raise RCDError(
            f"a prompt contains the token {theirs.mask_token_id}, which is the reference's mask; take it out."
        )
    assert config.block_length is not None
    try:
        check_prompts(prompts, replace(theirs, mask_token_id=-1), config.new_tokens, *config.rounding(ours))
    except RCDError as error:
        raise RCDError(f"the reference cannot read this: {error}") from error


def _is_single(prompts: Any) -> bool:
    """One prompt rather than a batch: a text, a flat list of ids, a 1D tensor, or one conversation."""
    if isinstance(prompts, str):
        return True
    if hasattr(prompts, "tolist"):
        return bool(prompts.ndim == 1)
    return all(isinstance(item, (int, float, dict)) for item in prompts)
