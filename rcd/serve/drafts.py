"""Drafts: the whole canvas of an answer as a step left it, merged where a client is slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rcd.decode.events import Step
from rcd.serve.pieces import Draft
from rcd.serve.text import Words

Cell = list[Any]
"""[token, state, new, revised, alpha, confidence, best]"""
TOKEN, STATE, NEW, REVISED, ALPHA, CONFIDENCE, BEST = range(7)


class Canvas:
    """One answer's positions, step by step. The caller sees to it that one thread uses it at a time."""

    def __init__(
        self, index: int, words: Words, length: int, ends: frozenset[int], mask: int, alternatives: int,
        canvas: Sequence[int] = (),
    ):  # fmt: skip
        self._given = {place: token for place, token in enumerate(canvas) if token != mask}
        self._index, self._words, self._length = index, words, length
        self._ends, self._mask, self._alternatives = ends, mask, alternatives
        self._cells: list[Cell] = [self._untold(place, mask) for place in range(len(canvas))]
        self._low: int | None = 0 if canvas else None
        """From where on something was written since the last draft."""
        self._step, self._final = 0, 0

    def write(self, step: Step) -> None:
        """What a step left, without telling of it yet."""
        skipped = max(0, -step.offset)
        first = step.offset + skipped
        if first > len(self._cells):  # positions that no step has told of: nothing is known of them
            self._cells += (self._untold(place, self._mask) for place in range(len(self._cells), first))
        draft, masked = step.draft.tolist(), step.masked.tolist()
        committed, revised = step.committed.tolist(), step.revised.tolist()
        confidence = step.confidence.tolist()
        alpha = None if step.alpha is None else step.alpha.tolist()
        told = step.logprobs if self._alternatives else None
        best_ids = None if told is None else told.best_ids[:, : self._alternatives].tolist()
        best = None if told is None else told.best[:, : self._alternatives].exp().tolist()
        for j in range(skipped, min(len(draft), self._length - step.offset)):
            place = step.offset + j
            sure: float | None = confidence[j]
            assert sure is not None
            predicted = not math.isnan(sure)
            found: list[Any] = []
            if predicted and best_ids is not None and best is not None:
                found = list(zip(best_ids[j], best[j], strict=True))
            state = "masked" if masked[j] else "end" if draft[j] in self._ends else "committed"
            state = "given" if place in self._given else state
            weight = alpha[j] if alpha is not None and masked[j] else None
            new, again = committed[j], revised[j]
            if place == len(self._cells):
                self._cells.append([draft[j], state, new, again, weight, sure if predicted else None, found])
                continue
            old = self._cells[place]
            if self._low is not None and place >= self._low:  # merged with a step that was not told
                new, again = new or old[NEW], again or old[REVISED]
            if not predicted and old[TOKEN] == draft[j]:
                sure, found = old[CONFIDENCE], old[BEST]
            self._cells[place] = [draft[j], state, new, again, weight, None if sure != sure else sure, found]
        self._low = first if self._low is None else min(first, self._low)
        self._step, self._final = step.number, step.final

    def _untold(self, place: int, mask: int) -> Cell:
        state = "given" if place in self._given else "masked"
        return [self._given.get(place, mask), state, False, False, None, None, []]

    def told(self, step: Step) -> Draft:
        """The draft of this step and of those written since the last one."""
        self.write(step)
        assert self._low is not None
        low, self._low = min(self._low, self._length), None
        cells = [self._shown(cell) for cell in self._cells[low:]]
        for cell in self._cells[low:]:
            cell[NEW] = cell[REVISED] = False
        return Draft(self._index, self._step, self._length, min(self._final, self._length), low, cells)

    def _shown(self, cell: Cell) -> dict[str, Any]:
        token, state, new, revised, alpha, confidence, best = cell
        text = self._words.token
        return {
            "text": "" if token == self._mask else text(token),
            "state": state,
            "new": new,
            "revised": revised,
            "alpha": None if alpha is None else round(alpha, 4),
            "confidence": None if confidence is None else round(confidence, 4),
            "best": [[text(one), round(p, 4)] for one, p in best],
        }
