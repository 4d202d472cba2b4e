"""Requests for likelihoods as lm-eval makes them: read, checked, scored, and their cost recorded."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rcd import scoring
from rcd.errors import RCDError
from rcd.evaluate.requests import Answerer, padding
from rcd.likelihood.estimate import Score, check, resolved
from rcd.likelihood.settings import ScoreConfig

PAIRS, TEXTS = "loglikelihood", "loglikelihood_rolling"
SETTINGS = ("draws", "recursions", "greedy")
"""Of likelihoods alone; seed, guidance, carry and block length are those of decoding."""
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Scored:
    """What one likelihood cost: a line of requests.jsonl."""

    task: str
    doc_id: int
    kind: str
    """`loglikelihood` or, of a whole text, `loglikelihood_rolling`."""
    prompt_tokens: int
    tokens: int
    """Scored."""
    log_likelihood: float
    standard_error: float | None
    greedy: bool | None
    patterns: int
    forwards: int
    seconds: float


class Scorer:
    """Scores requests and keeps count, beside an answerer, whose file it writes to."""

    def __init__(self, answerer: Answerer, config: ScoreConfig) -> None:
        self.answerer, self.config, self.pipeline = answerer, config, answerer.pipeline
        self.resolved = resolved(config, self.pipeline.settings, self.pipeline.checkpoint.rcd.carry)
        self.told: list[Scored] = []

    def pairs(self, requests: Sequence[Any], cached: Any = None) -> list[tuple[float, bool]]:
        """(the bound, whether greedy decoding gives the text) of every context and continuation."""
        if not self.config.greedy and 1 in Counter((str(each.task_name), each.doc_id) for each in requests).values():
            self.answerer.note(
                "whether greedy decoding gives a text is not checked (--greedy, or greedy=True), and told as False to "
                "tasks that ask."
            )
        read = {
            place: [scoring.together(self.answerer.encode, *each.args)]
            for place, each in enumerate(requests) if place not in padding(requests)
        }  # fmt: skip
        found = self._scored(PAIRS, requests, read, cached)
        return [(each.log_likelihood, bool(each.greedy)) for each in found]

    def texts(self, requests: Sequence[Any], cached: Any = None) -> list[float]:
        """The bound of every text, of one longer than the context as the sum over its parts (`scoring.windows`)."""
        read = {
            place: scoring.windows(self.pipeline, self.answerer.encode(each.args[0]), self.config)
            for place, each in enumerate(requests) if place not in padding(requests)
        }  # fmt: skip
        return [each.log_likelihood for each in self._scored(TEXTS, requests, read, cached)]

    def _scored(
        self, kind: str, requests: Sequence[Any], read: Mapping[int, Sequence[Pair]], cached: Any
    ) -> list[Scored]:
        """All are checked before the first is scored."""
        from tqdm import tqdm

        for place, parts in read.items():
            self._check(requests[place], parts)
        out: dict[int, Scored] = {}
        for place in tqdm(read, desc="rcd: likelihoods", mininterval=1.0, disable=not self.answerer.main):
            out[place] = row = self._row(kind, requests[place], read[place])
            self.join([row])
            if cached is not None:
                value = (row.log_likelihood, bool(row.greedy)) if kind == PAIRS else row.log_likelihood
                cached.add_partial(kind, requests[place].args, value)
        copies = padding(requests)
        return [out[copies.get(place, place)] for place in range(len(requests))]

    def _check(self, request: Any, parts: Sequence[Pair]) -> None:
        try:
            for prompt, continuation in parts:
                check(prompt, continuation, self.pipeline.settings, self.resolved.block_length)
        except RCDError as error:
            hint = " Fewer worked examples help (--num-fewshot)." if "more than the" in str(error) else ""
            raise RCDError(f"document {request.doc_id} of {request.task_name}: {error}{hint}") from error

    def _row(self, kind: str, request: Any, parts: Sequence[Pair]) -> Scored:
        began = time.perf_counter()
        found = [scoring.score(self.pipeline, *part, self._settings(part)) for part in parts]
        return Scored(
            task=str(request.task_name), doc_id=int(request.doc_id or 0), kind=kind,
            prompt_tokens=len(parts[0][0]) if parts else 0, tokens=sum(len(each.ids) for each in found),
            log_likelihood=sum(each.log_likelihood for each in found), standard_error=_error(found),
            greedy=found[0].greedy if kind == PAIRS else None, patterns=sum(each.patterns for each in found),
            forwards=sum(each.forwards for each in found), seconds=round(time.perf_counter() - began, 6),
        )  # fmt: skip

    def _settings(self, part: Pair) -> ScoreConfig:
        """Greedy decoding begins with a prompt."""
        return self.config if part[0] else replace(self.config, greedy=False)

    def join(self, rows: Sequence[Scored]) -> None:
        """Also what another process has scored."""
        self.told += rows
        self.answerer.write(rows)

    def summary(self) -> dict[str, Any]:
        """How likelihoods were scored, and what it cost, by task."""
        tasks: dict[str, list[Scored]] = defaultdict(list)
        for row in self.told:
            tasks[row.task].append(row)
        shown = {name: getattr(self.resolved, name) for name in (*SETTINGS, "seed", "guidance", "block_length")}
        return {**shown, "tasks": {task: _figures(rows) for task, rows in tasks.items()}}


def _error(found: Sequence[Score]) -> float | None:
    errors = [each.standard_error for each in found]
    return None if None in errors else math.sqrt(sum(each * each for each in errors if each is not None))


def _figures(rows: Sequence[Scored]) -> dict[str, Any]:
    errors = list(_known(rows))
    return {
        "requests": len(rows), "tokens": sum(row.tokens for row in rows), "forwards": sum(row.forwards for row in rows),
        "standard_error": sum(errors) / len(errors) if errors else None,
        "seconds": sum(row.seconds for row in rows),
    }  # fmt: skip


def _known(rows: Sequence[Scored]) -> Iterator[float]:
    return (row.standard_error for row in rows if row.standard_error is not None)
