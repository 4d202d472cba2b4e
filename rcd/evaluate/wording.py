"""Numbers in sentences: counts, differences, and when there are too few items to say anything."""

from __future__ import annotations

FEW = 30
"""With fewer items an interval says little."""


def counted(number: int, noun: str) -> str:
    """Such as `1 step` and `2,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def dial(setting: str, value: float | None) -> str:
    """A point of a line, such as `threshold 0.9`, `entropy_bound 0.1` or, where nothing is set, `one setting`."""
    return "one setting" if value is None else f"{setting} {value:g}"


def short(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # + 0.0: no minus before a zero


def too_few(items: int, of: str = "") -> list[str]:
    """The note for a reader of intervals; nothing where there are enough items."""
    named = f" of {of}" if of else ""
    verb = "is" if items == 1 else "are"
    return [f"{counted(items, 'item')}{named} {verb} too few for these intervals."] if items < FEW else []
