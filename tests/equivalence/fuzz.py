"""A seeded fuzz: engine = oracle, over random models, carries, rules, windows, settings and company.

    python -m tests.equivalence.fuzz --cases 2000 --seed 0      # all of it; a part of it runs in the tests

A case is a few requests, each with settings of its own, on an engine with fewer rows than requests, so that rows are
used again. Every answer, every count and every step's event must equal the oracle's (`rcd.decode.simple`) in fp64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from math import isnan
from typing import Any

import torch
from torch import Tensor

from rcd.decode import engine as engines
from rcd.decode import flight, simple
from rcd.decode.config import DecodeConfig, capacity_for
from rcd.decode.engine import Engine
from rcd.decode.events import Event, Failed, Finished, Step
from rcd.decode.requests import Request
from tests.equivalence.cases import ENDS, Case, case_of, words

ALPHA_OF_NOTE, STEPS_OF_NOTE = 0.1, 8
CLOSE, GROWTH, APART = 1e-9, 4.0, 1e-2
"""Of alphas and confidences: a residual that recurs over many steps grows the roundings of fp64, threefold a step and
more, so that answers are no longer than some twenty steps here."""
COMPARABLE = 24
"""Steps of a request, up to which they have not yet become other tokens. Answers have no more tokens than that; but
under some rules a step may commit nothing, or edit what is there."""
MOST_PASSES = 1000
"""Of one case: beyond them it hangs."""


class Endless(AssertionError):
    """A case takes more passes than any that ends."""


@contextmanager
def pieces_of(case: Case) -> Iterator[None]:
    """Prompts are read in pieces as long as the case wants them."""
    before = flight.PREFILL_TOKENS, engines.PIECE_BUDGET
    flight.PREFILL_TOKENS, engines.PIECE_BUDGET = case.piece, case.budget
    try:
        yield
    finally:
        flight.PREFILL_TOKENS, engines.PIECE_BUDGET = before


def engine_of(case: Case) -> Engine:
    settings = case.pipeline.settings
    owns = [config.engine(settings) for config in case.configs]
    needed = max(
        capacity_for(len(prompt) + config.new_tokens + config.block, owns[0], settings)
        for prompt, config in zip(case.prompts, case.configs, strict=True)
    )
    served = Engine(
        case.pipeline.model, owns[0], rows=case.rows, capacity=needed + case.spare,
        reference=None if case.reference is None else case.reference.model, text=words,
    )  # fmt: skip
    served.lag = 0 if served.window.terms.starts else case.lag
    return served


def decoded(case: Case) -> tuple[dict[int, list[Event]], Engine]:
    """The engine's events of every request."""
    served = engine_of(case)
    told: dict[int, list[Event]] = {row: [] for row in range(len(case.prompts))}
    asked = (
        Request(prompt, config.request, row, case.watch, canvas=canvas)
        for row, (prompt, config, canvas) in enumerate(zip(case.prompts, case.configs, case.canvases, strict=True))
    )
    turn = served.turn

    def bounded() -> list[Event]:
        if served.stats.passes >= MOST_PASSES:
            raise Endless("it does not end")
        return turn()

    served.turn = bounded  # type: ignore[method-assign]
    for event in served.run(asked):
        told[event.row].append(event)
    return told, served


@torch.inference_mode()
def wanted(case: Case) -> dict[int, list[Event]]:
    """The oracle's."""
    second = None if case.reference is None else case.reference.model
    return {
        row: list(
            simple.decode(case.pipeline.model, prompt, config, reference=second, row=row, text=words, canvas=canvas)
        )
        for row, (prompt, config, canvas) in enumerate(zip(case.prompts, case.configs, case.canvases, strict=True))
    }


def within(steps: int) -> float:
    """What two orders of the same computation may be apart after so many steps."""
    return min(APART, max(CLOSE, 1e-14 * GROWTH**steps))


def difference(case: Case, told: dict[int, list[Event]], want: dict[int, list[Event]]) -> str | None:
    """The first thing in which the two differ."""
    for row in want:
        end, good = told[row][-1], want[row][-1]
        if isinstance(good, Failed) or isinstance(end, Failed):
            return f"row {row}: {end} instead of {good}"
        assert isinstance(end, Finished) and isinstance(good, Finished)
        if good.counts.denoising > COMPARABLE:
            continue
        for name in ("ids", "stop_reason", "text", "counts", "given"):
            if getattr(end, name) != getattr(good, name):
                return f"row {row}: {name} {getattr(end, name)} instead of {getattr(good, name)}"
        if (end.logprobs is None) != (good.logprobs is None):
            return f"row {row}: log probabilities are missing"
        for a, b in zip(end.logprobs or (), good.logprobs or (), strict=True):
            nothing = isnan(a.logprob) and isnan(b.logprob)
            if a.token != b.token or not (nothing or abs(a.logprob - b.logprob) < within(good.counts.denoising)):
                return f"row {row}: {a} instead of {b}"
        if case.watch:
            found = _events(row, told[row][:-1], want[row][:-1], len(case.prompts[row]), case.configs[row])
            if found:
                return found
    return None


