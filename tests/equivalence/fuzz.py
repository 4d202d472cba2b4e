"""A seeded fuzz: engine = oracle, over random models, carries, rules, windows, settings and company.

    python -m tests.equivalence.fuzz --cases 2000 --seed 0      # all of it; a part of it runs in the tests

A case is a few requests, each with settings of its own, on an engine with fewer rows than requests, so that rows are
used again. Every answer, every count and every step's event must equal the oracle's (`rcd.decode.simple`) in fp64.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rcd.api import Pipeline
from rcd.carry.base import Carry
from rcd.carry.iter_smooth import IterSmooth
from rcd.carry.latent_refinement import LatentRefinement
from rcd.carry.loopholing import Loopholing
from rcd.carry.none import NoCarry
from rcd.carry.residual import Residual
from rcd.carry.soft_mask import SoftMask
from rcd.carry.token_merge import TokenMerge
from rcd.decode import simple
from rcd.decode.config import DecodeConfig, capacity_for, fitting
from rcd.decode.engine import Engine
from rcd.decode.events import Event, Failed, Finished, Step
from rcd.decode.requests import Request
from rcd.models.toy import toy

VOCAB, MOST_PROMPT = 48, 12
MASK, EOT, EOS = VOCAB - 3, VOCAB - 2, VOCAB - 1
ENDS = (EOT, EOS)
ALPHA_OF_NOTE, STEPS_OF_NOTE = 0.1, 8
CLOSE = 1e-4
"""Of alphas and confidences: a residual that recurs over many steps grows the roundings of fp64, threefold a step."""


@cache
def model(family: str, seed: int, learnt: bool) -> Pipeline:
    made = toy(
        family, seed=seed, vocab=VOCAB, width=32, heads=2, layers=2, context=256, spread=(0.5, 1.0, 2.0)[seed % 3]
    )
    made.model.double()
    if learnt:
        made.model.hold(Loopholing())
    return Pipeline(made)


@dataclass
class Case:
    """Requests with the configurations of one engine."""

    name: str
    family: str
    pipeline: Pipeline
    reference: Pipeline | None
    prompts: list[list[int]]
    configs: list[DecodeConfig]
    """Resolved; the engine's part is the same in all."""
    rows: int
    watch: bool
    notes: dict[str, Any] = field(default_factory=dict)


def carry_of(draw: random.Random) -> Carry:
    if draw.random() < 0.6:
        return Residual(
            alpha=draw.choice(["entropy"] * 5 + ["confidence", "fixed", "one", "top1", "inverse_entropy"]),
            alpha_scale=draw.choice([1.0, 1.0, 0.5]), alpha_most=draw.choice([1.0, 1.0, 0.8]),
            start=draw.choice(["zero", "zero", "self", "dirichlet", "reference"]),
            t_res=draw.choice([1.0, 1.0, 0.8, 1.5]), t_res_on=draw.choice(["alpha", "both"]),
            t_res_at_start=draw.random() < 0.3, source=draw.choice(["self"] * 5 + ["reference"]),
        )  # fmt: skip
    rivals: list[Carry] = [
        NoCarry(), Loopholing(), IterSmooth(), TokenMerge(top_k=draw.choice([1, 3])), SoftMask(), LatentRefinement()
    ]  # fmt: skip
    return draw.choice(rivals)


def request_of(draw: random.Random, carry: Carry) -> dict[str, Any]:
    drawn = draw.random() < 0.4
    scales = [0.0, 0.5, 1.0] if carry.scalable else [0.0, 1.0]
    return dict(
        max_new_tokens=draw.randint(1, 28), threshold=draw.choice([0.2, 0.5, 0.7, 0.9, 0.97, 1.0]),
        factor=draw.choice([0.5, 1.0, 2.0]), num_inference_steps=draw.choice([None, None, None, 2, 5]),
        temperature=draw.choice([0.5, 1.0, 1.7]) if drawn else 0.0, top_k=draw.choice([0, 0, 5, 20]),
        top_p=draw.choice([1.0, 1.0, 0.8]), seed=draw.randint(0, 2**40),
        residual_scale=draw.choice([1.0, 1.0, *scales]), stop_ids=(draw.randrange(40),) if draw.random() < 0.2 else (),
        logprobs=draw.choice([None, None, None, 0, 3]),
    )  # fmt: skip


