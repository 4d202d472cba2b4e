"""One model on one task: decoded, graded, recorded; resumable, and spread over processes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from rcd.decode.config import DecodeConfig
from rcd.errors import RCDError, whole
from rcd.evaluate.answering import Answered, answers
from rcd.evaluate.grading import grade
from rcd.evaluate.points import Point
from rcd.evaluate.provenance import MADE_ON, check_alike, conditions, dtype_name
from rcd.evaluate.records import Folder, Record, read_records, read_run, unfinished
from rcd.evaluate.statistics import paired, wilson
from rcd.evaluate.sweep import steps_of
from rcd.evaluate.wording import counted

if TYPE_CHECKING:
    from rcd.api import Pipeline
    from rcd.data.tasks.base import Problem

Say = Callable[[int, int, int], None]
"""(answers so far, of all, right so far)."""


def digest(problems: Sequence[Problem]) -> str:
    """Of questions and answers: names may stay the same where a seed has changed."""
    text = "\n".join(f"{problem.name}\n{problem.question}\n{problem.answer}" for problem in problems)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of(problems: Sequence[Problem]) -> Callable[[int], str]:
    """The digest of the first so many problems: a folder that holds those can go on with the others."""
    return lambda count: digest(problems[:count])


def made_on(pipeline: Pipeline) -> dict[str, str]:
    """Where answers are made; the device is no setting of theirs."""
    return {"device": pipeline.model.device.type, "dtype": dtype_name(pipeline)}


def settings_of(
    model: str,
    task: str,
    problems: Sequence[Problem],
    config: DecodeConfig,
    samples: int,
    reference: str | None = None,
    *,
    vocabulary: int,
    dtype: str | None,
) -> dict[str, Any]:
    """What the results depend on; `config` is resolved. The batch is not in it, nor the number of processes."""
    return {
        "task": task, "items": len(problems), "items_digest": digest(problems), "samples": samples,
        **conditions(model, config, reference, vocabulary=vocabulary, dtype=dtype),
    }  # fmt: skip


def evaluate(
    pipeline: Pipeline,
    problems: Sequence[Problem],
    config: DecodeConfig,
    folder: str | Path,
    *,
    model: str,
    task: str,
    samples: int = 1,
    reference: tuple[str, Pipeline] | None = None,
    batch: int = 32,
    process: int = 0,
    processes: int = 1,
    wait: Callable[[], Any] = lambda: None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Answer what the folder does not hold yet; returns `summary`. A folder with the first of these problems goes on
    with the others. `wait` joins the processes."""
    whole("samples", samples, least=1)
    if not problems:
        raise RCDError("there are no problems to decode; ask for at least one.")
    if samples > 1 and config.temperature == 0:
        raise RCDError(f"{samples} samples at temperature 0 are the same answer; give --temperature (the paper: 0.6).")
    names = Counter(problem.name for problem in problems)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise RCDError(f"two items are named {twice!r}; give every one an id of its own.")
    prompts = pipeline.encode([problem.question for problem in problems])
    config = pipeline.resolve(config, max(map(len, prompts)))
    name, second = reference if reference is not None else (None, None)
    place = made_on(pipeline)
    settings = settings_of(
        model, task, problems, config, samples, name, vocabulary=pipeline.settings.vocab_size, dtype=place["dtype"]
    )
    order = [(problem.name, sample) for problem in problems for sample in range(samples)]
    if process == 0:
        results = Folder(folder, settings, digest_of(problems))
        if len(results.read()) < len(order):
            results.begin(place)
    wait()
    if process:
        results = Folder(folder, settings, digest_of(problems))
    held = {record.key: record.right for record in results.read()}
    wait()  # before anyone writes
    pending = [
        (number, sample)
        for number, problem in enumerate(problems)
        for sample in range(samples)
        if (problem.name, sample) not in held
    ][process::processes]
    done, right, total = len(held), sum(held.values()), len(order)
    seeds = [config.seed + number * samples + sample for number, sample in pending]
    chosen = [prompts[number] for number, _ in pending]
    with closing(answers(pipeline, chosen, config, seeds=seeds, reference=second, batch=batch)) as found:
        for answer in found:
            number, sample = pending[answer.number]
            record = _record(problems[number], sample, answer)
            results.append([record], process if processes > 1 else None)
            done, right = done + 1, right + record.right
            if say is not None:
                say(done, total, right)
    results.close()
    wait()
    if process == 0:
        results.merge(order)
    wait()
    return summary(folder)


