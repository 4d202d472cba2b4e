"""A sweep as one page of HTML: no network, no other file, light or dark as the reader's system.

Everything that comes from a result, a name or a text is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rcd.errors import unwritable
from rcd.evaluate import charts
from rcd.evaluate.browse import items
from rcd.evaluate.campaign import Line
from rcd.evaluate.findings import PAPER, details, failed, verdict
from rcd.evaluate.skin import SCRIPT, STYLE
from rcd.evaluate.sweep import has_area
from rcd.evaluate.wording import counted, dial, short, signed

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
TARGETS = {
    "best": "{base}'s best accuracy",
    "best - 1": "one point below it",
    "one token": "{base}'s accuracy at one token a step",
}


def write(path: str | Path, found: dict[str, Any], lines: Sequence[Line]) -> Path:
    path = Path(path)
    try:
        scratch = path.with_name(f".{path.name}.writing")
        scratch.write_text(page(found, lines), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise unwritable("the report", path, error) from error
    return path


def page(found: dict[str, Any], lines: Sequence[Line]) -> str:
    """`found` is what `findings` gives, with `command` and `made` (how and where) if they are known."""
    title = f"{found['task']}: {_compared(found)}"
    parts = [_head(found, title), _verdicts(found), _failures(found)]
    if found["entries"]:
        parts += [_figure(found), *map(_comparison, found["comparisons"]), _thresholds(found)]
        parts += [_items(lines, found)]
    parts += [_settings(found), _reading(found)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _compared(found: dict[str, Any]) -> str:
    names = [entry["name"] for entry in found["entries"]]
    others = [name for name in names if name != found["base"]]
    if len(names) < 2:
        return names[0] if names else "nothing was answered"
    if found["base"] not in names:
        return ", ".join(others)
    return f"{others[0] if len(others) == 1 else f'{len(others)} others'} against {found['base']}"


def _head(found: dict[str, Any], title: str) -> str:
    sizes = {"item": found["items"], "threshold": len(found["thresholds"]), "line": len(found["entries"])}
    counts = ", ".join(counted(size, noun) for noun, size in sizes.items())
    made = found.get("made", {})
    told = [counts, *(str(made[key]) for key in ("date", "device") if key in made)]
    return f'<h1>{escape(title)}</h1><p class="soft">{escape(" · ".join(told))}</p>'


def _verdicts(found: dict[str, Any]) -> str:
    """The summary, a box for each comparison; what is said of none of them stands below."""
    out, said = [], set()
    for each in found["comparisons"]:
        text, mean = verdict(each, found), each["all"]["matched"]["mean"]
        said.add(text)
        more = "".join(f"<p>{escape(line)}</p>" for line in details(each))
        out.append(f'<div class="verdict {_side(mean)}"><b>{escape(text)}</b>{more}</div>')
    rest = [text for text in found["summary"] if text not in said]
    if not out and rest:
        out, rest = [f'<div class="verdict"><b>{escape(rest[0])}</b></div>'], rest[1:]
    return "".join([*out, *(f"<p>{escape(text)}</p>" for text in rest)])


def _side(row: dict[str, Any] | None) -> str:
    if row is None or row["low"] <= 0 <= row["high"]:
        return "level"
    return "up" if row["low"] > 0 else "down"


def _failures(found: dict[str, Any]) -> str:
    told = "".join(f"<li>{escape(line)}</li>" for line in failed(found["failures"]))
    return told and (
        f'<div class="failed"><b>Points that failed</b><ul>{told}</ul>The same command tries them again; the others '
        "are kept.</div>"
    )


def _figure(found: dict[str, Any]) -> str:
    entries = found["entries"]
    plain = all(point["setting"] == "threshold" for entry in entries for point in entry["points"])
    numbers = "commit thresholds" if plain else "thresholds, or the setting that the table of every point names"
    bands = "bands are" if len(entries) <= charts.BANDS else "the table of every point has"
    return (
        "<h2>Accuracy over tokens per step</h2><figure>"
        + charts.legend(entries)
        + charts.frontier(entries, 900, 430, "broad")
        + charts.frontier(entries, 380, 340, "narrow")
        + f"<figcaption>Up and to the right is better. Small numbers are {numbers}; {bands} 95% intervals of "
        "each accuracy by itself. Whether two lines differ is told by the paired differences below.</figcaption>"
        "</figure>"
    )


def _comparison(each: dict[str, Any]) -> str:
    base, other = escape(each["base"]), escape(each["other"])
    parts = [f"<h2>{other} against {base}</h2>", _matched(each), _tasks(each), _steps(each), _aup(each), _speed(each)]
    return "".join(parts)


def _matched(each: dict[str, Any]) -> str:
    found = each["all"]["matched"]
    rows = _differences(found, "tokens_per_step", "{:.2f}")
    one = each["all"]["one_token"]
    if rows is None:
        return '<p class="note">The two have no useful range of tokens per step in common.</p>'
    told = ""
    if one is not None:
        told = (
            f'<p class="note">At threshold 1 (one token a step): {one["base"]:.1f}% and {one["other"]:.1f}%, '
            f"{_interval(one)} points; {counted(one['gained'], 'item')} gained, {one['lost']} lost, "
            f"McNemar p {one['p']:.3g}.</p>"
        )
    head = ("tokens per step", _name(each["base"]), _name(each["other"]), "difference in points")
    return f"<h3>At equal tokens per step</h3>{_differing(head, rows)}{told}"


def _differences(found: dict[str, Any], key: str, form: str) -> list[tuple[list[str], dict[str, Any]]] | None:
    """Rows of a table of differences with the row that each bar is drawn from; the mean last."""
    if found["mean"] is None:
        return None
    unique = {form.format(row[key]): row for row in found["points"]}
    rows = [([at, f"{row['base']:.1f}", f"{row['other']:.1f}"], row) for at, row in unique.items()]
    first, last = (form.format(end) for end in found["range"])
    return [*rows, ([f"mean, {first} to {last}", "", ""], found["mean"])]


def _differing(head: Sequence[str], rows: Sequence[tuple[list[str], dict[str, Any]]]) -> str:
    low = min(0.0, *(row["low"] for _, row in rows))
    high = max(0.0, *(row["high"] for _, row in rows))
    titles = _cells((*head, ""), "th", hide=1)
    body = []
    for number, (cells, row) in enumerate(rows):
        kind = ' class="sum"' if number == len(rows) - 1 else ""
        body.append(
            f'<tr{kind}>{_cells(cells)}<td class="{_side(row)}">{_interval(row)}</td>'
            f'<td class="hide">{charts.bar(row, low, high)}</td></tr>'
        )
    return _table(titles, body)


def _interval(row: dict[str, Any]) -> str:
    return f'{signed(row["difference"])} <span class="ci">[{signed(row["low"])}, {signed(row["high"])}]</span>'


def _table(titles: str, body: Sequence[str], kind: str = "") -> str:
    head = f"<thead><tr>{titles}</tr></thead>" if titles else ""
    return f'<div class="wide"><table{kind}>{head}<tbody>{"".join(body)}</tbody></table></div>'


def _name(text: str) -> str:
    """May be broken where its parts meet."""
    return re.sub(r"([,+=_-])", r"\1<wbr>", escape(text))


def _cells(cells: Sequence[str], kind: str = "td", hide: int = 0) -> str:
    """A row's cells; the last `hide` are left out on a narrow screen."""
    marks = [' class="hide"' if number >= len(cells) - hide else "" for number in range(len(cells))]
    return "".join(f"<{kind}{mark}>{cell}</{kind}>" for cell, mark in zip(cells, marks, strict=True))


