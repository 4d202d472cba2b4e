"""`rcd list`: every registered part."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from rcd import registry
from rcd.errors import unknown_name


def show(
    kind: Annotated[str | None, typer.Argument(help="Only this kind: " + ", ".join(registry.PARTS) + ".")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: names by kind.")] = False,
) -> None:
    """List every registered part, by kind."""
    kind = {"families": "family", "carries": "carry"}.get(kind or "", kind)
    if kind is not None and kind.removesuffix("s") in registry.PARTS:
        kind = kind.removesuffix("s")
    if kind is not None and kind not in registry.PARTS:
        raise unknown_name("kind of part", kind, registry.PARTS)
    kinds = [kind] if kind else list(registry.PARTS)
    if as_json:
        print(json.dumps({k: registry.names(k) for k in kinds}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("kind", style="bold")
    table.add_column("name", style="cyan", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for k in kinds:
        for number, name in enumerate(registry.names(k)):
            table.add_row("" if number else k, name, _first_sentence(k, name))
    Console().print(table)


def _first_sentence(kind: str, name: str) -> str:
    part = registry.get(kind, name)
    if kind == "family":
        start = "; causal, the start of an adaptation" if part.causal else ""
        return f"{part.attention} attention on {part.backbone}{start}"
    if kind == "recipe":
        part = getattr(part, "func", part)  # a partial has its function's words
    documented = inspect.getmodule(part) if kind == "carry" else part
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return text
