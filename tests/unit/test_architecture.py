"""Imports point one way, and every registered name leads somewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rcd
from rcd import registry

ROOT = Path(rcd.__file__).parent
# a room may import from the rooms on its left (and errors, registry, settings)
ORDER = [
    "residual", "kernels", "diffusion", "carry", "data", "models", "train", "recipes", "decode", "engine", "api",
    "evaluate", "bench", "cli",
]  # fmt: skip
SHARED = {"errors", "registry", "settings"}


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "rcd" else None


def imports(path: Path) -> set[str]:
    """Modules imported, but for those that only a type checker sees."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "rcd")
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).with_suffix("").parts[0]
    for module in imports(path):
        target = room(module)
        if target is None or target in SHARED or own in ("__init__", "__main__", *SHARED):
            continue
        if own == "cli" and target not in ORDER:
            continue  # a name of the public API
        assert ORDER.index(target) <= ORDER.index(own), f"{own} imports {module}, which stands above it"


def test_the_residual_room_needs_torch_alone() -> None:
    for path in (ROOT / "residual").glob("*.py"):
        outside = {module.split(".")[0] for module in imports(path)} - {
            "rcd",
            "torch",
            "math",
            "typing",
            "functools",
            "dataclasses",
        }
        assert outside <= {"__future__"}, (path.name, outside)


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in registry.PARTS for n in registry.names(k)])
def test_every_registered_name_resolves(kind: str, name: str) -> None:
    assert registry.get(kind, name) is not None


def test_no_step_and_no_window_names_a_carry() -> None:
    """Adding a carry must not touch the engines."""
    for path in (ROOT / "decode").glob("*.py"):
        assert "carry.residual" not in path.read_text() and "carry.none" not in path.read_text()