def _tasks(each: dict[str, Any]) -> str:
    if len(each["tasks"]) < 2:
        return ""
    body = []
    for task, part in each["tasks"].items():
        mean, one = part["matched"]["mean"], part["one_token"]
        cells = [
            f"<td>{escape(task)}</td><td>{part['items']:,}</td>",
            f'<td class="{_side(mean)}">{"no common range" if mean is None else _interval(mean)}</td>',
            f'<td class="{_side(one)}">{"" if one is None else _interval(one)}</td>',
        ]
        body.append(f"<tr>{''.join(cells)}</tr>")
    titles = "<th>task</th><th>items</th><th>mean at equal tokens per step</th><th>at one token a step</th>"
    return f"<h3>By task</h3>{_table(titles, body)}"


def _steps(each: dict[str, Any]) -> str:
    body = []
    for name, row in each["savings"]["steps"].items():
        if row["accuracy"] <= 0:
            continue
        what = escape(TARGETS[name].format(base=each["base"]))
        never = row["other"] is None
        times = f"× {row['ratio']:.2f} {_range(row)}" if not never else f"never reached {_range(row)}"
        other = "–" if never else f"{row['other']:.2f}"
        cells = (what, f"{row['accuracy']:.1f}%", f"{row['base']:.2f}", other, times)
        body.append(f"<tr>{_cells(cells)}</tr>")
    if not body:
        return ""
    names = (_name(each["base"]), _name(each["other"]), "times fewer steps")
    titles = _cells(("for", "accuracy", *names), "th")
    return (
        f"<h3>Steps for the same accuracy</h3>{_table(titles, body)}"
        '<p class="note">The most tokens per step at which each still has that accuracy, and their ratio: above 1 is '
        f"fewer steps.{f' In comparison, {PAPER}.' if each['as_in_the_paper'] else ''}</p>"
    )


