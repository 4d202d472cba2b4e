"""The one error that is a user's to mend: a sentence with the cause and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RCDError(ValueError):
    """Bad input. The command line prints its text as one sentence and exits with code 2."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> RCDError:
    """An unknown name of any part: the choices are listed, the nearest is suggested."""
    names = sorted(choices)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return RCDError(f"unknown {kind} {name!r}{hint}; choose from: {', '.join(names)}.")
