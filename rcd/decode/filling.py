"""An answer of which some tokens are given: what a caller's canvas says, and which parts of it are to be decoded.

    prompt | 7 [M] [M] 9 [M]     given  7 . . 9 .     the last given token is the fourth

Given tokens are never predicted, committed or revised. They all stand in the answer: an end token (or a stop string)
before the last of them ends nothing, and the text ends at the first one from there on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

from rcd.errors import RCDError
from rcd.models.lm import ModelSettings


class Piece(NamedTuple):
    """A pass over tokens that are decided, in blocks of `unit` from `base` on."""

    start: int
    end: int
    unit: int
    base: int = 0


class Segment(NamedTuple):
    """Blocks with masks that follow one another, and what is read before them, beginning at `read`."""

    read: int
    start: int
    until: int


@dataclass(frozen=True)
class Filling:
    """An answer's positions."""

    ids: tuple[int, ...] = ()
    """As many as the answer has, masks where it is decoded; none where nothing is given."""
    mask: int = -1
    last: int = 0
    """The place of the last given token."""
    ended: bool = False
    """Whether that is an end token: nothing behind it is part of the answer."""

    @classmethod
    def of(cls, canvas: Sequence[int], new: int, mask: int, ends: Iterable[int], early: bool) -> Filling:
        """A canvas as the beginning of `new` positions. With `early`, masks behind an end token that is given become
        end tokens at once, as they do behind one that is committed (`rcd.decode.stopping.settle`)."""
        fixed = [place for place, token in enumerate(canvas) if token != mask]
        if not fixed:
            return cls()
        last, behind = fixed[-1], new - fixed[-1] - 1
        ended = canvas[last] in set(ends)
        filler = canvas[last] if ended and early else mask
        return cls((*canvas[: last + 1], *[filler] * behind), mask, last, ended)

    def __bool__(self) -> bool:
        return bool(self.ids)

    def settled(self, ids: list[int]) -> None:
        """Append the given tokens that follow the beginning of an answer; in place."""
        while len(ids) < len(self.ids) and self.ids[len(ids)] != self.mask:
            ids.append(self.ids[len(ids)])

    def given(self, tokens: int) -> int:
        """How many of the first so many tokens are given."""
        return sum(token != self.mask for token in self.ids[:tokens])

    def masks(self, start: int, end: int) -> int:
        """Of the positions in between, where something is given."""
        return sum(token == self.mask for token in self.ids[max(0, start) : max(0, end)])

    def segments(self, prompt: int, origin: int, b: int, new: int) -> Iterator[Segment]:
        """Where blocks begin at `origin`: those that have masks. What is given as whole blocks is only read.

        prompt of 2, b = 2:  7 8 | [M] [M] | 5 6 | [M] 9      (0, 2, 4), (4, 6, 8)
        """
        begin, end = origin, prompt + new
        if not self:
            yield Segment(0, origin, end)
            return
        if self.ended:
            end = min(end, origin + ((prompt + self.last - origin) // b + 1) * b)
        read = 0
        while begin < end:
            until = begin
            while until < end and self.masks(until - prompt, min(until + b, prompt + new) - prompt):
                until += b
            if until > begin:
                yield Segment(read, begin, min(until, prompt + new))
                read = until
            begin = max(until, begin + b)


def check_canvas(canvas: Sequence[int], new: int, model: ModelSettings, ends: Sequence[int], which: str = "") -> None:
    """Refuse what cannot be filled in. `ends`: the tokens that end the answer."""
    what = f"the canvas{which and f' of {which}'}"
    if not canvas:
        return
    if not all(isinstance(token, Integral) for token in canvas):
        raise RCDError(f"{what} must be token ids, a list of whole numbers, where it is no text.")
    bad = next((token for token in canvas if not 0 <= token < model.vocab_size), None)
    if bad is not None:
        raise RCDError(f"{what} has the token id {bad}, outside the vocabulary of {model.vocab_size}.")
    if len(canvas) > new:
        raise RCDError(
            f"{what} has {len(canvas)} tokens and max_new_tokens is {new}; leave it out, or take {len(canvas)} or more."
        )
    filling = Filling.of(canvas, new, model.mask_token_id, ends, early=True)
    if filling and not filling.masks(0, new):
        why = "no mask before its end token" if model.mask_token_id in canvas or filling.ended else "no mask"
        raise RCDError(f"{what} has {why}, so that there is nothing to fill in; put a mask where a token is wanted.")


def split(prompt: Sequence[int], mask: int) -> tuple[list[int], list[int]]:
    """A prompt with masks: (what stands before the first, the canvas from there on)."""
    ids = list(prompt)
    at = ids.index(mask) if mask in ids else len(ids)
    return ids[:at], ids[at:]


def alone(canvas: Sequence[int], mask: int) -> tuple[list[int], list[int]]:
    """The same of a canvas that has no prompt; one without a mask is no plain prompt, but a mistake."""
    if canvas and mask not in canvas:
        raise RCDError(
            "the canvas has no mask, so that there is nothing to fill in; put a mask where a token is wanted."
        )
    return split(canvas, mask)
