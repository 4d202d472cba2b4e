"""Algorithm 2 to read: one text, no batch, no cache. The tests' oracle for the engine: `DecodeConfig(oracle=True)`.

    text     prompt | [M] [M] [M] ...     what is decoded begins at `origin` and comes in blocks of b
    window   which positions a step reads and predicts, and what they see (`rcd.decode.simple_windows`)
    step     inject -> predict -> sample -> commit -> update (`rcd.decode.step.denoise`)

Shapes: T positions, A of them decoded, n blocks of b that a step predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rcd.carry.base import places
from rcd.decode.answers import Answer
from rcd.decode.answers import Text as Words
from rcd.decode.choice import ChoiceInputs, choice_noise
from rcd.decode.config import BLOCKS, DecodeConfig
from rcd.decode.events import Counts, Event, Failed, Logprobs, Step
from rcd.decode.filling import Filling, check_canvas
from rcd.decode.reporting import no_numbers
from rcd.decode.simple_windows import BlockWindow, CanvasWindow, Guided, PassPlan, Reader, Text, shaped
from rcd.decode.step import Outcome, Rules, StepInputs, StepSettings, denoise
from rcd.decode.stopping import check_prompts, settle
from rcd.diffusion.noise import signed, uniform_of
from rcd.models.lm import DiffusionLM
from rcd.residual.distribution import Distribution, align_vocabulary
from rcd.residual.start import Passes


@torch.inference_mode()  # which ends at every yield
def decode(
    model: DiffusionLM, prompt: Sequence[int], config: DecodeConfig, *, reference: DiffusionLM | None = None,
    row: int = 0, text: Words | None = None, canvas: Sequence[int] = (),
) -> Iterator[Event]:  # fmt: skip
    """Decode one prompt with a resolved configuration; `text` makes ids a text, for stop strings; `canvas` gives tokens
    of the answer."""
    settings, carry, rules = model.settings, config.travelling, Rules.of(config, model.settings)
    check_prompts([prompt], settings, config.new_tokens, *config.rounding(settings))
    ends, early = [*settings.eos_token_ids, *config.stop_ids], config.eos_early_stop
    check_canvas(canvas, config.new_tokens, settings, ends)
    filling = Filling.of(canvas, config.new_tokens, settings.mask_token_id, ends, early)
    now, flying = Text.of(prompt, config, settings, filling), config.window in BLOCKS
    causal, length = settings.attention == "block_causal", len(prompt)
    window = BlockWindow(config, now, causal, rules, settings.shift) if flying else CanvasWindow(config, now, rules)
    cond = Reader(model, window.block_of, settings.mask_token_id)
    uncond = Reader(model, window.block_of, settings.mask_token_id, unread=length)
    target = Guided(cond, uncond, config.guidance) if config.guidance else cond
    other = None if reference is None else Reader(reference, window.block_of, settings.mask_token_id)
    generator = torch.Generator().manual_seed(config.seed)
    answer = Answer(row, config, settings.eos_token_ids, text, filling)
    area, request = (1, now.output.shape[1]), StepSettings.of(config, rules.rule, model.device)
    state = carry.cold(area, model.codebook)
    memory = rules.remembered(area, settings.vocab_size, config.klass_history, model.codebook)
    counts = Counts()

    def read(whose: str, reads: PassPlan) -> Distribution | None:
        """What a carry may ask for: a plain pass of the model itself or of the reference."""
        nonlocal counts
        if whose == "none":
            return None
        reader = target if whose == "own" else other
        assert reader is not None, "a carry that asks for a reference says so in needs_reference"
        name = "start" if whose == "own" else "reference"
        counts = replace(counts, **{name: getattr(counts, name) + 1})
        return rules.distribution(align_vocabulary(reader(now.ids, reads).logits, settings.vocab_size))

    while (plan := window.next(now)) is not None:
        reads, where = plan.reads, plan.reads.predicted - now.origin
        if plan.fresh is not None and plan.start is not None:  # Algorithm 2, lines 2-5
            passes = Passes((*plan.start.shape, settings.vocab_size), now.ids.device, [generator])
            begun = carry.begin(read(carry.start_pass, replace(reads, predicted=plan.start)), passes, model.codebook)
            state = state.put_at(plan.start - now.origin, begun, plan.fresh[:, plan.start[0] - now.origin])
            memory = tuple(each.masked_fill(plan.fresh.unsqueeze(-1), 0) for each in memory)
        entering, seen = shaped(state.at(where.flatten()[None]), where), read(carry.step_pass, reads)
        if seen is not None:
            entering = carry.refresh(entering, seen, model.codebook)
        masked, before, step = now.masked, now.masked[0][where], counts.denoising
        scope = plan.here if config.carry_scope == "block" else torch.ones_like(plan.here)
        counters = torch.tensor(signed(config.seed)), torch.tensor(step), reads.predicted
        outcome = denoise(
            target, rules, now.ids, reads, entering,
            StepInputs(
                before, now.offered(rules.rule.revises)[0][where] & plan.allowed, places(carry, before) & scope,
                plan.quota, request, uniform_of(*counters),
                choice=ChoiceInputs(choice_noise(*counters), plan.share, now.ids[reads.predicted], plan.early),
                memory=tuple(each[0, where] for each in memory),
            ),
            config.logprobs,
        )  # fmt: skip
        counts = replace(counts, denoising=step + 1)
        known = seen is None or bool(torch.isfinite(seen.normaliser).all())
        if not known or not bool(outcome.finite.all()):
            yield Failed(row, no_numbers(step + 1, reference=not known))
            return
        was, (now, committed) = now, _written(now, where, outcome, len(settings.eos_token_ids))
        window.post.told(was, now)
        memory = tuple(old.index_put((where * 0, where), new) for old, new in zip(memory, outcome.memory, strict=True))
        state = state.put_at(
            where.flatten()[None], shaped(outcome.state, where.flatten()[None]), where.new_ones(1, where.numel()) > 0
        )
        carried = None if outcome.alpha is None else outcome.alpha * scope
        event = _event(
            answer, step + 1, now, now.origin - length, masked[0], committed, where.flatten(), outcome, carried
        )  # fmt: skip
        unfinished = window.post.unfinished(now) if rules.rule.revises else None
        if unfinished is not None:  # what it holds may change
            event = replace(event, final=min(event.final, max(0, unfinished - length)))
        yield replace(event, settled=answer.tell(event.final))
        if answer.stopped:
            yield answer.cut(_completed(counts, config, window, other is not None))
            return
    yield answer.ended(now.ids[length:].tolist(), _completed(counts, config, window, other is not None))


def _written(now: Text, where: Tensor, outcome: Outcome, eos: int) -> tuple[Text, Tensor]:
    """(the text with what was committed and its end closed, [A] what was committed)."""
    ids, flat = now.ids[now.origin :], where.flatten()
    token = ids.index_put((flat,), outcome.token.flatten())
    committed = torch.zeros_like(ids, dtype=torch.bool).index_put((flat,), outcome.committed.flatten())
    after = torch.where(committed, token, ids)[None]
    closed, _, _ = settle(after, now.masked & ~committed, token[None], now.output, now.ending, now.ends, now.early, eos)
    return replace(now, ids=torch.cat((now.ids[: now.origin], closed[0]))), committed & (token != ids)


def _completed(counts: Counts, config: DecodeConfig, window: BlockWindow | CanvasWindow, reference: bool) -> Counts:
    """With the passes that store what is decided. The families' own loops store a finished block in a pass of its own,
    and only there is one to count. And with the second pass of each under guidance."""
    if isinstance(window, BlockWindow):
        stores = window.opened - 1 if config.window != "d2f" else 0
        second = (stores + window.prefills) * (reference and config.travelling.needs_reference)
        counts = replace(counts, prefill=window.prefills, store=stores, reference=counts.reference + second)
    return counts.guided() if config.guidance else counts


def _event(
    answer: Answer, number: int, now: Text, offset: int, masked: Tensor, committed: Tensor, at: Tensor,
    outcome: Outcome, alpha: Tensor | None,
) -> Step:  # fmt: skip
    """The step's event, over all that is decoded."""
    ids, left, size = now.ids[now.origin :], (now.masked & now.output)[0], len(committed)

    def spread(blank: Tensor, value: Tensor) -> Tensor:
        return blank.index_put((at,), value.reshape(len(at), *value.shape[2:]).to(blank.dtype))

    blank = outcome.confidence.new_zeros(size)
    predicted = spread(torch.zeros_like(masked), torch.ones_like(outcome.committed)) & masked
    told = None
    if outcome.best is not None:
        best_ids, best, own = outcome.best
        wide = blank.new_zeros(size, best.shape[-1])
        told = Logprobs(spread(blank, own), spread(wide.long(), best_ids), spread(wide, best))
    draft = torch.where(predicted, spread(ids, outcome.token), ids)
    return Step(
        answer.row, offset, number, answer.grow(offset, draft, left, committed, told), draft, committed,
        committed & ~masked, left, spread(blank, outcome.confidence).masked_fill(~predicted, float("nan")),
        None if alpha is None else spread(blank, alpha), told, end=answer.end,
    )  # fmt: skip
