"""Lines of texts to score, and the records of their likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rcd import scoring
from rcd.batch.lines import PROMPTS, Lines, check_kind, prompt_of, read_object, repeatable, short
from rcd.carry.base import Carry, describe
from rcd.errors import RCDError, no_setting
from rcd.evaluate.provenance import dtype_name
from rcd.likelihood.estimate import Score, resolved
from rcd.likelihood.settings import ScoreConfig
from rcd.models.source import fingerprint

if TYPE_CHECKING:
    from rcd.api import Pipeline

ENDS = ("continuation", "continuations")
FIELDS = ("id", *PROMPTS, *ENDS)
CHANGES_NOTHING = ("batch_size", "carry")
"""Settings that change no record, or are told apart."""


def parse(row: dict[str, Any]) -> tuple[Any, list[Any], bool]:
    """(the prompt, the continuations, whether there may be several) of a line; without a prompt it is empty."""
    for name in row:
        if name not in FIELDS:
            raise no_setting("a line", name, FIELDS)
    given = [name for name in ENDS if row.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RCDError(f"a line has one of continuation and continuations, and this one has {found}.")
    prompt = prompt_of(row) if any(row.get(name) is not None for name in PROMPTS) else ""
    several = given == ["continuations"]
    ends = row[given[0]] if several else [row[given[0]]]
    if not isinstance(ends, list) or not ends:
        raise RCDError(f"continuations is a list of texts, not {short(ends)}.")
    for end in ends:
        if not isinstance(end, str):
            _check_ids(end)
    return prompt, ends, several


def _check_ids(value: Any) -> None:
    if not isinstance(value, list):
        raise RCDError(f"a continuation is a text or a list of token ids, not {short(value)}.")
    check_kind("ids", value)


Heard = Callable[[list[Any]], None]


def records(
    pipeline: Pipeline, lines: Lines, config: ScoreConfig, chat: bool | None, heard: Heard | None = None
) -> Generator[dict[str, Any]]:
    """A record of every line, in their order; `heard` is told the prompt and the continuations of each."""
    for number, content in lines:
        head: dict[str, Any] = {"line": number}
        try:
            row = read_object(content)
            if "id" in row:
                head["id"] = repeatable(row["id"])
            prompt, ends, several = parse(row)
            if heard is not None:
                heard([prompt, *ends])
            scores = score_all(pipeline, prompt, ends, config, chat)
        except RCDError as error:
            yield {**head, "error": str(error)}
            continue
        found = [each.to_dict() for each in scores]
        yield {**head, **({"best": scoring.ranked(scores)[0], "scores": found} if several else found[0])}


def score_all(
    pipeline: Pipeline, prompt: Any, continuations: Sequence[Any], config: ScoreConfig, chat: bool | None
) -> list[Score]:
    pairs = [scoring.pair(pipeline, prompt, each, chat) for each in continuations]
    return [scoring.score(pipeline, *each, config) for each in pairs]


def settings_of(
    pipeline: Pipeline, model: str, config: ScoreConfig, chat: bool | None, overrides: dict[str, Any]
) -> dict[str, Any]:
    """What the records depend on, but for the input; refuses what no line could be scored with."""
    chosen = resolved(config, pipeline.settings, pipeline.checkpoint.rcd.carry)
    assert isinstance(chosen.carry, Carry)
    carry = describe(chosen.carry) if chosen.recursions or chosen.greedy else None
    told = {name: value for name, value in asdict(replace(chosen, carry=None)).items() if name not in CHANGES_NOTHING}
    return {
        "model": model, "model_fingerprint": fingerprint(model), "dtype": dtype_name(pipeline), "score": told,
        "carry": carry, "chat": chat, "overrides": overrides,
    }  # fmt: skip