def _range(row: dict[str, Any]) -> str:
    if row["low"] is None:
        return ""
    ends = (f"{end:.2f}" if end else "never" for end in (row["low"], row["high"]))
    return f'<span class="ci">[{", ".join(ends)}]</span>'


def _aup(each: dict[str, Any]) -> str:
    if not has_area(each["all"]):
        return ""
    body = []
    forms = {"own": "points within 5 of its own slowest", "shared": "points within 5 of the better slowest"}
    for form, what in forms.items():
        row = each["savings"]["aup"][form]
        ratio = "none" if row["ratio"] is None else f"× {row['ratio']:.2f} {_range(row)}"
        cells = (what, f"{row['base']:.1f}", f"{row['other']:.1f}", ratio)
        body.append(f"<tr>{_cells(cells)}</tr>")
    titles = _cells(("of", _name(each["base"]), _name(each["other"]), "ratio"), "th")
    return f"<h3>Accuracy under parallelism (AUP)</h3>{_table(titles, body)}"


def _speed(each: dict[str, Any]) -> str:
    head = ("tokens per second", _name(each["base"]), _name(each["other"]), "difference in points")
    rows = _differences(each["throughput"], "tokens_per_second", "{:.0f}")
    table = (
        '<p class="note">The two have no useful range of tokens per second in common.</p>'
        if rows is None
        else _differing(head, rows)
    )
    return (
        f"<h3>At equal tokens per second</h3>{table}"
        '<p class="note">Measured while answering, with whatever else ran on the machine: on a shared CPU such timings '
        "are noisy, and the intervals know only of the items. Tokens per step are exact.</p>"
    )


def _point(point: dict[str, Any]) -> str:
    """A threshold by its number, any other setting by its name as well."""
    plain = point["setting"] == "threshold"
    return escape(short(point["threshold"]) if plain else dial(point["setting"], point["threshold"]))


def _thresholds(found: dict[str, Any]) -> str:
    """Every point of every entry."""
    body = []
    for number, entry in enumerate(found["entries"]):
        for row, point in enumerate(entry["points"]):
            name = f'<span class="c{number % charts.COLOURS}">{_name(entry["name"])}</span>' if row == 0 else ""
            speed = "" if point["tokens_per_second"] is None else f"{point['tokens_per_second']:.0f}"
            cells = (
                name, _point(point),
                f'{point["accuracy"]:.1f} <span class="ci">[{point["low"]:.1f}, {point["high"]:.1f}]</span>',
                f"{point['tokens_per_step']:.2f}", f"{point['steps']:.1f}", speed, f"{point['tokens']:.0f}",
                f"{100 * point['cut_off']:.0f}%",
            )  # fmt: skip
            body.append(f"<tr>{_cells(cells, hide=3)}</tr>")
    names = ("", "threshold", "right (%)", "tokens per step", "steps", "tokens per second", "tokens", "cut off")
    titles = _cells(names, "th", hide=3)
    return f"<h2>Every point</h2>{_table(titles, body)}"


