"""Requests for generation as lm-eval makes them: read, checked, answered, cut at stop strings, and their cost recorded.

Nothing of lm-eval is needed but the requests themselves.
"""

from __future__ import annotations

import bisect
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rcd.decode.config import DecodeConfig
from rcd.decode.request_settings import LONGEST_STOP, MOST_STOPS
from rcd.decode.stopping import check_prompts
from rcd.errors import RCDError, unwritable
from rcd.evaluate.answering import answers
from rcd.evaluate.sweep import steps_of
from rcd.evaluate.wording import counted
from rcd.terminal import show

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline

REQUESTS, GENERATE = "requests.jsonl", "generate_until"
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the most new tokens; the first that is given counts."""
LISTS = ("stop", "stop_ids")
"""Settings that hold several values."""
SETTINGS = tuple(f.name for f in fields(DecodeConfig) if f.name != "carry")


@dataclass(frozen=True)
class Request:
    """What one request cost: a line of requests.jsonl."""

    task: str
    doc_id: int
    sample: int
    """Of a task that asks several times."""
    prompt_tokens: int
    tokens: int
    """Decoded, the end token included; where a stop string ended decoding, those that were settled then."""
    kept_tokens: int
    """Of them, those before the first stop string."""
    steps: int
    """Passes that commit or prepare a residual (`rcd.evaluate.sweep.steps_of`)."""
    forwards: int
    seconds: float
    """Latency: from when decoding could begin to the answer's end, beside the others that were decoded meanwhile."""
    stop_reason: str
    """`stop` (a stop string), `eos` or `length`."""


@dataclass(frozen=True)
class Asked:
    """A request, read and checked."""

    place: int
    task: str
    doc_id: int
    sample: int
    seed: int
    arguments: tuple[Any, ...]
    prompt: list[int]
    until: tuple[str, ...]
    config: DecodeConfig
    """Resolved, with what of `until` decoding looks for."""


