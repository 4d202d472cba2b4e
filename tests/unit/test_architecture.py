"""Imports point one way, and every registered name leads somewhere."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import rcd
from rcd import registry

ROOT = Path(rcd.__file__).parent
# a room may import from the rooms on its left (and errors, jsons, registry, settings, terminal, documented)
ORDER = [
    "residual", "kernels", "diffusion", "carry", "data", "models", "train", "recipes", "likelihood", "decode",
    "generation", "blanks", "streaming", "asking", "texts", "scoring", "api", "serve", "evaluate", "batch", "bench",
    "cli",
]  # fmt: skip
# files that still ask a carry for its class, until they are rewritten; none may be added
STILL_ASKING = {"evaluate/ablation.py", "evaluate/calibration.py"}  # fmt: skip
MAY_ASK = ("carry", "recipes", "bench", "__init__.py")
SHARED = {"errors", "jsons", "registry", "settings", "terminal", "documented"}


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
            "collections",
            "typing",
            "functools",
            "dataclasses",
        }
        assert outside <= {"__future__"}, (path.name, outside)


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k in registry.PARTS for n in registry.names(k)])
def test_every_registered_name_resolves(kind: str, name: str) -> None:
    assert registry.get(kind, name) is not None


def test_only_the_carrys_own_rooms_know_one_by_its_class() -> None:
    """A carry declares what it is, so that one may be defined anywhere: nobody asks for a class."""
    asking = {
        str(path.relative_to(ROOT)): found
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in MAY_ASK and (found := questions(path.read_text()))
    }
    new = {path: found for path, found in asking.items() if path not in STILL_ASKING}
    assert not new, f"declare it in rcd/carry/base.py instead: {new}"
    assert asking.keys() >= STILL_ASKING, f"take these off the list: {STILL_ASKING - asking.keys()}"


IMPORTED = "from rcd.carry.base import Carry, CarryState, describe\n"


@pytest.mark.parametrize(
    "source",
    [
        "if isinstance(carry, Kind): pass",
        "isinstance(self.rules.carry, (Kind, Other))",
        "isinstance(rows.carry[0], Kind)",
        "isinstance(carry, (Carry, Kind))",
        "isinstance(x, (int, CarryState))",
        "issubclass(kind, Carry)",
        "getattr(config.carry, 'expects', False)",
        "hasattr(carry, 'refresh')",
        "getattr(look.state, 'delta', None)",
        "isinstance(delta := getattr(step.state, 'delta', None), Tensor)",
        "if type(carry) is Kind: pass",
        "type(state).__name__ == 'ResidualState'",
        "carry.__class__",
        "run.carry.__class__.__name__ == 'Residual'",
        "vars(carry)",
        "if config.carry.method == 'RCD': pass",
        "if config.method in ('RCD', 'SeqD'): pass",
        "describe(carry)['name'] == 'residual'",
        "def f(one: Carry):\n    return isinstance(one, Kind)",
        "def f(one: Carry | None = None, *, two: int = 0):\n    return hasattr(one, 'x')",
        "one: CarryState = begin()\ntype(one)",
        "after = carry.update(before)\nhasattr(after, 'delta')",
        "fresh = carry.begin(None, passes, E)\nisinstance(fresh, Kind)",
        "match carry:\n    case Kind(): pass",
        "match x:\n    case Carry(): pass",
        "from rcd.carry.residual import Residual",
        "from rcd.carry import loopholing",
        "import rcd.carry.none",
        "def f():\n    from rcd.carry.soft import SoftFeedback",
        "if TYPE_CHECKING:\n    from rcd.carry.residual import Residual",
        "from rcd import Residual",
        "import rcd\nrcd.NoCarry()",
        "import_module('rcd.carry.residual')",
    ],
)
def test_a_planted_question_is_found(source: str) -> None:
    assert questions(IMPORTED + source)


@pytest.mark.parametrize(
    "source",
    [
        "carry.expects and carry.everywhere",
        "isinstance(config.carry, str)",
        "isinstance(config.carry, Carry)",
        "isinstance(x, int) and getattr(config, 'carry') and type(error).__name__ == 'OSError'",
        "carry is None or carry == other",
        "describe(carry)['name'] == name",
        "if window == 'dual': pass",
        "state.tensors()",
        "make('residual')",
        "from rcd.carry.base import make, places",
    ],
)
def test_what_is_declared_may_be_asked(source: str) -> None:
    assert not questions(IMPORTED + source)


CONCRETE = ("Residual", "NoCarry")
"""Carries by the names that `rcd` itself gives them."""
ANYONES = ("rcd.carry.base", "rcd.carry.parse")
"""Of the room, what names no carry."""
ABOUT_A_CARRY = {"carry", "state"}
RESOLVED = {"str", "dict", "Carry"}
"""Whether a setting is a carry by now, or still a name: no question about what the carry is."""
MAKES_ONE = {"make", "begin", "refresh", "update", "cold"}


def questions(source: str) -> list[str]:
    """The lines that ask for the class of a carry or of its state, by a type, an attribute or a name."""
    tree = ast.parse(source)
    classes = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rcd.carry")
        for alias in node.names
        if alias.name[0].isupper()
    }
    subjects = ABOUT_A_CARRY | _named_after(tree, classes)

    def is_subject(node: ast.AST) -> bool:
        if isinstance(node, ast.NamedExpr | ast.Subscript):
            return is_subject(node.value)
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Attribute) and node.func.attr in MAKES_ONE - {"update"}
        return isinstance(node, ast.Name | ast.Attribute) and _last(node) in subjects

    return [
        f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node).splitlines()[0]}"
        for node in ast.walk(tree)
        if _asks(node, is_subject, classes)
    ]


def _named_after(tree: ast.AST, classes: set[str]) -> set[str]:
    """Variables that are annotated as a carry or a state, or are made by a carry."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.arg | ast.AnnAssign)
            and node.annotation is not None
            and _names(node.annotation) & classes
        ):
            found.add(node.arg if isinstance(node, ast.arg) else _last(node.target))
        made = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.func
        if made and isinstance(made, ast.Attribute) and made.attr in MAKES_ONE and _last(made.value) == "carry":
            assert isinstance(node, ast.Assign)
            found.update(_last(target) for target in node.targets)
    return found - {""}