def _items(lines: Sequence[Line], found: dict[str, Any]) -> str:
    """Single answers, in a table that the script fills."""
    data, shown = items(lines, found)
    options = "".join(
        f'<option value="{k}"{" selected" if k == data["first"] else ""}>{escape(named)}</option>'
        for k, named in enumerate(data["thresholds"])
    )
    several = len(lines) > 1
    filters = {"all": "all items", "differ": "only where they differ (right or wrong)", "texts": "only other texts"}
    filters = (filters if several else {"all": "all items"}) | {"wrong": "only where none is right"}
    choices = "".join(f'<option value="{key}">{text}</option>' for key, text in filters.items())
    of = "" if shown == found["items"] else f" The first {shown:,} of {found['items']:,} items are kept in this page."
    heads = "".join(f"<th>{_name(name)}</th>" for name in ["question", "right answer", *data["entries"]])
    content = json.dumps(data).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return (
        f'<h2 id="answers">Single answers</h2><p class="note">Long texts are cut in the middle.{of}</p>'
        f'<div class="bench"><label>at <select id="at">{options}</select></label>'
        f'<label>show <select id="show">{choices}</select></label>'
        '<span><button id="back" type="button">‹</button> <button id="on" type="button">›</button></span>'
        '<span id="where" class="soft" aria-live="polite"></span></div>'
        "<noscript><p>The answers are listed by a script, which this viewer does not run.</p></noscript>"
        f'<table id="items"><thead><tr>{heads}</tr></thead><tbody></tbody></table><div id="none" hidden>None.</div>'
        f'<script type="application/json" id="data">{content}</script><script>{SCRIPT}</script>'
    )


def _settings(found: dict[str, Any]) -> str:
    rows = [("command", f'<pre class="command">{escape(found["command"])}</pre>')] if "command" in found else []
    rows += [(key, escape(str(value))) for key, value in found.get("made", {}).items()]
    for entry in found["entries"]:
        carry = ", ".join(f"{key} {value}" for key, value in entry["carry"].items() if key != "name")
        told = f"{entry['model']} ({entry['model_fingerprint']}); carry {entry['carry']['name']}"
        told += f" ({carry})" if carry else ""
        if entry.get("reference"):
            told += f"; reference {entry['reference']}"
        rows.append((entry["name"], escape(told)))
    decodes = [entry["decode"] for entry in found["entries"]]
    for number, decode in enumerate(decodes):
        if decode in decodes[:number]:
            continue
        names = [entry["name"] for entry in found["entries"] if entry["decode"] == decode]
        what = "decoding" if len(names) == len(decodes) else f"decoding of {', '.join(names)}"
        rows.append((what, escape(", ".join(f"{key} {value}" for key, value in decode.items()))))
    body = [f"<tr><td>{escape(key)}</td><td>{value}</td></tr>" for key, value in rows]
    return f"<h2>Settings</h2>{_table('', body, ' class=plain')}"


def _reading(found: dict[str, Any]) -> str:
    notes = (
        "Tokens per step: new tokens (the end token included) over passes that commit tokens or prepare a residual.",
        "Equal tokens per step: both accuracies are interpolated between the points of their own line. The range ends "
        "where the base has lost half of its best accuracy. Intervals are 95% percentiles of a bootstrap over items, "
        "the same items for both, and two made-up ones, of which each model gets one right: so equal answers to few "
        "items are no certainty. At one token a step: Bonett and Price's interval, which does the same.",
        "Intervals of a single accuracy are Wilson's, 95%.",
        "AUP: the area under accuracy over tokens per step, in which points far below the best accuracy count less and "
        "points more than 5 below the slowest point's do not count; with that limit from the line itself, and from the "
        "better of the two.",
    )
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h2>How to read this</h2><ul class=soft>{listed}</ul>"