class Answerer:
    """Answers requests and keeps count."""

    def __init__(
        self,
        pipeline: Pipeline,
        config: DecodeConfig,
        *,
        reference: Pipeline | None = None,
        batch: int = 32,
        requests: str | Path | None = None,
        main: bool = True,
    ) -> None:
        """`main`: of several processes, the one that speaks and writes."""
        if pipeline.tokenizer is None:
            raise RCDError("lm-eval asks in text, and this checkpoint has no tokenizer.")
        self.pipeline, self.config, self.reference, self.batch = pipeline, config, reference, batch
        self.resolved = pipeline.resolve(config)
        self.told: list[Request] = []
        self.wall: dict[str, float] = defaultdict(float)
        """Seconds of decoding of each task."""
        self.templated = False
        self.main = main
        self._noted: set[str] = set()
        self._file = Path(requests) if requests is not None and main else None
        if self._file is not None:
            self._claim(self._file)

    @staticmethod
    def _claim(path: Path) -> None:
        if path.exists() and path.stat().st_size:
            raise RCDError(f"{path} holds the requests of another run; choose another folder.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        except OSError as error:
            raise unwritable("the requests", path, error) from error

    def answer(self, requests: Sequence[Any], cached: Any = None) -> list[str]:
        """The texts, in the order of the requests. All are checked before the first is decoded."""
        from tqdm import tqdm

        copies = padding(requests)
        asked = self._read({place: each for place, each in enumerate(requests) if place not in copies})
        texts = [""] * len(requests)
        groups: dict[str, list[Asked]] = defaultdict(list)
        for each in asked:
            groups[each.task].append(each)
        with tqdm(total=len(asked), desc="rcd: requests", mininterval=1.0, disable=not self.main) as bar:
            for task, group in groups.items():
                began = time.perf_counter()
                configs, seeds = [each.config for each in group], [each.seed for each in group]
                for answer in answers(
                    self.pipeline, [each.prompt for each in group], configs, seeds=seeds, reference=self.reference,
                    batch=self.batch,
                ):  # fmt: skip
                    each, found = group[answer.number], answer.generation
                    text, kept, reason = self.cut(found, each.until)
                    texts[each.place] = text
                    self._record(each, found, kept, reason)
                    if cached is not None:
                        cached.add_partial(GENERATE, each.arguments, text)
                    bar.update()
                self.wall[task] += time.perf_counter() - began
        for place, original in copies.items():
            texts[place] = texts[original]
        return texts

    def join(self, rows: Sequence[Request], wall: Mapping[str, float]) -> None:
        """What another process answered meanwhile."""
        self._keep(rows)
        for task, seconds in wall.items():
            self.wall[task] = max(self.wall[task], seconds)

    def _marks(self, until: Sequence[str]) -> set[int]:
        """Stop strings that are special tokens, which the text itself does not show."""
        tokenizer: Any = self.pipeline.tokenizer
        return {tokenizer.get_added_vocab().get(text) for text in until} - {None}

    def _read(self, requests: Mapping[int, Any]) -> list[Asked]:
        """`requests` by their places."""
        out: list[Asked] = []
        samples: Counter[tuple[str, int, int]] = Counter()
        capped: list[int] = []
        if self.pipeline.tokenizer.chat_template and not self.templated:  # type: ignore[union-attr]
            self.note("this checkpoint has a chat template and it is not applied (--apply-chat-template).")
        for place, request in requests.items():
            context, given = request.args
            task, doc = str(request.task_name), int(request.doc_id or 0)
            until, config = self.settings(given)
            prompt = self.encode(context)
            config, fits = self.fitted(config, len(prompt))
            if not fits:
                capped.append(config.new_tokens)
            try:
                check_prompts(
                    [prompt], self.pipeline.settings, config.new_tokens, *config.rounding(self.pipeline.settings)
                )
            except RCDError as error:
                hint = " Fewer worked examples help (--num-fewshot)." if "positions" in str(error) else ""
                raise RCDError(f"document {doc} of {task}: {error}{hint}") from error
            key = (task, doc, int(request.idx))
            sample = samples[key]
            samples[key] += 1
            seed = config.seed + doc * int(request.repeats or 1) + sample  # no matter what else is asked
            until = tuple(dict.fromkeys((*config.stop, *until)))
            config = replace(config, stop=searched(until))
            out.append(Asked(place, task, doc, sample, seed, request.args, prompt, until, config))
        if capped:
            self.note(
                f"the model has {self.pipeline.settings.context_length} positions: {len(capped)} of "
                f"{counted(len(out), 'request')} get fewer new tokens than the task asks for (at least {min(capped)})."
            )
        return out

    def settings(self, given: dict[str, Any]) -> tuple[tuple[str, ...], DecodeConfig]:
        """(stop strings, the configuration) of a task's generation settings; what it leaves open is the model's."""
        given = dict(given)
        until = tuple(str(text) for name in ("until", "stop") for text in several(given.pop(name, None)) if text)
        lengths = [given.pop(name, None) for name in LENGTHS]
        found: dict[str, Any] = {}
        length = next((value for value in lengths if value is not None), None)
        if length is not None:
            found["max_new_tokens"] = int(length)
        sample, temperature = given.pop("do_sample", None), given.pop("temperature", None)
        if sample is False:
            found["temperature"] = 0.0
        elif temperature is not None:
            found["temperature"] = float(temperature)
        elif sample and not self.config.temperature:
            found["temperature"] = 1.0
        for name, value in given.items():
            if name in SETTINGS and value is not None:
                found[name] = several(value) if name in LISTS else value
            elif name not in SETTINGS:
                self.note(f"the generation setting {name}={value!r} means nothing here and is left out.")
        return until, replace(self.config, **found)

    def fitted(self, config: DecodeConfig, prompt: int) -> tuple[DecodeConfig, bool]:
        """The resolved configuration of a prompt of so many tokens, and whether it has room for all that it asks. The
        cap is the prompt's own, so that no answer depends on what else is asked."""
        resolved = self.pipeline.resolve(config, prompt)
        grid = resolved.grid(self.pipeline.settings)
        room = self.pipeline.settings.context_length // grid * grid - prompt
        if room >= resolved.new_tokens or room < 1:
            return resolved, True
        return self.pipeline.resolve(replace(config, max_new_tokens=room), prompt), False

    def encode(self, text: str) -> list[int]:
        """As lm-eval's own models do: the tokenizer's special tokens, unless the text begins with its first one."""
        tokenizer: Any = self.pipeline.tokenizer
        first = getattr(tokenizer, "bos_token", None)
        return list(tokenizer(text, add_special_tokens=not (first and text.startswith(first)))["input_ids"])

    def cut(self, found: Generation, until: Sequence[str]) -> tuple[str, int, str]:
        """(the text before the first stop string, its tokens, the stop reason)."""
        marks = self._marks(until) | set(self.config.stop_ids)
        ids, reason = found.ids, found.stop_reason
        text = self.pipeline.decode(ids) if reason == "stop" else found.text
        special = next((k for k, token in enumerate(ids) if token in marks), len(ids))
        if special < len(ids) - (reason == "eos"):
            ids, reason = ids[:special], "stop"
            text = self.pipeline.decode(ids)
        at = min((text.find(stop) for stop in until if stop in text), default=-1)
        if at < 0:
            return text, len(ids), reason
        lengths = range(len(ids) + 1)
        kept = bisect.bisect_right(lengths, at, key=lambda k: len(self.pipeline.decode(ids[:k]))) - 1
        return text[:at], kept, "stop"

    def _record(self, asked: Asked, found: Generation, kept: int, reason: str) -> None:
        row = Request(
            task=asked.task, doc_id=asked.doc_id, sample=asked.sample, prompt_tokens=len(asked.prompt),
            tokens=found.tokens, kept_tokens=kept, steps=steps_of(found), forwards=found.forwards,
            seconds=round(found.seconds, 6), stop_reason=reason,
        )  # fmt: skip
        self._keep([row])

    def _keep(self, rows: Sequence[Request]) -> None:
        self.told += rows
        self.write(rows)

    def write(self, rows: Sequence[Any]) -> None:
        """Lines of the file of requests."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)

    def note(self, text: str) -> None:
        """Once."""
        if text not in self._noted and self.main:
            self._noted.add(text)
            show(f"rcd: note: {text}", sys.stderr)

    def summary(self) -> dict[str, Any]:
        """What answering cost: `all`, and each of `tasks`."""
        tasks = list(dict.fromkeys(row.task for row in self.told))
        return {
            "all": _figures(self.told, sum(self.wall.values())),
            "tasks": {task: _figures([r for r in self.told if r.task == task], self.wall[task]) for task in tasks},
        }


def several(value: Any) -> tuple[Any, ...]:
    """A list, or one value instead of it, or none."""
    return tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)


def searched(until: Sequence[str]) -> tuple[str, ...]:
    """The stop strings that decoding looks for. A task may name more of them, or longer ones, than a request may have:
    the text is cut at those as well, only later."""
    return tuple(text for text in until if len(text) <= LONGEST_STOP)[:MOST_STOPS]


def padding(requests: Sequence[Any]) -> dict[int, int]:
    """Place -> place of the same request: lm-eval gives all processes equally many by asking a request more often than
    it is to be repeated."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, request in enumerate(requests):
        places[id(request)].append(place)
    again = {id(request): int(request.repeats or 1) for request in requests}
    return {place: held[0] for key, held in places.items() for place in held[again[key] :]}


def _figures(rows: Sequence[Request], wall: float) -> dict[str, Any]:
    tokens, steps, forwards = (sum(getattr(row, name) for row in rows) for name in ("tokens", "steps", "forwards"))
    count = max(1, len(rows))
    return {
        "requests": len(rows), "tokens": tokens, "kept_tokens": sum(row.kept_tokens for row in rows),
        "tokens_per_step": tokens / max(1, steps), "tokens_per_forward": tokens / max(1, forwards),
        "tokens_per_second": tokens / wall if wall else None, "latency": sum(row.seconds for row in rows) / count,
        "cut_off": sum(row.stop_reason == "length" for row in rows) / count,
    }  # fmt: skip
