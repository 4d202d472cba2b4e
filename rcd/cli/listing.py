"""`rcd list`: every registered part."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from rcd import registry
from rcd.errors import unknown_name

MODEL = "model"
"""The bundled checkpoints, beside the registered parts."""
KINDS = (*registry.PARTS, MODEL)


def show(
    kind: Annotated[str | None, typer.Argument(help="Only this kind: " + ", ".join(KINDS) + ".")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: names by kind.")] = False,
) -> None:
    """List every registered part, by kind."""
    kind = {"families": "family", "carries": "carry"}.get(kind or "", kind)
    if kind is not None and kind.removesuffix("s") in KINDS:
        kind = kind.removesuffix("s")
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of part", kind, KINDS)
    parts = {k: _parts(k) for k in ([kind] if kind else KINDS)}
    if as_json:
        print(json.dumps({k: list(found) for k, found in parts.items()}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("kind", style="bold")
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for k, found in parts.items():
        for number, (name, words) in enumerate(found.items()):
            table.add_row("" if number else k, name, words)
    Console().print(table)


def _parts(kind: str) -> dict[str, str]:
    """Name -> what it is."""
    if kind != MODEL:
        return {name: _first_sentence(kind, name) for name in registry.names(kind)}
    from rcd.models import bundled

    if not (bundled.ASSETS / bundled.MANIFEST).is_file():
        return {}
    return {bundled.PREFIX + name: model["about"] for name, model in bundled.manifest().items()}


def _first_sentence(kind: str, name: str) -> str:
    part = registry.get(kind, name)
    if kind == "family":
        start = "; causal, the start of an adaptation" if part.causal else ""
        return f"{part.attention} attention on {part.backbone}{start}"
    if kind == "task":
        return str(part.about)
    if kind == "recipe":
        if part().about:
            return str(part().about)
        part = getattr(part, "func", part)  # a partial has its function's words
    documented = inspect.getmodule(part) if kind == "carry" else part
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return text