def _record(problem: Problem, sample: int, found: Answered) -> Record:
    answer = found.generation
    return Record(
        item=problem.name, sample=sample, task=problem.task, prompt=problem.question, output=answer.text,
        answer=problem.answer, right=grade(problem, answer.text), tokens=answer.tokens, steps=steps_of(answer),
        forwards=answer.forwards, seconds=round(found.share, 6), stop_reason=answer.stop_reason,
    )  # fmt: skip


def summary(folder: str | Path) -> dict[str, Any]:
    """The figures of an evaluation, finished or not."""
    run, records = read_run(folder), read_records(folder)
    if not records:
        raise RCDError(f"{folder} holds no answers yet; run `rcd eval` first.")
    means = list(_means(records).values())
    low, high = interval(means, one_each=run["samples"] == 1)
    tokens, steps = sum(r.tokens for r in records), sum(r.steps for r in records)
    seconds = sum(r.seconds for r in records)
    return {
        "model": run["model"], "task": run["task"], "carry": run["carry"], "threshold": run["decode"]["threshold"],
        "items": len(means), "samples": run["samples"], "complete": len(records) == run["items"] * run["samples"],
        "accuracy": float(np.mean(means)), "low": low, "high": high,
        "tokens_per_step": tokens / steps, "tokens_per_forward": tokens / sum(r.forwards for r in records),
        "tokens": tokens / len(records), "tokens_per_second": tokens / seconds if seconds else None,
        "seconds": seconds, "cut_off": sum(r.stop_reason == "length" for r in records) / len(records),
        "made_on": run.get(MADE_ON, []),
    }  # fmt: skip


def _means(records: Sequence[Record]) -> dict[str, float]:
    """Pass@1 of each item: the share of its samples that is right."""
    rights: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        rights[record.item].append(record.right)
    return {item: sum(values) / len(values) for item, values in rights.items()}


def interval(means: Sequence[float], one_each: bool) -> tuple[float, float]:
    """95% of a mean over items: Wilson's where each has one answer, else mean ± 1.96 sd / sqrt(N) (samples of one item
    are no items of their own)."""
    if one_each:
        return wilson(round(sum(means)), len(means))
    if len(means) < 2:
        return 0.0, 1.0  # one value says nothing of its spread
    mean = float(np.mean(means))
    reach = NormalDist().inv_cdf(0.975) * float(np.std(means, ddof=1)) / math.sqrt(len(means))
    return max(0.0, mean - reach), min(1.0, mean + reach)


def compare_runs(base: str | Path, other: str | Path) -> dict[str, Any]:
    """Two evaluations on the same items: the paired difference other - base in points with its 95% interval."""
    runs = read_run(base), read_run(other)
    if runs[0]["items_digest"] != runs[1]["items_digest"]:
        raise RCDError(
            f"{base} and {other} are over different items ({' and '.join(map(_asked, runs))}); evaluate both on the "
            "same task, limit and seed."
        )
    for folder in (base, other):
        if short := unfinished(folder):
            raise RCDError(f"{folder} is unfinished ({short}); the `rcd eval` command that began it goes on with it.")
    check_alike(runs, (base, other))
    a, b = (_means(read_records(folder)) for folder in (base, other))
    return {"base": summary(base), "other": summary(other), **paired(list(a.values()), [b[item] for item in a])}


def _asked(run: dict[str, Any]) -> str:
    return f"{counted(run['items'], 'item')} of {run['task']}"


def point_of(folder: str | Path, setting: str = "threshold") -> Point:
    """A finished evaluation with one sample an item, as a point of a sweep over this setting."""
    run, records = read_run(folder), read_records(folder)
    return Point(
        threshold=run["decode"][setting],
        setting=setting,
        right=np.array([record.right for record in records]),
        tokens=np.array([record.tokens for record in records]),
        steps=np.array([record.steps for record in records]),
        seconds=sum(record.seconds for record in records),
        texts=[record.output for record in records],
    )
