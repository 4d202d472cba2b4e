"""The one error that is a user's to mend, and the checks that raise it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


class RCDError(ValueError):
    """Bad input: one sentence with the cause and the way out. The command line prints it and exits with code 2."""


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> RCDError:
    """An unknown name of any part: the choices are listed, the nearest is suggested."""
    names = sorted(choices)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return RCDError(f"unknown {kind} {name!r}{hint}; choose from: {', '.join(names)}.")


def one_of(kind: str, name: object, choices: Iterable[str]) -> None:
    choices = list(choices)
    if name not in choices:
        raise unknown_name(kind, name, choices)


def number(name: str, value: Any, *, least: float, most: float = math.inf, why: str = "") -> None:
    """A finite number in [least, most]."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not (good and least <= value <= most):
        bounds = f"in [{least:g}, {most:g}]" if most < math.inf else f"a number of {least:g} or more"
        raise RCDError(f"{name} must be {bounds}, not {value!r}{'; ' + why if why else ''}.")


def whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """A whole number in [least, most]."""
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < least or (most is not None and value > most):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise RCDError(f"{name} must be a whole number {bounds}, not {value!r}.")
    return int(value)
