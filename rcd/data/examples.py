"""From rows to tokens: chat template, end token, length filter, and a report of what was dropped and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rcd.data.rows import Row
from rcd.errors import RCDError, first_line

TOGETHER = 4096
"""So many texts are tokenised at a time."""


@dataclass(frozen=True)
class Example:
    name: str
    ids: list[int]
    prompt: int
    """The first so many tokens are the prompt and never masked."""


@dataclass
class Report:
    kept: int = 0
    tokens: int = 0
    dropped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Reason -> the places of the rows."""

    def lines(self) -> list[str]:
        """For a reader: what was kept, and each reason with its count and its first places."""
        out = [f"{self.kept:,} examples, {self.tokens:,} tokens"]
        for reason, places in self.dropped.items():
            first = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
            out.append(f"{len(places):,} dropped: {reason} ({first})")
        return out


def encode(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    eos_token_id: int,
    max_length: int,
    min_length: int = 0,
    prompt_field: str = "prompt",
    response_field: str = "response",
    messages_field: str | None = None,
    chat: bool | None = None,
) -> tuple[list[Example], Report]:
    """Examples that end with the end token, from two fields or from a conversation whose last message is the answer."""
    report, examples = Report(), []
    texts = _texts(rows, report, prompt_field, response_field, messages_field)
    while part := list(islice(texts, TOGETHER)):
        starts = prompt_ids([prompt for _, prompt, _ in part], tokenizer, chat)
        ends = tokenizer([response for _, _, response in part], add_special_tokens=False)["input_ids"]
        for (place, _, _), start, end in zip(part, starts, ends, strict=True):
            ids = [*start, *end, eos_token_id]
            if len(ids) > max_length:
                report.dropped[f"longer than {max_length:,} tokens"].append(place)
            elif len(ids) < min_length:
                report.dropped[f"shorter than {min_length:,} tokens"].append(place)
            else:
                examples.append(Example(place, ids, len(start)))
                report.kept += 1
                report.tokens += len(ids)
    if not examples:
        why = "; ".join(report.lines()[1:]) or "the data set is empty"
        raise RCDError(f"no training example is left: {why}.")
    return examples, report


def _texts(
    rows: Iterable[Row], report: Report, prompt_field: str, response_field: str, messages_field: str | None
) -> Iterator[tuple[str, Any, str]]:
    """(place, prompt, response) of every row that has both; the prompt is a text or chat messages."""
    for place, row in rows:
        prompt: Any
        response: Any
        if messages_field is not None:
            messages = row.get(messages_field)
            good = isinstance(messages, list) and len(messages) > 1 and all(isinstance(m, dict) for m in messages)
            prompt, response = (messages[:-1], messages[-1].get("content")) if good else (None, None)  # type: ignore[index]
            missing = [] if good and response else [messages_field]
        else:
            prompt, response = row.get(prompt_field), row.get(response_field)
            found = ((prompt_field, prompt), (response_field, response))
            missing = [name for name, value in found if value is None or value == "" or value == []]
        if missing:
            report.dropped[f"no {' and no '.join(repr(name) for name in missing)}"].append(place)
            continue
        yield place, prompt if isinstance(prompt, list) else str(prompt), str(response)


def prompt_ids(prompts: Sequence[Any], tokenizer: Any, chat: bool | None) -> list[list[int]]:
    """Texts or chat messages as token ids; `chat` None: a text goes into the chat template if there is one."""
    template = bool(getattr(tokenizer, "chat_template", None))
    texts: list[tuple[str, bool]] = []  # (text, whether the tokenizer adds its own special tokens)
    for prompt in prompts:
        if isinstance(prompt, str) and not (template if chat is None else chat):
            texts.append((prompt, True))
            continue
        if not template:
            raise RCDError("the tokenizer has no chat template; use plain text (--raw, or chat=false).")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        texts.append((_templated(messages, tokenizer), False))
    out: list[list[int]] = [[] for _ in texts]
    for special in (False, True):
        index = [k for k, (_, adds) in enumerate(texts) if adds is special]
        if index:
            encoded = tokenizer([texts[k][0] for k in index], add_special_tokens=special)["input_ids"]
            for k, ids in zip(index, encoded, strict=True):
                out[k] = list(ids)
    return out


def _templated(messages: Any, tokenizer: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of the checkpoint's: it may raise anything
        raise RCDError(
            f"the chat template does not take these messages ({first_line(error)}); change their roles or their order."
        ) from error
