"""`python scripts/settings_tables.py`: write the tables of settings in the docs from the settings themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rcd.carry.residual import Residual
from rcd.decode.config import DecodeConfig
from rcd.decode.request_settings import RequestSettings
from rcd.likelihood.settings import ScoreConfig
from rcd.serve.settings import RaySettings, ServeSettings
from rcd.settings import Entry, entries

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "decoding.md"
SERVING, DEPLOYING, EVALUATION = DOCS / "serving.md", DOCS / "deploying.md", DOCS / "evaluation.md"
BEGIN, END = "<!-- settings: written by scripts/settings_tables.py -->", "<!-- settings: end -->"


def text() -> str:
    """The tables, as they stand between the two marks."""
    own = {entry.name for entry in entries(RequestSettings)}
    engine = [entry for entry in entries(DecodeConfig) if entry.name not in own]
    parts = [
        ("Of a request: requests with different ones share a batch.", entries(RequestSettings)),
        ("Of the decoder: requests with different ones are decoded apart.", engine),
        ("Of the carry `residual`, by `Residual(...)`, `--carry residual,setting=value` or flags.", entries(Residual)),
    ]
    return "\n\n".join(f"{title}\n\n{table(found)}" for title, found in parts)


def serving() -> str:
    """The table of docs/serving.md: flags of `rcd serve`."""
    return flags(ServeSettings)


def deploying() -> str:
    """The table of docs/deploying.md: flags of `rcd serve --ray`."""
    return flags(RaySettings)


def likelihoods() -> str:
    """The table of docs/evaluation.md: settings of `Pipeline.score`, flags of `rcd score`."""
    return table(entries(ScoreConfig))


def flags(cls: Any) -> str:
    rows = ["| flag | default | must be | what it is |", "|---|---|---|---|"]
    for one in entries(cls):
        name = one.name.replace("_", "-")
        flag = f"--{name}` / `--no-{name}" if one.type is bool else f"--{name}"
        rows.append(f"| `{flag}` | {_plain(one.default)} | {_must(one)} | {one.help} |")
    return "\n".join(rows)


def table(found: list[Entry]) -> str:
    rows = ["| setting | default | must be | what it is |", "|---|---|---|---|"]
    rows += [f"| `{one.name}` | {_plain(one.default)} | {_must(one)} | {one.help} |" for one in found]
    return "\n".join(rows)


def _plain(value: Any) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else f"`{value}`"


def _must(entry: Entry) -> str:
    if entry.must:
        return entry.must
    if entry.choices is not None:
        return " or ".join(f"`{choice}`" for choice in entry.choices)
    kinds = {bool: "yes or no", tuple[str, ...]: "texts", tuple[int, ...]: "token ids"}
    if entry.name == "seed":
        return "a whole number from 0 to 2^64 - 1"
    return kinds.get(entry.type, entry.bounds)


def written(page: str, tables: str) -> str:
    """The page with these tables."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


PAGES = {PAGE: text, SERVING: serving, DEPLOYING: deploying, EVALUATION: likelihoods}

if __name__ == "__main__":
    for path, tables in PAGES.items():
        path.write_text(written(path.read_text(), tables()))
