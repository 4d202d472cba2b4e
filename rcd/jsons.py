"""JSON that others wrote, parsed: whatever can be wrong with it is one error."""

from __future__ import annotations

import json
from typing import Any

from rcd.errors import first_line


class NotJSON(ValueError):
    """What is wrong, as part of a sentence."""


class TooDeep(NotJSON):
    """Lists in lists in lists, deeper than they can be read."""


def parsed(text: str, *, finite: bool = False) -> Any:
    """The value; `finite` refuses NaN and Infinity, which Python reads and JSON does not have."""
    try:
        return json.loads(text, parse_constant=_no_number if finite else None)
    except RecursionError as error:
        raise TooDeep("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise NotJSON(f"{error.msg.lower()}, at {line}character {error.colno}") from error
    except ValueError as error:  # such as a number of more digits than Python reads
        raise NotJSON(first_line(error)) from error


def guessed(text: str) -> Any:
    """A value as it is written on the command line: JSON or a word of Python's where it is one, else the text."""
    try:
        return parsed(text)
    except NotJSON:
        return {"None": None, "True": True, "False": False}.get(text, text)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")
