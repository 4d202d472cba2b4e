"""What `help` shows of a class of values: its fields, with the texts that stand below them in the source."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def texts_below(cls: type) -> dict[str, str]:
    """The docstrings of a class's fields; none where its source is not at hand."""
    try:
        (made,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError):
        return {}
    body = made.body if isinstance(made, ast.ClassDef) else []
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip


class Doc:
    """A class's docstring with more below it, made when somebody asks for it."""

    def __init__(self, own: str | None, more: Callable[[], str]):
        self.own, self.more = inspect.cleandoc(own or ""), more

    def __get__(self, instance: Any, owner: type) -> str:
        return f"{self.own}\n\n{self.more()}"


def documented(cls: type[T]) -> type[T]:
    """A dataclass whose help names its fields."""
    own = cls.__doc__

    def fields() -> str:
        below = {name: text for base in reversed(cls.__mro__[:-1]) for name, text in texts_below(base).items()}
        return "Fields:\n" + "\n".join(
            listed(field.name, str(field.type), below.get(field.name, "")) for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        )  # fmt: skip

    cls.__doc__ = Doc(own, fields)  # type: ignore[assignment]
    return cls


def listed(name: str, what: str, text: str) -> str:
    """A field, what it must be or is, and below it what it means."""
    lines = textwrap.wrap(" ".join(text.split()), 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join([f"    {name}: {what}", *lines])
