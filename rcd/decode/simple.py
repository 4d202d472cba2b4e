"""Algorithm 2 to read: one text, no batch, no cache. Every window is an attention mask and a list of positions.

    text        prompt | t0 t1 t2 ...            what is decoded begins at `origin` and comes in blocks of b
    a pass      reads some of it and predicts some of that; `rcd.decode.step.denoise` does the rest

A window that reuses what an earlier pass computed (`prefix`, `dual`) is a mask, too: the pass then reads that earlier
state of the text beside the part that it computes anew, and the part sees itself and the rest as it was.
This is the tests' oracle for the engine: `DecodeConfig(oracle=True)`. Shapes: n blocks that are predicted, b positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rcd.carry.base import Carry, places
from rcd.decode.answers import Answer, Text
from rcd.decode.blocks import another, decoded_share, least, prefill_piece
from rcd.decode.config import CACHED, DecodeConfig
from rcd.decode.events import Counts, Event, Failed, Logprobs, Step
from rcd.decode.step import Asked, Knobs, Rules, denoise
from rcd.decode.stopping import check_prompts, is_end, settle, unsettled
from rcd.diffusion.commit import quota
from rcd.diffusion.noise import signed, uniform_of
from rcd.models.lm import DiffusionLM, Prediction, View
from rcd.residual.distribution import align_vocabulary
from rcd.residual.start import Passes


@dataclass(frozen=True)
class Sight:
    """What a pass does."""

    read: Tensor
    """The positions that it computes, rising."""
    predicted: Tensor
    """[n, b] those of them that it predicts."""
    whole: bool = True
    """Of a canvas: all of it, or a part of it and the rest as it was."""


@dataclass
class Reader:
    """A model that reads the text; of a canvas it remembers what it last read whole."""

    model: DiffusionLM
    block_of: Tensor | None
    """[T] the block of every position, for block-causal attention; None: everything sees everything."""
    mask: int
    before: Tensor | None = None

    @property
    def codebook(self) -> Tensor:
        return self.model.codebook

    def __call__(
        self, ids: Tensor, view: Sight, carry: Carry | None = None, state: Any = None,
        inject: Tensor | None = None,
    ) -> Prediction:  # fmt: skip
        read, settings = view.read, self.model.settings
        own = torch.where(ids == self.mask, settings.mask_token_id, ids).clamp_max(settings.vocab_size - 1)
        embeds, at = self.model.embed(own[read]), torch.searchsorted(read, view.predicted)
        if carry is not None and inject is not None:
            embeds[at] = carry.inject(embeds[at], inject, state, self.model.carry_parameters)  # Eq. 2
        hidden = self._encode(embeds, read, view.whole)
        hidden = hidden[(at - settings.shift).clamp_min(0)]
        return Prediction(nn.functional.linear(hidden, self.model.head.weight, self.model.head.bias), hidden)

    def _encode(self, embeds: Tensor, read: Tensor, whole: bool) -> Tensor:
        if self.block_of is not None:
            block = self.block_of[read]
            return self.model.encode(embeds[None], View(read[None], (block[:, None] >= block)[None, None]))[0]
        if whole:
            self.before = embeds
            return self.model.encode(embeds[None], View(read[None]))[0]
        assert self.before is not None
        old, looking = len(self.before), self.model.settings.shift
        kept = torch.arange(old)[:, None] != read[looking:]  # [old, new]: what the part does not compute anew
        sees = torch.zeros(old + len(read), old + len(read), dtype=torch.bool)
        sees[:, :old] = True
        sees[old:, :old] = kept.all(-1)
        sees[old:, old + looking :] = True  # the token to the left, of Dream's shift, only looks
        position = torch.cat((torch.arange(old), read))[None]
        return self.model.encode(torch.cat((self.before, embeds))[None], View(position, sees[None, None]))[0, old:]


def decode(
    model: DiffusionLM, prompt: Sequence[int], config: DecodeConfig, *, reference: DiffusionLM | None = None,
    row: int = 0, text: Text | None = None,
) -> Iterator[Event]:  # fmt: skip
    """Decode one prompt with a resolved configuration."""
    settings, carry, rules = model.settings, config.travelling, Rules.of(config, model.settings)
    b, new, length, mask = config.block, config.new_tokens, len(prompt), model.settings.mask_token_id
    check_prompts([prompt], settings, new, *config.rounding(settings))
    config = replace(config, blocks_in_flight=1) if config.window == "blockwise" else config
    flying, causal = config.window in ("blockwise", "d2f"), settings.attention == "block_causal"
    origin = length // b * b if causal else length
    end = origin + -(-(length + new - origin) // b) * b if flying else length + new
    area, ids = torch.arange(origin, end), torch.tensor([*prompt, *[mask] * (end - length)])
    number, output = (area - origin) // b, ((area >= length) & (area < length + new))[None]
    blocks = int(number[-1]) + 1
    ends = torch.tensor([[*settings.eos_token_ids, *config.stop_ids]], dtype=torch.long)
    place = torch.arange(end) // b if causal else (torch.arange(end) - origin + b).clamp_min(0) // b
    reader = Reader(model, place if flying else None, mask)
    other = None if reference is None else Reader(reference, place if flying else None, mask)
    state, knobs, generator = (
        carry.cold((1, len(area)), model.codebook),
        Knobs.of(config, model.device),
        torch.Generator(),
    )
    generator.manual_seed(config.seed)
    answer, denoised, starts, refers, stored = Answer(row, config, settings.eos_token_ids, text), 0, 0, 0, 0
    step, total = torch.zeros(1, blocks, dtype=torch.long), torch.zeros(1, blocks)
    added, current, since = 0, -1, 0  # blocks in flight or done; of a canvas its block, and the steps there
    pieces = -(-origin // prefill_piece(b if causal else max(1, origin))) if flying else 0

    def in_blocks(value: Tensor) -> Tensor:
        return nn.functional.pad(value, (0, blocks * b - value.shape[1])).unflatten(1, (blocks, b))

    def counts() -> Counts:
        counted = stored if config.window == "blockwise" else 0
        asked = (pieces + refers + counted) if other is not None else 0
        return Counts(denoised, pieces, starts, counted, asked)

    while True:
        masked = ids[None, origin:] == mask
        needed = unsettled(ids[None, origin:], masked, output, ends, config.eos_early_stop)
        left, fresh = in_blocks(needed).sum(-1), None
        total = torch.maximum(total, left)
        open_ = [k for k in range(blocks) if left[0, k]]
        if flying:  # which blocks are in flight
            share, ended = decoded_share(total, left), bool((is_end(ids[None, origin:], ends) & output).any())
            more = added < int(in_blocks(output).any(-1).sum()) and not ended
            first = next((k for k in open_ if k < added), added)
            if first == added and not more:
                break
            last = share[:, added - 1] if added else torch.ones(1)
            if bool(another(last, torch.tensor([added - first]), torch.tensor([more]), config)):
                fresh, added = range(added, added + 1), added + 1
                stored += added > 1
            chosen = [k for k in open_ if k < added]
            on = torch.zeros(1, blocks, dtype=torch.bool)
            on[0, chosen] = True
            steps = torch.tensor([config.num_inference_steps or 0])
            wanted = least(share, on, step, steps, config)[0, chosen]
            predicted = torch.stack([area[number == k] for k in chosen])
            read, whole = torch.arange(origin + added * b), True
        else:  # which block of the canvas is current, and what a pass computes
            if not open_:
                break
            entered, current = open_[0] != current, open_[0]
            since = 0 if entered else since
            whole = (
                config.window not in CACHED
                or entered
                or bool(config.refresh_every and since % config.refresh_every == 0)
            )
            if entered and (config.carry_scope == "block" or not denoised):
                fresh = range(current, current + 1) if config.carry_scope == "block" else range(blocks)
            begin = origin + current * b
            part = slice(begin, None if config.window == "prefix" else min(begin + b, end))
            predicted = area[None] if whole else torch.arange(end)[part][None]
            read = torch.arange(end) if whole else torch.arange(begin - settings.shift, int(predicted[0, -1]) + 1)
            wanted = quota(total[:, current].long(), config.num_inference_steps or b, torch.tensor([since]))
        where = predicted - origin
        if fresh is not None:  # Algorithm 2, lines 2-5
            yet = area[(number >= fresh[0]) & (number <= fresh[-1])] if flying else area
            seen, view = None, Sight(read, yet[None])
            if carry.start_pass == "own":
                starts, seen = starts + 1, rules.distribution(reader(ids, view).logits)
            elif carry.start_pass == "reference" and other is not None:
                refers, logits = refers + 1, other(ids, view).logits
                seen = rules.distribution(align_vocabulary(logits, settings.vocab_size))
            begun = carry.begin(
                seen, Passes((1, len(yet), settings.vocab_size), ids.device, [generator]), model.codebook
            )
            mine = (number >= fresh[0]) & (number <= fresh[-1])
            state = state.put_at((yet - origin)[None], begun, mine[yet - origin][None])
        entering = state.at(where.flatten()[None])
        entering = entering.with_tensors([each.view(*where.shape, *each.shape[2:]) for each in entering.tensors()])
        finite = True
        if carry.step_pass == "reference" and other is not None:
            refers, logits = refers + 1, other(ids, Sight(read, predicted, whole)).logits
            seen = rules.distribution(align_vocabulary(logits, settings.vocab_size))
            finite, entering = (
                bool(torch.isfinite(seen.normaliser).all()),
                carry.refresh(entering, seen, model.codebook),
            )
        here = (number == current)[where] if not flying else torch.ones_like(where, dtype=torch.bool)
        scope = here if config.carry_scope == "block" else torch.ones_like(here)
        noise = uniform_of(torch.tensor(signed(config.seed)), torch.tensor(denoised), predicted)
        asked = Asked(
            masked[0][where], needed[0][where] & here, places(carry, masked[0][where]) & scope & (output[0][where] | flying),
            wanted, knobs, noise,
        )  # fmt: skip
        outcome = denoise(reader, rules, ids, Sight(read, predicted, whole), entering, asked, config.logprobs)
        denoised, since = denoised + 1, since + 1
        if not finite or not bool(outcome.finite.all()):
            yield Failed(row, f"the model's logits are NaN or inf at denoising step {denoised}.")
            return
        if outcome.alpha is not None:
            outcome = replace(outcome, alpha=outcome.alpha * scope)
        flat = where.flatten()
        token, committed = ids[origin:].clone(), torch.zeros(len(area), dtype=torch.bool)
        token[flat], committed[flat] = outcome.token.flatten(), outcome.committed.flatten()
        written = torch.where(committed, token, ids[origin:])[None]
        closed, left_masked, _ = settle(
            written, masked & ~committed, token[None], output, ends, config.eos_early_stop, len(settings.eos_token_ids)
        )
        ids = torch.cat((ids[:origin], closed[0]))
        after = outcome.state.with_tensors([each.reshape(1, -1, *each.shape[2:]) for each in outcome.state.tensors()])
        state = state.put_at(flat[None], after, torch.ones(1, len(flat), dtype=torch.bool))
        if flying:
            step[0, chosen] += (wanted > 0).long()
        left_output = left_masked[0] & output[0]
        event = _event(answer, denoised, origin - length, closed[0], left_output, masked[0], flat, outcome)
        yield event
        if answer.stopped:
            yield answer.cut(counts())
            return
    yield answer.ended(ids[length:].tolist(), counts())


def _event(
    answer: Answer, number: int, offset: int, ids: Tensor, left: Tensor, masked: Tensor, at: Tensor, outcome: Any
) -> Step:
    """The step's event, over all that is decoded."""

    def spread(blank: Tensor, value: Tensor) -> Tensor:
        out = blank.clone()
        out[at] = value.reshape(len(at), *value.shape[2:]).to(out.dtype)
        return out

    never, blank = torch.zeros_like(masked), torch.zeros(len(ids), dtype=outcome.confidence.dtype)
    asked = spread(never, torch.ones_like(outcome.committed)) & masked
    committed = spread(never, outcome.committed)
    best = outcome.best
    told = None if best is None else Logprobs(
        spread(blank, best[2]), spread(torch.zeros(len(ids), best[0].shape[-1]), best[0]).long(),
        spread(torch.zeros(len(ids), best[0].shape[-1], dtype=blank.dtype), best[1]),
    )  # fmt: skip
    draft = torch.where(asked, spread(ids, outcome.token), ids)
    return Step(
        answer.row, offset, number, answer.grow(offset, draft, left, committed, told), draft, committed,
        committed & ~masked, left, spread(blank, outcome.confidence).masked_fill(~asked, float("nan")),
        None if outcome.alpha is None else spread(blank, outcome.alpha), told,
    )  # fmt: skip
