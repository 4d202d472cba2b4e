r"""Canvases as callers write them: a text with `[MASK]` or `[MASK:12]` where tokens are wanted, or token ids.

    The capital is [MASK:3], on the [MASK].       \[MASK] is the text itself

One space directly before a mask is left out: in most tokenizers a word begins with its space, so that the first token
that is filled in brings it. Words behind a mask are encoded as the continuation of a text, not as its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from numbers import Integral, Real
from typing import Any

from rcd.errors import RCDError

MASK = re.compile(r"(\\?)\[MASK(?::([^\[\]]*))?\]")
ANCHORS = ("\n", "a", "1", ")")
"""Texts behind which words may be encoded as a continuation; none suits all tokenizers and all words."""
Encode = Callable[[str, bool], list[int]]
"""Words as token ids; True: they stand behind a mask."""


def parts(text: str) -> Iterator[str | int]:
    """The words of a text, and numbers of masks between them."""
    words, at = "", 0
    for found in MASK.finditer(text):
        words, at = words + text[at : found.start()], found.end()
        if found[1]:
            words += found[0][1:]
            continue
        if words := words.removesuffix(" "):
            yield words
        yield _count(found)
        words = ""
    if words := words + text[at:]:
        yield words


def read(text: str, encode: Encode, mask: int, most: int) -> list[int]:
    """A text with masks as token ids, at most so many; `encode` knows the words."""
    ids: list[int] = []
    behind = False
    for part in parts(text):
        if isinstance(part, int):
            if len(ids) + part > most:
                raise RCDError(f"the canvas has more than {most} tokens, the most there is room for; shorten it.")
            ids += [mask] * part
            behind = True
        else:
            ids += encode(part, behind)
    return ids


class Spelling:
    """A tokenizer for words that begin a text, and for those that continue one.

    behind a mask   ". is"   as a text of its own   ▁ . ▁is      as a continuation   . ▁is
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._unknown = getattr(tokenizer, "unk_token_id", None)
        self._anchors = [(text, ids) for text in ANCHORS if (ids := self._ids(text)) and self._unknown not in ids]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def __call__(self, words: str, behind: bool) -> list[int]:
        return self.placed(words, behind)[1]

    def placed(self, words: str, behind: bool) -> tuple[str, list[int]]:
        """(what is put before the words, their ids). It is the first that the words leave as it is, that keeps them
        known, and with which they are decoded as they were written; else the first that keeps them known."""
        alone = "", self._ids(words)
        if not behind:
            return alone
        known: list[tuple[str, list[int]]] = []
        apart: list[tuple[str, list[int]]] = []
        for anchor, before in self._anchors:
            whole = self._ids(anchor + words)
            if whole[: len(before)] != before:
                continue
            found = anchor, whole[len(before) :]
            apart.append(found)
            if self._unknown in found[1]:
                continue
            known.append(found)
            if self._text(whole) == self._text(before) + words:
                return found
        if self._unknown not in alone[1]:
            known.append(alone)
        return next(iter([*known, *apart]), alone)

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def contexts(self, text: str) -> list[str]:
        """The words of a canvas, each with what it is encoded behind."""
        found, behind = [], False
        for part in parts(text):
            if isinstance(part, str):
                found.append(self.placed(part, behind)[0] + part)
            behind |= isinstance(part, int)
        return found


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