def _events(row: int, told: Sequence[Event], want: Sequence[Event], prompt: int, config: DecodeConfig) -> str | None:
    if len(told) != len(want):
        return f"row {row}: {len(told)} steps instead of {len(want)}"
    for a, b in zip(told, want, strict=True):
        assert isinstance(a, Step) and isinstance(b, Step)
        where = f"row {row}, step {b.number}"
        if (a.number, a.final, a.settled) != (b.number, b.final, b.settled):
            return f"{where}: {a.number, a.final, a.settled} instead of {b.number, b.final, b.settled}"
        # both windows, as far as they tell of the same positions
        first, last = max(a.offset, b.offset), min(a.offset + len(a.draft), b.offset + len(b.draft), config.new_tokens)
        for name in ("committed", "draft", "masked", "confidence", "alpha"):
            one, other = _part(a, name, first, last), _part(b, name, first, last)
            if one is None or other is None:
                if one is not other:
                    return f"{where}: {name} is missing"
                continue
            if name in ("confidence", "alpha"):
                there = ~_part(b, "confidence", first, last).isnan() & ~_part(a, "confidence", first, last).isnan()  # type: ignore[union-attr]
                if name == "alpha":
                    there &= _part(b, "masked", first, last)  # type: ignore[operator]
                apart = (one - other)[there].abs()
                if apart.numel() and float(apart.max()) > within(b.number):
                    return f"{where}: {name} is off by {float(apart.max()):.1e}"
            elif name == "draft":
                settled = ~_part(b, "masked", first, last)  # type: ignore[operator]
                ended = [
                    k
                    for k in range(first, last)
                    if bool(settled[k - first]) and int(other[k - first]) in (*ENDS, *config.stop_ids)
                ]
                settled[ended[0] - first + 1 if ended else len(settled) :] = False  # filler behind the end
                if not torch.equal(one[settled], other[settled]):
                    return f"{where}: draft {one.tolist()} instead of {other.tolist()}"
            elif not torch.equal(one, other):
                return f"{where}: {name} {one.tolist()} instead of {other.tolist()}"
    return None


def _part(event: Step, name: str, first: int, last: int) -> Tensor | None:
    value = getattr(event, name)
    return None if value is None else value[first - event.offset : max(first, last) - event.offset]


def check(seed: int) -> tuple[str | None, dict[str, Any]]:
    """(what is wrong with a case, what it exercised)."""
    case = case_of(seed)
    with pieces_of(case):
        told, served = decoded(case)
        want = wanted(case)
    alphas = [
        float(event.alpha[event.masked].mean())
        for events in want.values() for event in events
        if isinstance(event, Step) and event.alpha is not None and bool(event.masked.any())
    ]  # fmt: skip
    steps = max(sum(isinstance(event, Step) for event in events) for events in want.values())
    notes = {
        "deep": steps >= STEPS_OF_NOTE and bool(alphas) and sum(alphas) / len(alphas) > ALPHA_OF_NOTE,
        "reused": len(case.prompts) > case.rows, "lagged": served.lag > 0, "requests": len(case.prompts),
        "stopped": any(isinstance(end, Finished) and end.text is not None for *_, end in want.values()),
        "pieces": any(isinstance(end, Finished) and end.counts.prefill > 1 for *_, end in want.values()),
        "long": sum(isinstance(end, Finished) and end.counts.denoising > COMPARABLE for *_, end in want.values()),
        "filled": any(isinstance(end, Finished) and end.given > 0 for *_, end in want.values()),
    }  # fmt: skip
    wrong = difference(case, told, want)
    if wrong is None and (served.busy or served.free != case.rows):
        wrong = "the engine is still busy"
    return None if wrong is None else f"seed {seed} ({case.family}, {brief(case.configs[0])}): {wrong}", notes


def brief(config: DecodeConfig) -> str:
    """What is not at its default."""
    plain = DecodeConfig()
    return ", ".join(
        f"{name.name}={getattr(config, name.name)}" for name in fields(config)
        if getattr(config, name.name) != getattr(plain, name.name)
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true", help="stop at the first difference")
    given = parser.parse_args()
    torch.set_num_threads(1)
    failed, notes = 0, []
    for seed in range(given.seed, given.seed + given.cases):
        wrong, note = check(seed)
        notes.append(note)
        if wrong:
            failed += 1
            print(wrong, flush=True)
            if given.stop:
                break
    print(summary(notes, failed))
    raise SystemExit(failed > 0)


def summary(notes: Sequence[dict[str, Any]], failed: int) -> str:
    count = {name: sum(note[name] for note in notes) for name in notes[0]}
    return (
        f"{len(notes)} cases of {count['requests']} requests, {failed} differ; {count['deep']} take {STEPS_OF_NOTE} "
        f"steps or more with a mean alpha above {ALPHA_OF_NOTE}, {count['reused']} reuse a row, {count['lagged']} have "
        f"a host that lags, {count['stopped']} end by a stop string, {count['pieces']} read a prompt in pieces, "
        f"{count['filled']} fill in a canvas; {count['long']} requests take more than {COMPARABLE} steps and are not "
        "compared"
    )


if __name__ == "__main__":
    main()
