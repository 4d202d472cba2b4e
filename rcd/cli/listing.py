"""`rcd list`: every registered part."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from rcd import registry
from rcd.errors import unknown_name

MODEL = "model"
"""The bundled checkpoints, beside the registered parts."""
WITH_WORDS = ("rcd.carry.", "rcd.residual.", "rcd.diffusion.", "rcd.decode.")
"""Rooms whose parts are described by their docstrings."""
KINDS = (*registry.PARTS, MODEL)
TRAINED = (
    "What the checkpoint's rcd.json says; `trained,t_res=0.95` changes a setting of it, as `NAME,t_res=0.95` does."
)
"""No part of its own, but a name for `--carry`."""


def show(
    kind: Annotated[str | None, typer.Argument(help="Only this kind: " + ", ".join(KINDS) + ".")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: kind, name, what it is.")] = False,
) -> None:
    """List every registered part, by kind."""
    kind = {"families": "family", "carries": "carry"}.get(kind or "", kind)
    if kind is not None and kind.removesuffix("s") in KINDS:
        kind = kind.removesuffix("s")
    if kind is not None and kind not in KINDS:
        raise unknown_name("kind of part", kind, KINDS)
    parts = {k: _parts(k) for k in ([kind] if kind else KINDS)}
    if as_json:
        print(json.dumps(parts, ensure_ascii=False))
        return
    if not sys.stdout.isatty():  # a line each, for a pager or grep, however long
        for k, found in parts.items():
            print(*(f"{k:<8} {name:<28} {words}" for name, words in found.items()), sep="\n")
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
        found = {name: _first_sentence(kind, name) for name in registry.names(kind)}
        return {"trained": TRAINED, **found} if kind == "carry" else found
    from rcd.models import bundled

    if not (bundled.ASSETS / bundled.MANIFEST).is_file():
        return {}
    return {bundled.PREFIX + name: model["about"] for name, model in bundled.manifest().items()}


def _first_sentence(kind: str, name: str) -> str:
    written = _written(registry.PARTS[kind][name], whole=kind == "carry")
    if written is not None:
        return _first(written) if kind != "commit" else " ".join([_first(written), *_origin(name)])
    part = registry.get(kind, name)
    if kind == "family":
        start = "; causal, the start of an adaptation" if part.causal else ""
        shift = "; outputs predict the next position" if part.shift else ""
        return f"{part.attention} attention on {part.backbone}{shift}{start}"
    if kind == "task":
        return str(part.about)
    if kind == "recipe":
        if part().about:
            return str(part().about)
        part = getattr(part, "func", part)  # a partial has its function's words
    return _first(inspect.getdoc(inspect.getmodule(part) if kind == "carry" else part) or "")


def _origin(name: str) -> list[str]:
    """Where a commit rule is from, and the setting that it was published with."""
    rule = registry.get("commit", name)
    said = [("From", rule.source), ("Published with", rule.published)] if hasattr(rule, "source") else []
    return [f"{what}: {text}." for what, text in said if text]


def _first(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _written(place: str, whole: bool) -> str | None:
    """The words of a function, a class or a value (`whole`: of its module), read from the source, since importing a
    part imports torch; None where there is none to read."""
    module, attribute = place.split(":")
    found = find_spec(module) if module.startswith(WITH_WORDS) else None
    if found is None or found.origin is None:
        return None
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    if whole:
        return ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute:
            return ast.get_docstring(node)
    for node, below in pairwise(tree.body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute and isinstance(below, ast.Expr):
            return str(ast.literal_eval(below.value))
    return None
