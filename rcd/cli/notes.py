"""Notes on stderr: what a reader of the results should know, each a line, none of them an error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rcd.terminal import show

if TYPE_CHECKING:
    from rcd.api import Generation, Pipeline
    from rcd.data.tasks.base import Problem

NAMED = 5
"""So many unknown words are named."""


def note(text: str) -> None:
    show(f"rcd: note: {text}", sys.stderr)


def unknown_words(texts: Iterable[str], tokenizer: Any) -> list[str]:
    """The parts of the texts that the tokenizer has no token for, each once."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return []
    parts = dict.fromkeys(part for text in texts for part in _unknown(text, tokenizer, unknown))
    names = dict.fromkeys(part.strip() or part for part in parts)
    return [name for name in names if name not in ("", tokenizer.unk_token)]


def _unknown(text: str, tokenizer: Any, unknown: int) -> list[str]:
    if not getattr(tokenizer, "is_fast", False):
        return [part for part in text.split() if unknown in tokenizer(part, add_special_tokens=False)["input_ids"]]
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = zip(read["input_ids"], read["offset_mapping"], strict=True)
    return [text[first:last] for token, (first, last) in places if token == unknown]


def note_unknown(words: Sequence[str], outcome: str, whose: str = "the tokenizer") -> None:
    """`outcome`: what that means, such as `the answer may be nonsense`."""
    if words:
        more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
        note(f"{whose} does not know {', '.join(map(repr, words[:NAMED]))}{more}; {outcome}")


def note_rule(given: Iterable[str], commit: str) -> None:
    """Of the settings that were given, those of other commit rules."""
    from rcd import registry
    from rcd.cli.flags import flag_of
    from rcd.diffusion.rule import Rule

    unread = Rule.of(registry.get("commit", commit)).unread
    idle = [flag_of(name) for name in given if name in unread]
    if idle:
        note(f"{', '.join(idle)}: no effect with --commit {commit}")


class Unknown:
    """The unknown words of many texts, as they pass by; those of chat messages and token ids are not looked for."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.words = tokenizer, dict[str, None]()

    def hear(self, texts: Iterable[Any]) -> None:
        given = (text for text in texts if isinstance(text, str))
        self.words.update(dict.fromkeys(unknown_words(given, self.tokenizer)))

    def note(self, outcome: str) -> None:
        note_unknown(list(self.words), outcome)


def note_empty(result: Generation) -> None:
    if not result.text.strip():
        why = "ended its text at once" if result.tokens <= 1 else "wrote tokens without text"
        note(f"the answer is empty: the model {why}")


def note_task(model: str, provenance: dict[str, Any], task: str, problems: Sequence[Problem], tokenizer: Any) -> None:
    """Where a model is asked what it cannot know: words that its tokenizer lacks, or a task that it was not trained
    for (a model that was trained on generated problems says which)."""
    words = unknown_words((problem.question for problem in problems), tokenizer)
    note_unknown(words, "answers to such questions may be nonsense", f"the tokenizer of {model}")
    kind, _, rest = str(provenance.get("data", "")).partition(":")
    trained = rest.partition(":")[0]
    if kind == "tasks" and trained != "mixed" and _named(task) and task != trained:
        note(f"{model} was trained for {trained} alone, so its answers to {task} mean little")


def note_model(model: str, pipeline: Pipeline, window: str | None) -> None:
    """Where a model was not trained for what it is to do."""
    if pipeline.untrained:
        note(f"{model} is a causal model, not trained for diffusion; its text means nothing")
    note_window(model, window, pipeline.settings.attention, pipeline.checkpoint.rcd.provenance)


def note_window(model: str, window: str | None, attention: str, provenance: dict[str, Any]) -> None:
    """Where a bidirectional model is given D2F's attention, unless its rcd.json says that it was trained with it."""
    if window == "d2f" and attention == "bidirectional" and provenance.get("window") != "d2f":
        note(
            f"the window d2f has block-causal attention, which is what D2F trains LLaDA for; nothing says that {model} "
            "was trained with it, so its answers may be worse"
        )


def _named(task: str) -> bool:
    """A task of its own, rather than a file, of which nothing is known."""
    from rcd import registry

    return task in registry.names("task")
