"""What the engine tells of its rows after a step: their events, and the answers that have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rcd.decode.events import Counts, Event, Failed, Finished, Logprobs, Step
from rcd.decode.requests import Serving
from rcd.decode.rows import REPORT
from rcd.decode.units import Report
from rcd.errors import RCDError, first_line

if TYPE_CHECKING:
    from rcd.decode.engine import Engine


def told(engine: Engine, report: Report, values: list[list[int]]) -> list[Event]:
    """Of the rows that took this step: their events, if they are wanted, and the answers that a stop string ends."""
    events: list[Event] = []
    trace = report.trace
    if trace is None:
        return events
    took = trace.took.tolist()
    for row, one in list(engine.deciding().items()):
        found = dict(zip(REPORT, values[row], strict=True))
        if not took[row] or found["serial"] != one.serial or not one.request.features.watched:
            continue
        event = step_of(engine, report, row, one, found["denoised"], bool(found["active"]))
        if one.request.watch:
            events.append(event)
        if one.answer.stopped and not found["broken"]:
            # a block that this step has finished is counted as stored for the next one's sake, which will not come
            stored = max(0, found["stored"] - found["due"] * found["active"])
            events.append(one.answer.cut(counts(engine, one, found["denoised"], stored)))
            engine.drop(row)
    return events


def mistaken(engine: Engine) -> list[Event]:
    """The requests whose probe has raised fail, alone."""
    events: list[Event] = []
    for row, one in list(engine.serving.items()):
        if (error := one.mistake) is not None:
            said = f"the probe raised {type(error).__name__} ({first_line(error)}); mend it, or decode without a probe."
            events.append(Failed(one.request.row, str(error) if isinstance(error, RCDError) else said, cause=error))
            engine.drop(row)
    return events


def ended(engine: Engine, row: int, one: Serving, stored: int, broken: int) -> Finished | Failed:
    if broken:
        return Failed(one.request.row, no_numbers(abs(broken), reference=broken < 0))
    length = len(one.prompt)
    new = engine.rows.text[row, length : length + one.request.settings.new_tokens].tolist()
    return one.answer.ended(new, counts(engine, one, one.last, stored))


def counts(engine: Engine, one: Serving, denoised: int, stored: int) -> Counts:
    every = denoised if engine.window.terms.carry.step_pass == "reference" else 0
    reference = 0 if engine.reference is None else one.prefills + one.references + every + stored
    return Counts(denoising=denoised, prefill=one.prefills, start=one.starts, store=stored, reference=reference)


def step_of(engine: Engine, report: Report, row: int, one: Serving, number: int, more: bool) -> Step:
    """`more`: whether the row goes on."""
    trace, asked, prompt = report.trace, one.request.settings, len(one.prompt)
    assert trace is not None
    offset = int(trace.start[row]) - prompt
    here: Any = (row, slice(max(0, engine.window.span(prompt, asked.new_tokens) - offset)))
    draft, committed, revised, masked, confidence = (
        value[here].clone() for value in (trace.draft, trace.committed, trace.revised, trace.masked, trace.confidence)
    )
    best = None
    if asked.logprobs is not None:
        assert trace.logprob is not None and trace.best_ids is not None and trace.best is not None
        most = slice(asked.logprobs)
        best = Logprobs(trace.logprob[here].clone(), trace.best_ids[here][:, most], trace.best[here][:, most])
    final = one.answer.grow(offset, draft, masked, committed, best)
    if engine.window.terms.revises and more:  # what an unfinished block holds may change
        final = min(final, max(0, int(trace.settled[row]) - prompt))
    return Step(
        one.request.row, offset, number, final, draft, committed, revised, masked,
        confidence, trace.alpha[here].clone() if engine.rows.carry.alpha is not None else None, best,
    )  # fmt: skip


def no_numbers(step: int, reference: bool = False) -> str:
    """What is told of a step whose logits are no numbers."""
    whose = "the logits of the reference" if reference else "the model's logits"
    return (
        f"{whose} are NaN or inf at denoising step {step}; try float32 (--dtype float32), and check the checkpoint "
        "with `rcd info --check`."
    )
