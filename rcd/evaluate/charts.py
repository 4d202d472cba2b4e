"""Charts as SVG inside a page: drawn in the page's own colours, so that they are right on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from rcd.evaluate.wording import dial, short

COLOURS = 7
"""The page has so many colours for lines: the classes c0, c1, ..."""
SHAPES = (
    '<circle cx="{x}" cy="{y}" r="4"/>',
    '<rect x="{x}" y="{y}" width="7.4" height="7.4" transform="translate(-3.7 -3.7)"/>',
    '<path d="M0-5 4.6 3.4H-4.6Z" transform="translate({x} {y})"/>',
    '<path d="M0-5 5 0 0 5-5 0Z" transform="translate({x} {y})"/>',
)
BANDS = 3
"""Lines with bands at most: more would hide one another."""
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 12, 40
"""Margins in pixels."""
DIGIT, TALL = 6.2, 11
"""Pixels of a small number's digit and its height."""

Box = tuple[float, float, float, float]


def frontier(entries: Sequence[dict[str, Any]], width: int, height: int, kind: str) -> str:
    """Accuracy over tokens per step: a line, a band of 95% and a marker a point for every entry; small numbers are
    thresholds, where there is room for them."""
    points = [point for entry in entries for point in entry["points"]]
    xs = _ticks(0.0, max(point["tokens_per_step"] for point in points), width / 90)
    low, high = min(point["low"] for point in points), max(point["high"] for point in points)
    ys = _ticks(low, high, height / 60, most=100.0)

    def across(x: float) -> float:
        return round(LEFT + (width - LEFT - RIGHT) * (x - xs[0]) / (xs[-1] - xs[0]), 1)

    def up(y: float) -> float:
        return round(height - BOTTOM - (height - TOP - BOTTOM) * (y - ys[0]) / (ys[-1] - ys[0]), 1)

    out = [
        f'<svg class="chart {kind}" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="accuracy over tokens per step, one line for each entry">'
    ]
    for y in ys:
        out.append(f'<path class="grid" d="M{LEFT} {up(y)}H{width - RIGHT}"/>')
        out.append(f'<text class="tick" x="{LEFT - 7}" y="{up(y) + 4}" text-anchor="end">{y:g}</text>')
    for x in xs:
        out.append(f'<path class="grid" d="M{across(x)} {TOP}V{height - BOTTOM}"/>')
        out.append(f'<text class="tick" x="{across(x)}" y="{height - BOTTOM + 17}" text-anchor="middle">{x:g}</text>')
    middle = (LEFT + width - RIGHT) / 2
    out.append(f'<text class="axis" x="{middle}" y="{height - 5}" text-anchor="middle">tokens per step</text>')
    place = f'x="13" y="{(height - BOTTOM) / 2}" transform="rotate(-90 13 {(height - BOTTOM) / 2})"'
    out.append(f'<text class="axis" {place} text-anchor="middle">accuracy (%)</text>')

    drawn = [sorted(entry["points"], key=lambda p: (p["tokens_per_step"], p["accuracy"])) for entry in entries]
    taken: list[Box] = []
    for number, row in enumerate(drawn if len(entries) <= BANDS else ()):
        ways = [across(point["tokens_per_step"]) for point in row]
        upper = " ".join(f"{a} {up(point['high'])}" for a, point in zip(ways, row, strict=True))
        lower = " ".join(f"{a} {up(point['low'])}" for a, point in zip(ways[::-1], row[::-1], strict=True))
        out.append(f'<path class="band c{number % COLOURS}" d="M{upper} {lower}Z"/>')
    for number, (entry, row) in enumerate(zip(entries, drawn, strict=True)):
        way = " ".join(f"{across(point['tokens_per_step'])} {up(point['accuracy'])}" for point in row)
        out.append(f'<path class="line c{number % COLOURS}" d="M{way}"/>')
        for point in row:
            a, b = across(point["tokens_per_step"]), up(point["accuracy"])
            taken.append((a - 5, b - 5, a + 5, b + 5))
            told = (
                f"{entry['name']}, {dial(point['setting'], point['threshold'])}: {point['accuracy']:.1f}% "
                f"[{point['low']:.1f}, {point['high']:.1f}] at {point['tokens_per_step']:.2f} tokens per step"
            )
            shape = SHAPES[number % len(SHAPES)].format(x=a, y=b)
            out.append(f'<g class="mark c{number % COLOURS}">{shape}<title>{escape(told)}</title></g>')
    for number, row in enumerate(drawn):
        for point in row:
            text, a, b = short(point["threshold"]), across(point["tokens_per_step"]), up(point["accuracy"])
            spot = _free(text, a, b, taken, (LEFT, TOP, width - RIGHT, height - BOTTOM), above=number % 2 == 1)
            if spot is not None:
                out.append(f'<text class="small c{number % COLOURS}" x="{spot[0]:.1f}" y="{spot[1]:.1f}">{text}</text>')
    return "".join([*out, "</svg>"])


def _free(text: str, x: float, y: float, taken: list[Box], frame: Box, above: bool) -> tuple[float, float] | None:
    """Where a small number beside its marker touches nothing else: the left end of its baseline."""
    wide = DIGIT * len(text)
    lower = [(x - wide / 2, y + 17), (x - wide - 7, y + 13), (x + 7, y + 13)]
    upper = [(x - wide / 2, y - 8), (x + 7, y - 4), (x - wide - 7, y - 4)]
    for left, base in upper + lower if above else lower + upper:
        box = (left, base - TALL, left + wide, base)
        inside = box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]
        if inside and not any(_touch(box, other) for other in taken):
            taken.append(box)
            return left, base
    return None


def _touch(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def legend(entries: Sequence[dict[str, Any]]) -> str:
    """The names with their markers."""
    items = [
        f'<li><svg viewBox="-8 -8 16 16" class="key mark c{number % COLOURS}" aria-hidden="true">'
        f"{SHAPES[number % len(SHAPES)].format(x=0, y=0)}</svg>{escape(entry['name'])}</li>"
        for number, entry in enumerate(entries)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def bar(row: dict[str, Any], low: float, high: float) -> str:
    """A difference with its interval on a line from low to high, which holds 0."""
    wide, tall = 150, 16

    def at(value: float) -> float:
        return round(4 + (wide - 8) * (value - low) / ((high - low) or 1), 1)

    side = "up" if row["low"] > 0 else "down" if row["high"] < 0 else "level"
    return (
        f'<svg class="bar {side}" viewBox="0 0 {wide} {tall}" aria-hidden="true">'
        f'<path class="zero" d="M{at(0)} 0V{tall}"/>'
        f'<path class="reach" d="M{at(row["low"])} {tall / 2}H{at(row["high"])}"/>'
        f'<circle cx="{at(row["difference"])}" cy="{tall / 2}" r="3.6"/></svg>'
    )


def _ticks(low: float, high: float, count: float, most: float = math.inf) -> list[float]:
    """Round numbers that hold [low, high], about `count` of them."""
    span = max(high - low, 1e-9)
    rough = span / max(2, round(count))
    power = 10 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1, 2, 2.5, 5, 10) if unit * power >= rough - 1e-12)
    first, last = math.floor(low / step + 1e-9), math.ceil(min(high, most) / step - 1e-9)
    return [round(step * k, 10) for k in range(first, max(last, first + 1) + 1)]
