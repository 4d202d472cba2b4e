"""The one error that is a user's to mend, and the checks that raise it."""

from __future__ import annotations

import difflib
import errno
import math
import sys
from collections.abc import Iterable
from typing import Any


class RCDError(ValueError):
    """Bad input: one sentence with the cause and the way out. The command line prints it and exits with code 2."""


class QueueFull(RCDError):
    """As many requests wait as may; the same may be asked again later."""


def told(value: object, most: int = 100) -> str:
    """A refused value as part of a sentence: no longer than that, and Python writes no number of 4,300 digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> RCDError:
    """An unknown name of any part: the choices are listed, the nearest is suggested."""
    return RCDError(f"unknown {kind} {told(name)}{_choices(name, choices)}")


def no_setting(owner: str, name: object, choices: Iterable[str]) -> RCDError:
    """Such as `carry 'residual' has no setting 'strt' (did you mean 'start'?); choose from: ...`"""
    return RCDError(f"{owner} has no setting {told(name)}{_choices(name, choices)}")


def _choices(name: object, choices: Iterable[str]) -> str:
    names = sorted(choices)
    return f"{meant(name, names)}; choose from: {', '.join(names)}."


def meant(name: object, choices: Iterable[str]) -> str:
    """A suggestion of the nearest choice; nothing where none is near."""
    near = difflib.get_close_matches(str(name), list(choices), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def one_of(kind: str, name: object, choices: Iterable[str]) -> None:
    choices = list(choices)
    if name not in choices:
        raise unknown_name(kind, name, choices)


LARGEST = sys.float_info.max
"""A whole number may be larger, and is then no float."""


def number(name: str, value: Any, *, least: float, most: float = math.inf, why: str = "", below: bool = False) -> None:
    """A finite number in [least, most], or with `below` in [least, most)."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
    if not (good and least <= value <= most) or (below and value == most):
        bounds = (
            f"in [{least:g}, {most:g}{')' if below else ']'}" if most < math.inf else f"a number of {least:g} or more"
        )
        raise RCDError(f"{name} must be {bounds}, not {told(value)}{'; ' + why if why else ''}.")


def whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """A whole number in [least, most]."""
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < least or (most is not None and value > most):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise RCDError(f"{name} must be a whole number {bounds}, not {told(value)}.")
    return int(value)


REASONS = {
    errno.ENOENT: "it is not there",
    errno.EACCES: "that is not allowed here",
    errno.EPERM: "that is not allowed here",
    errno.EROFS: "that place can only be read",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk's quota is used up",
    errno.ENOTDIR: "a part of its path is a file",
    errno.EEXIST: "a file of that name is in the way",
    errno.EISDIR: "it is a folder",
    errno.ENAMETOOLONG: "its name is too long",
}


def reason(error: Exception) -> str:
    """Why a file could not be read or written, as a part of a sentence."""
    if not isinstance(error, OSError):
        return "its content is damaged"
    return REASONS.get(error.errno or 0, (error.strerror or type(error).__name__).lower())


def first_line(error: BaseException) -> str:
    """An error of another library, as part of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def out_of_memory(error: BaseException) -> bool:
    """Whether a machine or a GPU had no room; torch says so in several ways."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def unwritable(what: str, path: object, error: OSError, way_out: str = "give another folder") -> RCDError:
    """Such as `the results cannot be written to runs/a (the disk is full); give another folder.`"""
    return RCDError(f"{what} cannot be written to {path} ({reason(error)}); {way_out}.")