def _asks(node: ast.AST, is_subject: Callable[[ast.AST], bool], classes: set[str]) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("rcd.carry.") and alias.name not in ANYONES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        if node.module == "rcd":
            return any(alias.name in CONCRETE for alias in node.names)
        inside = node.module == "rcd.carry" and any(alias.name != "base" for alias in node.names)
        return inside or ((node.module or "").startswith("rcd.carry.") and node.module not in ANYONES)
    if isinstance(node, ast.Attribute):
        named = node.attr in CONCRETE and _last(node.value) == "rcd"
        return named or (node.attr in ("__class__", "__dict__") and is_subject(node.value))
    if isinstance(node, ast.MatchClass):
        return _last(node.cls) in classes
    if isinstance(node, ast.Match):
        return is_subject(node.subject) and any(isinstance(case.pattern, ast.MatchClass) for case in node.cases)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        named = any(isinstance(side, ast.Attribute) and side.attr == "method" for side in sides)
        named = named or any(isinstance(side, ast.Subscript) and "describe(" in ast.unparse(side) for side in sides)
        return named and any(isinstance(part, ast.Constant) for side in sides for part in ast.walk(side)
                             if not isinstance(side, ast.Subscript))  # fmt: skip
    if isinstance(node, ast.Call) and node.args:
        what = _last(node.func)
        if what in ("isinstance", "issubclass"):
            kinds = _names(node.args[1]) - {""}
            if what == "isinstance" and kinds <= RESOLVED:
                return False
            return bool(kinds & classes) or is_subject(node.args[0])
        if what in ("import_module", "__import__"):
            return "rcd.carry." in ast.unparse(node.args[0])
        return what in ("type", "getattr", "hasattr", "vars", "dir") and is_subject(node.args[0])
    return False


def _last(node: ast.AST) -> str:
    """`carry` of `self.rules.carry`."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _names(node: ast.AST) -> set[str]:
    return {_last(part) for part in ast.walk(node)}
