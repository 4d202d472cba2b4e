"""What callers get of a row after a step: its events, of what the device noted, and its answer when it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rcd.decode.events import Counts, Event, Failed, Finished, Logprobs, Step
from rcd.decode.requests import RowReport, Serving
from rcd.decode.rows import Pass, Rows
from rcd.decode.step import Outcome
from rcd.decode.terms import Terms
from rcd.errors import RCDError, first_line

if TYPE_CHECKING:
    from rcd.decode.engine import Engine


class Trace(NamedTuple):
    """What a Step event needs of the rows that took the step, of all blocks that are seen: [R + 1, J b] each."""

    took: Tensor
    """[R + 1]"""
    start: Tensor
    """[R + 1] the first position."""
    settled: Tensor
    """[R + 1] where the first block begins that is unfinished after it."""
    draft: Tensor
    committed: Tensor
    revised: Tensor
    masked: Tensor
    confidence: Tensor
    alpha: Tensor
    logprob: Tensor | None = None
    best_ids: Tensor | None = None
    """[R + 1, J b, K]"""
    best: Tensor | None = None

    @classmethod
    def of(cls, rows: Rows, made: Pass, outcome: Outcome, terms: Terms) -> Trace:
        seen, nothing = made.seen, torch.zeros_like(made.seen.masked)
        predicted, token = made.spread(nothing, made.masked), made.spread(seen.ids, outcome.token)
        committed = made.spread(nothing, outcome.committed) & (token != seen.ids)
        after = rows.text[seen.row, seen.position]
        draft = torch.where(predicted, token, after)
        blank = torch.zeros_like(seen.ids, dtype=outcome.confidence.dtype)
        confidence = made.spread(blank, outcome.confidence).masked_fill(~predicted, float("nan"))
        alpha = outcome.alpha
        kept = made.state < rows.nobody * (len(rows.step) // len(rows.active))  # elsewhere nothing is carried
        shown = blank if alpha is None else made.spread(blank, alpha * kept[:, None])
        left = (after == terms.model.mask_token_id) & seen.output
        trace = cls(
            made.took, seen.position[:, 0], rows.start.clone(), draft, committed, committed & ~seen.masked, left,
            confidence, shown,
        )  # fmt: skip
        if outcome.best is None:
            return trace
        best_ids, best, logprob = outcome.best
        wide = (*seen.ids.shape, best_ids.shape[-1])
        return trace._replace(
            logprob=made.spread(blank, logprob), best_ids=made.spread(blank.new_zeros(wide).long(), best_ids),
            best=made.spread(blank.new_zeros(wide), best),
        )  # fmt: skip


def steps(engine: Engine, trace: Trace | None, rows: list[RowReport]) -> list[Event]:
    """Of the rows that took this step: their events, if they are wanted, and the answers that a stop string ends."""
    events: list[Event] = []
    if trace is None:
        return events
    took = trace.took.tolist()
    for row, one in list(engine.deciding().items()):
        now = rows[row]
        if not took[row] or now.serial != one.serial or not one.request.features.watched:
            continue
        event = step_of(engine, trace, row, one, now)
        if one.request.watch:
            events.append(event)
        if one.answer.stopped and not now.broken:
            # a block that this step has finished is counted as stored for the next one's sake, which will not come
            stored = max(0, now.stored - now.due * now.active)
            events.append(one.answer.cut(counts(engine, one, now._replace(stored=stored))))
            engine.drop(row)
    return events


def failed_probes(engine: Engine) -> list[Event]:
    """The requests whose probe has raised fail, alone."""
    events: list[Event] = []
    for row, one in list(engine.serving.items()):
        if (error := one.mistake) is not None:
            said = f"the probe raised {type(error).__name__} ({first_line(error)}); mend it, or decode without a probe."
            events.append(Failed(one.request.row, str(error) if isinstance(error, RCDError) else said, cause=error))
            engine.drop(row)
    return events


def finished(engine: Engine, row: int, one: Serving) -> Finished | Failed:
    """The last event of a row whose last report says that it has ended."""
    if broken := one.last.broken:
        return Failed(one.request.row, no_numbers(abs(broken), reference=broken < 0))
    length = len(one.prompt)
    new = engine.rows.text[row, length : length + one.request.settings.new_tokens].tolist()
    return one.answer.ended(new, counts(engine, one, one.last))


def counts(engine: Engine, one: Serving, now: RowReport) -> Counts:
    every = now.denoised if engine.window.terms.carry.step_pass == "reference" else 0
    reference = 0 if engine.reference is None else one.prefills + one.references + every + now.stored
    found = Counts(now.denoised, one.prefills, one.starts, now.stored, reference)
    return found if engine.uncond is None else found.guided()


def step_of(engine: Engine, trace: Trace, row: int, one: Serving, now: RowReport) -> Step:
    settings, prompt = one.request.settings, len(one.prompt)
    offset = int(trace.start[row]) - prompt
    here: Any = (row, slice(max(0, engine.window.span(prompt, settings.new_tokens) - offset)))
    draft, committed, revised, masked, confidence = (
        value[here].clone() for value in (trace.draft, trace.committed, trace.revised, trace.masked, trace.confidence)
    )
    best = None
    if settings.logprobs is not None:
        assert trace.logprob is not None and trace.best_ids is not None and trace.best is not None
        most = slice(settings.logprobs)
        best = Logprobs(trace.logprob[here].clone(), trace.best_ids[here][:, most], trace.best[here][:, most])
    final = one.answer.grow(offset, draft, masked, committed, best)
    if engine.window.terms.revises and (now.active or one.segments):  # what an unfinished block holds may change
        unfinished = int(trace.settled[row]) if now.active else one.segments[0].start
        final = min(final, max(0, unfinished - prompt))
    return Step(
        one.request.row, offset, now.denoised, final, draft, committed, revised, masked,
        confidence, trace.alpha[here].clone() if engine.rows.carry.alpha is not None else None, best,
        one.answer.tell(final), one.answer.end,
    )  # fmt: skip


def no_numbers(step: int, reference: bool = False) -> str:
    """What is told of a step whose logits are no numbers."""
    whose = "the logits of the reference" if reference else "the model's logits"
    return (
        f"{whose} are NaN or inf at denoising step {step}; try float32 (--dtype float32), and check the checkpoint "
        "with `rcd info --check`."
    )
