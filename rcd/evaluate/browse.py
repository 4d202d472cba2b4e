"""Single answers as the data that a report's script lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rcd.evaluate.campaign import Line
from rcd.evaluate.wording import dial, short

ITEMS, LETTERS, LONG = 300, 3_000_000, 1500
"""What a page holds at most: items, letters in all, letters of one text."""


def items(lines: Sequence[Line], found: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """What the script reads, and how many items there are: every text once, answers as [text, right, tokens, steps]
    by entry, threshold (or value of a line's own setting) and item. A line of one point stands beside every other's."""
    several = [line for line in lines if len(line.sweep.points) > 1] or lines[:1]
    places = {(point.setting, point.threshold) for line in several for point in line.sweep.points}
    thresholds = sorted(places, key=lambda place: (place[0] != "threshold", place[0], place[1] or 0.0))
    records = [
        {
            place: rows
            for point, rows in zip(line.sweep.points, line.records, strict=True)
            for place in (thresholds if len(line.sweep.points) == 1 else [(point.setting, point.threshold)])
        }
        for line in lines
    ]
    texts: dict[str, int] = {}
    kept: list[dict[str, Any]] = []
    answers: list[list[list[Any] | None]] = [[[] if t in held else None for t in thresholds] for held in records]
    letters = 0
    for number in range(min(ITEMS, found["items"])):
        if letters > LETTERS:
            break
        one = next(iter(records[0].values()))[number]
        item = {"name": one.item, "prompt": _shown(one.task, one.prompt), "answer": _shown(one.task, one.answer)}
        kept.append({**item, "grid": one.task == "sudoku"})
        letters += len(item["prompt"]) + len(item["answer"])
        for held, own in zip(records, answers, strict=True):
            for k, threshold in enumerate(thresholds):
                place = own[k]
                if place is not None:
                    record = held[threshold][number]
                    text = _shown(record.task, record.output)
                    letters += 12 + (len(text) if text not in texts else 0)
                    place.append([texts.setdefault(text, len(texts)), int(record.right), record.tokens, record.steps])
    names = [line.entry.name for line in lines]
    first = max(range(len(thresholds)), key=lambda k: _disagreements([own[k] for own in answers]))
    named = [short(value) if setting == "threshold" else dial(setting, value) for setting, value in thresholds]
    data = {"entries": names, "thresholds": named, "items": kept, "texts": list(texts), "answers": answers}
    return {**data, "first": first}, len(kept)


def _disagreements(answers: Sequence[list[Any] | None]) -> int:
    """Items that are right by one and wrong by another."""
    rows = zip(*(own for own in answers if own is not None), strict=True)
    return sum(len({each[1] for each in row}) > 1 for row in rows)


def _shown(task: str, text: str) -> str:
    """A sudoku as a grid; a long text without its middle."""
    if task == "sudoku":
        text = "\n".join(row.strip() for row in text.rpartition(":")[2].strip().split("/"))
    if len(text) <= LONG:
        return text
    head = LONG // 3
    return f"{text[:head]}\n[... {len(text) - LONG:,} letters ...]\n{text[head - LONG :]}"
