r"""Canvases as callers write them: a text with `[MASK]` or `[MASK:12]` where tokens are wanted, or token ids.

    The capital is [MASK:3], on the [MASK].       \[MASK] is the text itself

One space directly before a mask is left out: in most tokenizers a word begins with its space, so that the first token
that is filled in brings it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from rcd.errors import RCDError

MASK = re.compile(r"(\\?)\[MASK(?::([^\[\]]*))?\]")


def read(text: str, encode: Callable[[str], list[int]], mask: int, most: int) -> list[int]:
    """A text with masks as token ids, at most so many; `encode` knows the words."""
    ids: list[int] = []
    words, at = "", 0
    for found in MASK.finditer(text):
        words, at = words + text[at : found.start()], found.end()
        if found[1]:
            words += found[0][1:]
            continue
        words = words.removesuffix(" ")
        count = _count(found)
        if len(ids) + count > most:
            raise RCDError(f"the canvas has more than {most} tokens, the most there is room for; shorten it.")
        ids += [*(encode(words) if words else ()), *[mask] * count]
        words = ""
    words += text[at:]
    return [*ids, *(encode(words) if words else ())]


def _count(found: re.Match[str]) -> int:
    if found[2] is None:
        return 1
    digits = found[2] if found[2].isascii() and found[2].isdigit() and len(found[2]) < 10 else "0"
    if not int(digits):
        raise RCDError(
            f"{found[0][:40]!r} is no number of masks; write such as [MASK:12], or \\[MASK where it is meant as text."
        )
    return int(digits)


def token_ids(canvas: Any) -> list[int]:
    """A canvas that is no text."""
    given = canvas.tolist() if hasattr(canvas, "tolist") else canvas
    if not isinstance(given, list | tuple):
        raise RCDError(f"a canvas is a text with [MASK:12] where tokens are wanted, or token ids, not {_kind(canvas)}.")
    odd = [token for token in given if isinstance(token, bool) or not isinstance(token, Integral)]
    if odd:
        raise RCDError(f"the token ids of a canvas are whole numbers, not {_kind(odd[0])}.")
    return [int(token) for token in given]


def single(canvas: Any) -> bool:
    """One canvas rather than several."""
    if isinstance(canvas, str):
        return True
    if hasattr(canvas, "tolist") and canvas.ndim:
        return bool(canvas.ndim == 1)
    if not isinstance(canvas, list | tuple):
        token_ids(canvas)  # which refuses it
    return all(isinstance(one, Real) for one in canvas)


def each(canvas: Any, prompts: int) -> list[Any]:
    """One for every prompt: the same for all, or one of each, None where nothing is given."""
    if canvas is None or single(canvas):
        return [canvas] * prompts
    if len(canvas) != prompts:
        raise RCDError(f"{prompts} prompts need {prompts} canvases (None where nothing is given), not {len(canvas)}.")
    return list(canvas)


def _kind(value: Any) -> str:
    return type(value).__name__