def case_of(seed: int) -> Case:
    draw = random.Random(seed)
    family, carry = draw.choice(["sdar", "sdar", "llada", "llada", "dream"]), carry_of(draw)
    pipeline = model(family, draw.randrange(6), isinstance(carry, Loopholing))
    reference = model(family, 17 + draw.randrange(2), False) if carry.needs_reference else None
    window = draw.choice(fitting(pipeline.settings))
    block = draw.choice([2, 3, 4, 8, 16])
    common: dict[str, Any] = dict(
        carry=carry, window=window, block_length=block if window in ("d2f", "blockwise") or draw.random() < 0.8 else None,
        commit=draw.choice(["threshold"] * 4 + ["topm", "factor", "sequential"]),
        carry_scope=draw.choice(["canvas", "block"]), blocks_in_flight=draw.choice([1, 2, 3, 4]),
        block_add_threshold=draw.choice([0.1, 0.5, 0.9]), decoded_token_threshold=draw.choice([0.3, 0.95]),
        refresh_every=draw.choice([None, 1, 2, 3]) if window in ("prefix", "dual") else None,
        confidence=draw.choice([None, "tempered", "untempered"]), eos_early_stop=draw.random() < 0.7,
        eos_suppression=draw.choice(["none", "none", "logits", "confidence"]), delta="exact",
        passes=draw.choice([None, None, "stock"]), batch_invariant=draw.random() < 0.3,
    )  # fmt: skip
    count = draw.randint(1, 5)
    prompts = [[draw.randrange(40) for _ in range(draw.randint(1, MOST_PROMPT))] for _ in range(count)]
    wishes = [request_of(draw, carry) for _ in range(count)]
    if common["block_length"] is None:  # a canvas that is one block: the engine's block is that of one length
        wishes = [{**wish, "max_new_tokens": wishes[0]["max_new_tokens"]} for wish in wishes]
    configs = [
        pipeline.resolve(DecodeConfig(**common, **wish), len(prompt))
        for wish, prompt in zip(wishes, prompts, strict=True)
    ]
    block = (
        max(config.block for config in configs) if window in ("bidirectional", "prefix", "dual") else configs[0].block
    )
    configs = [replace(config, block_length=block if common["block_length"] else config.block) for config in configs]
    one = configs[0].engine(pipeline.settings)
    kept = [k for k, config in enumerate(configs) if config.engine(pipeline.settings) == one]
    prompts, configs, count = [prompts[k] for k in kept], [configs[k] for k in kept], len(kept)
    return Case(
        f"seed {seed}", family, pipeline, reference, prompts, configs, draw.randint(1, max(1, count - 1)),
        draw.random() < 0.8,
    )  # fmt: skip


def engine_of(case: Case) -> Engine:
    settings = case.pipeline.settings
    engines = [config.engine(settings) for config in case.configs]
    needed = max(
        capacity_for(len(prompt) + config.new_tokens + config.block, config, settings)
        for prompt, config in zip(case.prompts, case.configs, strict=True)
    )
    return Engine(
        case.pipeline.model, engines[0], rows=case.rows, capacity=needed,
        reference=None if case.reference is None else case.reference.model,
    )  # fmt: skip


def decoded(case: Case, served: Engine | None = None) -> tuple[dict[int, list[Event]], Engine]:
    """The engine's events of every request."""
    served = served or engine_of(case)
    told: dict[int, list[Event]] = {row: [] for row in range(len(case.prompts))}
    asked = (
        Request(prompt, config.request, row, case.watch)
        for row, (prompt, config) in enumerate(zip(case.prompts, case.configs, strict=True))
    )
    for event in served.run(asked):
        told[event.row].append(event)
    return told, served


@torch.inference_mode()
def wanted(case: Case) -> dict[int, list[Event]]:
    """The oracle's."""
    second = None if case.reference is None else case.reference.model
    return {
        row: list(simple.decode(case.pipeline.model, prompt, config, reference=second, row=row))
        for row, (prompt, config) in enumerate(zip(case.prompts, case.configs, strict=True))
    }


def difference(case: Case, told: dict[int, list[Event]], want: dict[int, list[Event]]) -> str | None:
    """The first thing in which the two differ."""
    for row in want:
        end, good = told[row][-1], want[row][-1]
        if isinstance(good, Failed) or isinstance(end, Failed):
            return f"row {row}: {end} instead of {good}"
        assert isinstance(end, Finished) and isinstance(good, Finished)
        for name in ("ids", "stop_reason", "counts"):
            if getattr(end, name) != getattr(good, name):
                return f"row {row}: {name} {getattr(end, name)} instead of {getattr(good, name)}"
        if (end.logprobs is None) != (good.logprobs is None):
            return f"row {row}: log probabilities are missing"
        for a, b in zip(end.logprobs or (), good.logprobs or (), strict=True):
            same = a.token == b.token and (a.logprob == b.logprob or abs(a.logprob - b.logprob) < CLOSE or a != a)
            if not same and not (a.logprob != a.logprob and b.logprob != b.logprob):
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
        if (a.number, a.final) != (b.number, b.final):
            return f"{where}: {a.number, a.final} instead of {b.number, b.final}"
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
                if apart.numel() and float(apart.max()) > CLOSE:
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


def check(seed: int, change: Callable[[Engine], None] | None = None) -> tuple[str | None, dict[str, Any]]:
    """(what is wrong with a case, what it exercised). `change` plants a fault in the engine."""
    case = case_of(seed)
    served = engine_of(case)
    if change is not None:
        change(served)
    told, served = decoded(case, served)
    want = wanted(case)
    alphas = [
        float(event.alpha[event.masked].mean())
        for events in want.values() for event in events
        if isinstance(event, Step) and event.alpha is not None and bool(event.masked.any())
    ]  # fmt: skip
    steps = max(sum(isinstance(event, Step) for event in events) for events in want.values())
    notes = {
        "steps": steps, "alpha": sum(alphas) / len(alphas) if alphas else 0.0,
        "reused": len(case.prompts) > case.rows, "window": case.configs[0].window, "family": case.family,
        "requests": len(case.prompts),
    }  # fmt: skip
    wrong = difference(case, told, want)
    if wrong is None and served.busy:
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
    deep = sum(note["steps"] >= STEPS_OF_NOTE and note["alpha"] > ALPHA_OF_NOTE for note in notes)
    print(
        f"{len(notes)} cases of {sum(note['requests'] for note in notes)} requests, {failed} differ; {deep} take "
        f"{STEPS_OF_NOTE} steps or more with a mean alpha above {ALPHA_OF_NOTE}; {sum(n['reused'] for n in notes)} reuse a row"
    )


if __name__ == "__main__":
    main()
